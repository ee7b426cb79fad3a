"""Settings, checked when they are made: an impossible value never reaches a batch. Those that GTPO and GRPO-S share are
here.
"""

import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from gtpo_verl.errors import did_you_mean

Config = TypeVar("Config")

USUAL_SUMS = (1.0, 1.1)  # of base reward and entropy weight: the total is conserved; the late experiments of 2508.04349
LOWEST_FLOOR = 1e-30  # nats; sums of its inverse stay far from the end of float32

Mean = Literal["arithmetic", "geometric"]
GroupOrBatch = Literal["group", "batch"]
ZeroToOne = Annotated[float, 0, 1]  # the ends of a range, both in it
NotNegative = Annotated[float, 0, math.inf]


class Settings:
    """Base of a config: every field must be what its type says, a word of a `Literal`, true or false, a whole number
    above 0, a finite number, or one in the range that an `Annotated` ends with. Other types are not looked at.
    """

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self), include_extras=True).items():
            check(name, getattr(self, name), kind)


def check(name: str, value: Any, kind: Any) -> None:
    """Refuse a setting that is not of a kind, as `Settings` says."""
    origin, details = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):  # a kind, or None
        if value is not None:
            check(name, value, details[0])
    elif origin is Literal:
        choice(name, value, details)
    elif origin is Annotated:
        low, high = details[1:]
        if not low <= number(name, value) <= high:
            raise ValueError(f"{name} must be in [{low:g}, {high:g}], got {value}")
    elif kind is float:
        number(name, value)
    elif kind is bool and not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")
    elif kind is int and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"{name} must be a whole number, at least 1, got {value!r}")


def config_from(kind: type[Config], mapping: Mapping[str, Any]) -> Config:
    """A config from a mapping such as a Hydra node. Raises ValueError for an unknown key or an impossible value."""
    known = [item.name for item in fields(kind)]  # type: ignore[arg-type]
    for key in mapping:
        if key not in known:
            hint = did_you_mean(str(key), known, cutoff=0.5) or f"; known are {', '.join(known)}"
            raise ValueError(f"there is no setting {key!r}{hint}")
    return kind(**{str(key): mapping[key] for key in mapping})


def run_settings(kind: type) -> dict[str, Any]:
    """The keys of a run under `algorithm.<name>`, with their defaults: the dataclass is the only place of a default."""
    return {item.name: item.default for item in fields(kind)}


@dataclass(frozen=True, kw_only=True)
class ShapingConfig(Settings):
    """What GTPO and GRPO-S have in common; use one of the two subclasses.

    negatives: shaped reward of wrong responses: `zero` (early text, eq. 2), `inverse` (early eq. 15) or `based_inverse`
    (late eq. 5).
    mean: the mean a value is divided by to become a weight, `arithmetic` or `geometric` (early eqs. 3, 19; late
    appendix C).
    scope: whose entropies are compared, those of the `group` or of the whole `batch`.
    normalization: the set whose mean and standard deviation normalise a reward: `all`, `joint`, `within` or `none`
    (docs/reference/equations.md).
    norm_scope: that set within the `group` or over the `batch`.
    entropy_clip: clamp of the entropies in nats, (lo, hi), or None.
    entropy_floor: lower bound of the entropies in nats, applied after the clamp; above 0, because wrong responses use
    1/H.
    degenerate: `zero` leaves groups of one polarity out of everything with advantage 0, `shape` treats them like any
    other.
    preserve_sign: clamp an advantage whose sign contradicts the verdict to 0.
    length_penalty: which penalty `length_penalty_for` computes; the advantage functions apply the tensor they are
    given.
    length_denominator: of the soft penalty, `cache` (L1, DAPO eq. 13) or `max` (L2, as the early eq. 14 prints it).
    gamma: γ1 of the group-relative penalty, in (0.5, 1].
    """

    negatives: Literal["zero", "inverse", "based_inverse"] = "based_inverse"
    mean: Mean = "arithmetic"
    scope: GroupOrBatch = "group"
    normalization: Literal["all", "joint", "within", "none"] = "all"
    norm_scope: GroupOrBatch = "group"
    entropy_clip: tuple[float, float] | None = None
    entropy_floor: float = 1e-6
    degenerate: Literal["zero", "shape"] = "zero"
    preserve_sign: bool = False
    length_penalty: Literal["none", "soft", "grop"] = "none"
    length_denominator: Literal["cache", "max"] = "cache"
    gamma: float = 0.75

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.entropy_clip is not None:
            object.__setattr__(self, "entropy_clip", interval("entropy_clip", self.entropy_clip))
        if self.entropy_floor < LOWEST_FLOOR:
            raise ValueError(
                f"entropy_floor must be above 0 (wrong responses use 1/H), at least {LOWEST_FLOOR:g}, got "
                f"{self.entropy_floor}"
            )
        check_gamma(self.gamma)

    @property
    def compares_batch(self) -> bool:
        """Whether the entropies of all groups are compared."""
        return self.scope == "batch"


def check_gamma(gamma: float) -> None:
    """Refuse a γ1 outside (0.5, 1]: easy (share >= γ1) and hard (share <= 1 - γ1) groups would overlap."""
    if not 0.5 < number("gamma", gamma) <= 1:
        raise ValueError(f"gamma must be in (0.5, 1], else easy and hard groups overlap, got {gamma}")


def choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Refuse a setting that is none of the `allowed` words, with the closest."""
    if value not in allowed:
        raise ValueError(
            f"{name} must be one of {', '.join(allowed)}, got {value!r}{did_you_mean(str(value), allowed, cutoff=0.5)}"
        )


def check_shares(base_name: str, base: float, weight_name: str, weight: float) -> None:
    """Refuse a base reward and an entropy weight that are both 0; warn of a sum that is not a usual one."""
    if base + weight == 0:
        raise ValueError(f"{base_name} and {weight_name} must not both be 0: no reward would be left")
    if all(abs(base + weight - usual) > 1e-9 for usual in USUAL_SUMS):
        warnings.warn(
            f"{base_name} + {weight_name} = {base + weight:.6g}: rewards of correct responses average that, not 1 or "
            "the 1.1 of the late experiments of arXiv 2508.04349.",
            stacklevel=2,  # here, not at the caller: once a process is enough
        )


def number(name: str, value: Any) -> float:
    """The value of a setting, which must be a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return value


def interval(name: str, value: Any) -> tuple[float, float]:
    """Two bounds, 0 <= lo <= hi."""
    # A Hydra list is neither a tuple nor a list; a string is iterable too.
    bounds = () if isinstance(value, str) or not hasattr(value, "__iter__") else tuple(value)
    if len(bounds) != 2:
        raise ValueError(f"{name} must be two numbers [lo, hi] or null, got {value!r}")
    low, high = (float(number(name, bound)) for bound in bounds)
    if not 0 <= low <= high:
        raise ValueError(f"{name} needs 0 <= lo <= hi, got [{low}, {high}]")
    return low, high
