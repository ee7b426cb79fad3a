"""The registry of methods: one entry a method, read by training, planning, reports and plots.

A method of this package is listed in `_BUILT_IN`; another package adds one by an entry point of the group
`gtpo_verl.algorithms` whose value is an `Algorithm`.
"""

import importlib.metadata
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from gtpo_verl.algorithms.batch import AdvantageOutput, Batch
from gtpo_verl.algorithms.checks import check_batch, check_tokens
from gtpo_verl.algorithms.config import choice, config_from
from gtpo_verl.errors import UserError, choose_from

ENTRY_POINTS = "gtpo_verl.algorithms"
INPUTS = ("entropy", "rewards", "old_log_probs")

# The order is that of tables and plots: the baseline first.
_BUILT_IN = (
    "gtpo_verl.algorithms.grpo:DAPO",
    "gtpo_verl.algorithms.gtpo:GTPO",
    "gtpo_verl.algorithms.grpo_s:GRPO_S",
    "gtpo_verl.algorithms.grpo:GRPO",
    "gtpo_verl.algorithms.other_losses:DR_GRPO",
    "gtpo_verl.algorithms.forking:FORK20",
    "gtpo_verl.algorithms.forking:RANDOM20",
    "gtpo_verl.algorithms.controls:DAPO_BLAME",
    "gtpo_verl.algorithms.controls:GTPO_SHUFFLED",
    "gtpo_verl.algorithms.entropy_shaping:ENTROPY_BONUS",
    "gtpo_verl.algorithms.entropy_shaping:EAPO",
    "gtpo_verl.algorithms.entropy_shaping:POLARITY_ENTROPY",
    "gtpo_verl.algorithms.response_entropy:EDA",
    "gtpo_verl.algorithms.response_entropy:EMPG",
    "gtpo_verl.algorithms.probability:AR",
    "gtpo_verl.algorithms.probability:PROB_MASK",
    "gtpo_verl.algorithms.probability:STARE_O1",
    "gtpo_verl.algorithms.probability:STARE_C2",
    "gtpo_verl.algorithms.verdict:W_REINFORCE",
    "gtpo_verl.algorithms.verdict:PSR",
    "gtpo_verl.algorithms.verdict:NSR",
    "gtpo_verl.algorithms.verdict:QAE",
    "gtpo_verl.algorithms.verdict:RL_ZVP",
    "gtpo_verl.algorithms.other_losses:KL_COV",
    "gtpo_verl.algorithms.other_losses:CLIP_COV",
    "gtpo_verl.algorithms.other_losses:GSPO",
    "gtpo_verl.algorithms.other_losses:CE_GPPO",
    "gtpo_verl.algorithms.other_losses:ASPO",
    "gtpo_verl.algorithms.other_losses:DCPO_CLIP",
    "gtpo_verl.algorithms.mixed_policy:DAPO_MIXED",
    "gtpo_verl.algorithms.mixed_policy:LUFFY",
)


@dataclass(frozen=True, kw_only=True)
class Style:
    """How a method looks in every plot: a colour on light and on dark pages, a marker of Vega, dashes (None: solid)."""

    light: str
    dark: str
    marker: str
    dashes: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """One method of credit assignment.

    name: the name in `algorithm(name)` and of the preset `algo=`. label: as the paper writes it.
    level: what gets an advantage of its own, `token`, `sequence`, or `outcome` (the verdict alone).
    needs: the optional fields of a `Batch` that it reads.
    config: its dataclass; `config()` is the published setting. Its fields are the keys `algorithm.<name>.*` of a run.
    compute: the function behind `advantages`.
    verl_estimator: the estimator of verl's own that training runs in place of `compute`, or None.
    loss, aggregation: `policy_loss.loss_mode` and `loss_agg_mode` of its objective; the default is DAPO's.
    changes: further configuration keys, or prefixes ending with a dot, in which an arm with this method may differ from
    another.
    needs_several_updates: at ratios of 1, that is with one update a step, its loss is DAPO's but for the aggregation.
    trains_without_contrast: it trains on groups of one polarity too, which dynamic sampling would take from it.
    guide: how rows of a guiding policy get their advantages (`mixed_policy.guided_advantages`): `alike`, as any other
    row; `dapo`, DAPO's, and the method sees the other rows alone; `unshaped`, the method reads `Batch.guide` and gives
    them a reward that entropy does not shape; None: it has no rule for them.
    advantage_ns: nanoseconds a valid token on one CPU core, for `plan` (benchmarks/bench_methods.py).
    style: in plots; None takes the next free one.
    """

    name: str
    label: str
    level: str
    needs: frozenset[str]
    config: type
    compute: Callable[[Batch, Any], AdvantageOutput]
    loss: str = "vanilla"
    aggregation: str = "token-mean"
    verl_estimator: str | None = None
    changes: tuple[str, ...] = ()
    needs_several_updates: bool = False
    trains_without_contrast: bool = False
    guide: str | None = None
    advantage_ns: float = 50.0
    style: Style | None = None

    def __post_init__(self) -> None:
        choice(f"level of {self.name}", self.level, ("token", "sequence", "outcome"))
        if self.guide is not None:
            choice(f"guide of {self.name}", self.guide, ("alike", "dapo", "unshaped"))
        unknown = self.needs - set(INPUTS)
        if unknown:
            raise ValueError(f"{self.name} needs {', '.join(sorted(unknown))}: a batch has {', '.join(INPUTS)}")

    @property
    def estimator(self) -> str:
        """`algorithm.adv_estimator` of its runs."""
        return self.verl_estimator or self.name

    @property
    def keys(self) -> tuple[str, ...]:
        """The configuration keys that this method may change: exact keys, and prefixes that end with a dot."""
        return (
            "algorithm.adv_estimator",
            f"algorithm.{self.name}.",
            "actor_rollout_ref.actor.policy_loss.loss_mode",
            "actor_rollout_ref.actor.loss_agg_mode",
            *self.changes,
        )

    def configure(self, settings: Mapping[str, Any]) -> tuple[Any, list[str]]:
        """The config from a mapping of its fields, and what is unusual about it, a sentence each.

        Raises:
            UserError: an unknown key or an impossible value, with the rule it breaks.
        """
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                config: Any = config_from(self.config, settings)
            except (ValueError, TypeError) as error:
                raise UserError(f"algorithm.{self.name}: {error}") from error
        return config, [str(warning.message) for warning in caught]

    def advantages(self, batch: Batch, config: Any = None) -> AdvantageOutput:
        """Advantages (B, T) of a batch; `config` is an instance of `self.config`, None the published setting.

        Raises ValueError for a batch that lacks what the method needs, or whose shapes or values are impossible.
        """
        missing = [name for name in INPUTS if name in self.needs and getattr(batch, name) is None]
        if missing:
            raise ValueError(f"{self.name} needs {' and '.join(missing)} in the batch: Batch(..., {missing[0]}=...)")
        rows = {name: getattr(batch, name) for name in ("correct", "rewards", "length_penalty", "guide")}
        check_batch(batch.response_mask, batch.group, **rows)
        for name in {"entropy", "old_log_probs"} & self.needs:
            check_tokens(getattr(batch, name), batch.response_mask, name)
        return self.compute(batch, self.config() if config is None else config)


@cache
def algorithms() -> Mapping[str, Algorithm]:
    """Every method by name: those of this package in their order, then those of other packages.

    Raises UserError for two methods of one name, and for an entry point that does not give an `Algorithm`.
    """
    found: dict[str, Algorithm] = {}
    own = [importlib.metadata.EntryPoint("gtpo_verl", place, ENTRY_POINTS) for place in _BUILT_IN]
    for point in [*own, *importlib.metadata.entry_points(group=ENTRY_POINTS)]:
        entry, place = point.load(), f"entry point {point.name} = {point.value}"
        if not isinstance(entry, Algorithm):
            raise UserError(
                f"{place} is a {type(entry).__name__}: an entry point of {ENTRY_POINTS} must be an Algorithm."
            )
        if entry.name in found:
            raise UserError(f"{place} names its method {entry.name}, which exists already: choose another name.")
        found[entry.name] = entry
    return found


def algorithm(name: str) -> Algorithm:
    """The method of this name. Raises UserError, with the closest name, where there is none."""
    known = algorithms()
    if name not in known:
        raise UserError(f"no algorithm {name!r}{choose_from(name, known)}")
    return known[name]


def algorithm_of(config: Mapping[str, Any]) -> Algorithm | None:
    """The method that a composed run trains, known by its estimator, loss and aggregation; None for one that is not
    registered.

    Where the loss or the aggregation was overridden, the first method with the run's estimator.
    """
    estimator = config["algorithm"]["adv_estimator"]
    actor = config["actor_rollout_ref"]["actor"]
    objective = (actor["policy_loss"]["loss_mode"], actor["loss_agg_mode"])
    same = [entry for entry in algorithms().values() if entry.estimator == estimator]
    exact = [entry for entry in same if (entry.loss, entry.aggregation) == objective]
    return next(iter([*exact, *same]), None)
