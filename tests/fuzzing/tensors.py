"""Random batches: estimators and losses, finite numbers and numbers that are not, in shapes that fit and do not."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import torch

from fuzzing import PASSED, REFUSED, check, refused
from gtpo_verl.algorithms import Algorithm, Batch, algorithms, credit_metrics
from gtpo_verl.algorithms.losses import aspo_loss, ce_gppo_loss, dcpo_clip_loss, sequence_loss, token_loss
from gtpo_verl.errors import UserError

HOSTILE = 0.1  # the share of cases in which something does not fit, and may be refused
FLOATS = (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)
MASKS = (torch.bool, torch.int64, torch.int32, torch.float32, torch.uint8)
JUNK = (float("nan"), float("inf"), float("-inf"), 0.0, -1.0, 1e4)  # what padding holds

Draw = Callable[[Random], Any]


def _of(*values: Any) -> Draw:
    return lambda rng: rng.choice(values)


def _number(low: float, high: float, *ends: float) -> Draw:
    """Mostly between 10^low and 10^high, sometimes one of the ends."""
    return lambda rng: rng.choice(ends) if ends and rng.random() < 0.3 else 10 ** rng.uniform(low, high)


_share = _number(-3, 0, 0.0, 1.0, 0.5)
_SCOPES = _of("batch", "group", "response")
# Of every field of every method's config; what a method does not allow is drawn again.
SETTINGS: Mapping[str, Draw] = {
    "negatives": _of("zero", "inverse", "based_inverse"),
    "mean": _of("arithmetic", "geometric"),
    "entropy_mean": _of("arithmetic", "geometric"),
    "axis": _of("position", "response", "matrix"),
    "scope": _SCOPES,
    "max_scope": _SCOPES,
    "norm_scope": _of("group", "batch"),
    "normalization": _of("all", "joint", "within", "none"),
    "degenerate": _of("zero", "shape"),
    "preserve_sign": _of(False, True),
    "length_penalty": _of("none", "soft", "grop"),
    "length_denominator": _of("cache", "max"),
    "gamma": _of(0.5000001, 0.75, 1.0),
    "entropy_clip": _of(None, (0.0, 0.0), (0.0, 1e-45), (0.2, 2.0), (5.0, 5.0)),
    "entropy_floor": _of(1e-30, 1e-6, 1e-3, 1.0),
    "clip_kappa": _of(None, 1.001, 1.5, 9.0, 1e6),
    **dict.fromkeys(("alpha", "alpha1", "alpha2", "beta1", "beta2", "k", "correct", "wrong"), _number(-6, 3, 0.0, 1.0)),
    **dict.fromkeys(("lambda_correct", "lambda_wrong"), lambda rng: rng.choice((-1, 1)) * _number(-6, 3, 0.0)(rng)),
    **dict.fromkeys(("w", "m", "phi", "kappa"), _number(-3, 3, 1.0)),
    **dict.fromkeys(("ratio", "top_ratio", "K"), _share),
    "threshold": _number(-6, 1, 0.0, 1.0),
    "target_entropy": _of(None, 0.0, 0.3, 1e6),
    "rule": _of("threshold", "topk"),
    "select": _of("top", "bottom"),
    "polarity": _of("both", "correct", "wrong"),
    "normalizer": _of("kept", "all"),
    "side": _of("wrong", "both"),
    "clamp": _of(None, (1e-6, 1e6), (0.1, 10.0), (1.0, 1.0)),
}


def draw_config(entry: Algorithm, rng: Random) -> Any:
    """A config of a method, by the way of a run's settings."""
    names = [item.name for item in dataclasses.fields(entry.config)]
    for _ in range(100):
        settings = {name: SETTINGS[name](rng) for name in names if rng.random() < 0.7}
        try:
            return entry.configure(settings)[0]
        except UserError as error:
            refused(error)
    return entry.config()


# ------------------------------------------------------------------------------------------------------- the batch


def _uniform(rng: Random, *shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(rng.getrandbits(48)), dtype=torch.float64)


def _kind(rng: Random, kinds: Mapping[str, Draw], rows: int, columns: int) -> torch.Tensor:
    """(rows, columns): all of one kind, one kind a row, or one a number."""
    names = list(kinds)
    way = rng.random()
    if way < 0.5:
        return _fill(rng, kinds[rng.choice(names)], rows, columns)
    if way < 0.75:
        lines = [_fill(rng, kinds[rng.choice(names)], 1, columns) for _ in range(rows)]
        return torch.cat(lines) if lines else torch.zeros(0, columns, dtype=torch.float64)
    chosen = rng.sample(names, min(3, len(names)))
    which = (_uniform(rng, rows, columns) * len(chosen)).long()
    stacked = torch.stack([_fill(rng, kinds[name], rows, columns) for name in chosen])
    return stacked.gather(0, which[None])[0]


def _fill(rng: Random, draw: Draw, rows: int, columns: int) -> torch.Tensor:
    made = draw(rng)
    return made(_uniform(rng, rows, columns)) if callable(made) else torch.full((rows, columns), float(made)).double()


ENTROPIES: Mapping[str, Draw] = {
    "plain": _of(lambda u: -u.clamp(min=1e-12).log()),
    "zero": _of(0.0),
    "equal": _of(0.1, 1.0, 12.0),
    "denormal": _of(1e-45, 1e-40, 1e-310),
    "tiny": _of(lambda u: 10 ** (-12 * u)),
    "round-off": _of(lambda u: -9e-4 * u),
    "huge": _of(1e3, 1e4, lambda u: 1e4 * u),
    "zero or not": _of(lambda u: (u > 0.5).double()),
}
LOG_PROBS: Mapping[str, Draw] = {
    "plain": _of(lambda u: u.clamp(min=1e-12).log()),
    "certain": _of(0.0),
    "denormal": _of(-1e-45, -1e-40),
    "round-off": _of(lambda u: 1e-3 * u),
    "huge": _of(-1e4, -3e38, lambda u: -1e4 * u),
}
REWARDS: Mapping[str, Draw] = {
    "plus or minus one": _of(lambda u: (u > 0.5).double() * 2 - 1),
    "zero or one": _of(lambda u: (u > 0.5).double()),
    "fractions": _of(lambda u: u, lambda u: (u * 5).round() / 5),
    "equal": _of(1.0, 0.1, -1.0, 0.0),
    "apart by round-off": _of(lambda u: 0.1 + 1e-8 * u, lambda u: 1 + 1e-16 * u),
    "denormal": _of(lambda u: 1e-40 * u),
    "huge": _of(lambda u: 1e6 * u, lambda u: -1e15 * u, lambda u: 1e30 * u),
}
ADVANTAGES: Mapping[str, Draw] = {
    "plain": _of(lambda u: 4 * u - 2),
    "zero": _of(0.0),
    "denormal": _of(lambda u: 1e-40 * (u - 0.5)),
    "huge": _of(lambda u: 1e6 * (u - 0.5), 1e20, -1e20),
}


def _mask(rng: Random, rows: int, columns: int) -> torch.Tensor:
    """(rows, columns) bool: right-padded, whole, with holes, with empty rows, or empty."""
    lengths = (_uniform(rng, rows) * (columns + 1)).long()
    kind = rng.choice(("ragged", "ragged", "whole", "holes", "empty rows", "empty", "single"))
    mask = torch.arange(columns)[None] < lengths[:, None]
    if kind == "whole":
        mask = torch.ones(rows, columns, dtype=torch.bool)
    elif kind == "holes":
        mask &= _uniform(rng, rows, columns) < rng.random()
    elif kind == "empty rows":
        mask &= (_uniform(rng, rows) < 0.5)[:, None]
    elif kind == "empty":
        mask &= False
    elif kind == "single":
        mask = torch.arange(columns)[None] == (lengths - 1)[:, None]
    return mask


def _groups(rng: Random, rows: int) -> torch.Tensor:
    """(rows,): groups of unequal sizes in any order, lone responses, or one group."""
    kind = rng.choice(("unequal", "unequal", "lone", "one"))
    if kind == "one":
        ids = [rng.choice((0, -1, 2**62))] * rows
    elif kind == "lone":
        ids = rng.sample(range(-50, 50), rows)
    else:
        ids = [rng.choice((0, 0, 0, 1, 1, 7, -3)) for _ in range(rows)]
    return torch.tensor(ids, dtype=rng.choice((torch.int64, torch.int32)) if kind != "one" else torch.int64)


def _verdicts(rng: Random, group: torch.Tensor) -> torch.Tensor:
    kind = rng.choice(("any", "any", "any", "right", "wrong", "one of all"))
    if kind == "one of all":
        return torch.arange(len(group)) == rng.randrange(max(len(group), 1))
    return _uniform(rng, len(group)) < {"any": 0.5, "right": 2.0, "wrong": -1.0}[kind]


def _size(rng: Random) -> tuple[int, int]:
    if rng.random() < 0.01:
        return rng.choice(((70, 5), (3, 2100), (0, 0), (0, 4), (4, 0)))
    return rng.randrange(1, 12), rng.randrange(1, 20)


def draw_batch(rng: Random, entry: Algorithm) -> Batch:
    """A batch of finite numbers, with anything in its padding, and fields that the method may not need."""
    rows, columns = _size(rng)
    mask, group, junk = _mask(rng, rows, columns), _groups(rng, rows), rng.choice(JUNK)

    def column(name: str, kinds: Mapping[str, Draw]) -> torch.Tensor | None:
        if name not in entry.needs and rng.random() < 0.3:
            return None
        return torch.where(mask, _kind(rng, kinds, rows, columns), junk).to(rng.choice(FLOATS))

    rewards = None
    if "rewards" in entry.needs or rng.random() < 0.7:
        rewards = _kind(rng, REWARDS, rows, 1)[:, 0].to(rng.choice((torch.float32, torch.float64)))
    penalty = -_uniform(rng, rows).to(rng.choice((torch.float32, torch.float64))) if rng.random() < 0.3 else None
    return Batch(
        mask.to(rng.choice(MASKS)),
        group,
        _verdicts(rng, group),
        entropy=column("entropy", ENTROPIES),
        rewards=rewards,
        old_log_probs=column("old_log_probs", {**LOG_PROBS, "huge": _of(-1e4, lambda u: -1e4 * u)}),
        length_penalty=penalty,
        seed=rng.choice((0, 1, 2**31 - 1)),
    )


# ------------------------------------------------------------------------------------------------------- estimators


def estimators(rng: Random, directory: Path) -> str:
    """A registered method on a random batch under a random config.

    Finite numbers give finite advantages, 0 outside the mask, finite metrics, and stay as they were; whatever the
    padding holds. What does not fit is a ValueError of one line.
    """
    entry = rng.choice(list(algorithms().values()))
    config = draw_config(entry, rng)
    batch = draw_batch(rng, entry)
    if rng.random() < HOSTILE:
        batch = _spoilt(rng, batch)
        try:
            out = entry.advantages(batch, config)
        except ValueError as error:
            return refused(error)
        check(out.advantages.isfinite().all(), f"{entry.name}: advantages that are not finite of a hostile batch")
        return PASSED
    before = {item.name: getattr(batch, item.name) for item in dataclasses.fields(batch)}
    before = {name: value.clone() for name, value in before.items() if isinstance(value, torch.Tensor)}
    out = entry.advantages(batch, config)
    _check_output(entry.name, out, batch)
    for name, value in before.items():
        check(_same(value, getattr(batch, name)), f"{entry.name} changes {name} of its batch")
    if rng.random() < 0.2:
        again = entry.advantages(_other_padding(batch), config)
        check(_same(out.advantages, again.advantages), f"{entry.name}: advantages depend on the padding")
    if batch.entropy is not None and rng.random() < 0.3:
        found = credit_metrics(out.advantages, batch.response_mask, batch.group, batch.correct, batch.entropy)
        check(all(map(math.isfinite, found.values())), f"credit_metrics of {entry.name}: {found}")
    return PASSED


def _check_output(name: str, out: Any, batch: Batch) -> None:
    mask = batch.response_mask != 0
    check(out.advantages.shape == mask.shape, f"{name}: advantages of shape {tuple(out.advantages.shape)}")
    check(out.advantages.dtype in (torch.float32, torch.float64), f"{name}: advantages are {out.advantages.dtype}")
    check(out.advantages.isfinite().all(), f"{name}: advantages that are not finite")
    check((out.advantages[~mask] == 0).all(), f"{name}: advantages outside the mask")
    if out.shaped_rewards is not None:
        inside = out.shaped_rewards if out.shaped_rewards.dim() == 1 else out.shaped_rewards[mask]
        check(inside.isfinite().all(), f"{name}: shaped rewards that are not finite")
    check(all(isinstance(value, float) for value in out.metrics.values()), f"{name}: metrics {out.metrics}")
    check(all(map(math.isfinite, out.metrics.values())), f"{name}: metrics {out.metrics}")


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())


def _other_padding(batch: Batch) -> Batch:
    mask = batch.response_mask != 0
    changed = {
        name: torch.where(mask, getattr(batch, name), 0.25)
        for name in ("entropy", "old_log_probs")
        if getattr(batch, name) is not None
    }
    return dataclasses.replace(batch, **changed)


def _spoilt(rng: Random, batch: Batch) -> Batch:
    """The batch with one field missing, or of another shape, type or size, or with numbers that are not finite."""
    name = rng.choice(("response_mask", "group", "correct", "entropy", "rewards", "old_log_probs", "length_penalty"))
    value = getattr(batch, name)
    if value is None:
        value = torch.zeros(3)
    ways: tuple[Callable[[torch.Tensor], Any], ...] = (
        lambda v: None,
        lambda v: v.tolist(),
        lambda v: v[:-1],
        lambda v: torch.cat([v, v]),
        lambda v: v[None],
        lambda v: v.flatten(),
        lambda v: v.to(torch.float32) + 0.5,
        lambda v: v.to(torch.int64) if not v.is_floating_point() else v.nan_to_num(0, 0, 0).long(),
        lambda v: v != 0,
        lambda v: v.to(torch.complex64),
        *(lambda v, bad=bad: _with_one(rng, v, bad) for bad in (float("nan"), float("inf"), -float("inf"), 1e300)),
    )
    return dataclasses.replace(batch, **{name: rng.choice(ways)(value)})


def _with_one(rng: Random, value: torch.Tensor, bad: float) -> torch.Tensor:
    changed = value.to(torch.float64, copy=True)
    if changed.numel():
        changed.view(-1)[rng.randrange(changed.numel())] = bad
    return changed


# ----------------------------------------------------------------------------------------------------------- losses

LOSSES: Mapping[str, tuple[Callable[..., Any], Mapping[str, Draw]]] = {
    "token_loss": (token_loss, {"clip_ratio_c": _of(None, 1.0001, 3.0, 10.0)}),
    "sequence_loss": (sequence_loss, {"ratio": _of("arithmetic", "geometric")}),
    "ce_gppo_loss": (
        ce_gppo_loss,
        {"clip_ratio_c": _of(None, 3.0), "beta1": _number(-3, 1, 0.0), "beta2": _number(-3, 1, 0.0)},
    ),
    "aspo_loss": (aspo_loss, {"clip_ratio_c": _of(1.0001, 3.0, 10.0)}),
    "dcpo_clip_loss": (dcpo_clip_loss, {"clip_ratio_c": _of(None, 3.0, 10.0)}),
}


def losses(rng: Random, directory: Path) -> str:
    """A loss on random log-probs and advantages: loss, gradient and metrics are finite, and nothing reaches padding."""
    name = rng.choice(list(LOSSES))
    loss, settings = LOSSES[name]
    rows, columns = _size(rng)
    mask, junk = _mask(rng, rows, columns), rng.choice(JUNK)
    dtype = rng.choice((torch.float32, torch.float32, torch.float64, torch.bfloat16))
    old, new = (torch.where(mask, _log_probs(rng, rows, columns), junk).to(dtype) for _ in range(2))
    if rng.random() < 0.5:  # ratios around 1
        new = torch.where(mask, (old + 0.3 * (_uniform(rng, rows, columns) - 0.5)).to(dtype), junk)
    advantages = _kind(rng, ADVANTAGES, rows, columns).to(torch.float32)
    advantages = advantages[:, :1].sum(1) if name == "sequence_loss" else torch.where(mask, advantages, junk)
    chosen = {key: draw(rng) for key, draw in settings.items() if rng.random() < 0.7}
    chosen |= {"clip_ratio_low": _share(rng), "clip_ratio_high": _number(-3, 2, 0.0)(rng)}
    hostile = rng.random() < HOSTILE
    if hostile:
        key = rng.choice(list(chosen))
        chosen[key] = rng.choice((-1.0, 1.5, 0.0, "geometric", float("nan")))
    new.requires_grad_()
    try:
        values, metrics = loss(new, old, advantages, mask.to(rng.choice(MASKS)), **chosen)
    except (ValueError, TypeError) as error:
        check(hostile, f"{name} refuses {chosen}: {error}")
        return refused(error) if isinstance(error, ValueError) else REFUSED
    values.sum().backward()
    assert new.grad is not None
    if hostile:
        return PASSED
    check(values.isfinite().all(), f"{name}: losses that are not finite with {chosen}")
    check(new.grad.isfinite().all(), f"{name}: a gradient that is not finite with {chosen}")
    check((new.grad[~mask] == 0).all(), f"{name}: a gradient outside the mask")
    if values.dim() == 2:
        check((values[~mask] == 0).all(), f"{name}: losses outside the mask")
    for key, value in metrics.items():
        check(bool(value.isfinite()) and not value.requires_grad, f"{name}: metric {key} is {value} with {chosen}")
    return PASSED


def _log_probs(rng: Random, rows: int, columns: int) -> torch.Tensor:
    return _kind(rng, LOG_PROBS, rows, columns)
