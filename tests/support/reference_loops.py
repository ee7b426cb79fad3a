"""The advantages, penalties and losses of arXiv 2508.04349 and of DAPO, in float64, by plain Python loops over tokens.

This file was written from the specification by someone who had not read the package, and imports nothing from it. It is
slow on purpose: one dictionary of values, one list per set of compared values, one sum per mean. Batches are lists of
rows (or tensors, turned into lists at the door); a *token* is the pair ``(row, column)`` of a true mask element.

"Early" is the early text of the paper (v1 to v4), "late" the late one (v5, v6); numbers in brackets are their
equations.

How the specification was read where it is silent or leaves a choice. Each reading is the literal one.

 1. A row whose mask is empty does not exist: it is in no count, no comparison and no statistic, gets 0 everywhere, and
    neither its entropies nor its penalty are looked at. So a group of two correct answers and one empty wrong row is a
    group of one polarity.
 2. The entropy check (NaN, infinite, below -1e-3) is on the raw values of every token, before the clamp and the floor,
    and in groups of one polarity too.
 3. ``degenerate: shape`` shapes groups of one polarity like any other: their shaped rewards are kept and only the
    advantage tells. "0 for degenerate groups" is read as part of ``degenerate: zero``.
 4. With ``scope: batch`` a value is compared with those of its own polarity in all groups; for ``axis: position`` at
 the
    same column, for ``axis: matrix`` at any column. ``axis: response`` looks at one row, so ``scope`` changes nothing.
 5. ``scope`` and ``norm_scope`` are independent of each other.
 6. The clip by kappa (early 13) touches rewards of correct tokens under any ``negatives`` and any ``mean``.
 7. With ``negatives: zero`` the wrong side of ``normalization: within`` is a set of zeros, so its advantage is 0; in
    ``joint`` the zeros of the wrong tokens are part of the one set, which makes it the set of ``all``.
 8. ``normalization: none`` returns the shaped rewards as they are: the rules on small sets and on round-off are about
    standard deviations, and none is taken.
 9. eps(dtype) in the round-off rule is that of the entropies handed in, although everything here is float64. The set of
    ``all`` is tested with its zeros in it.
10. ``preserve_sign`` holds under every normalisation, ``none`` included.
11. A sign flip is an advantage strictly below 0 on a correct answer, strictly above 0 on a wrong one. The fraction is
over
    tokens for GTPO and over responses for GRPO-S, the things that are normalised; groups left out by ``degenerate:
    zero`` are left out of it ("left out of all statistics"); 0 when nothing is counted.
12. A penalty is added to every token of a correct response (GTPO) or once to its reward (GRPO-S), as it is given:
    neither its sign nor its size is checked.
13. The soft overlong penalty of a length of exactly L is 0 and of exactly L2 is (L - L2) / denominator; so with ``max``
    it jumps to -1 just above L2.
14. GROP: the lengths of the knee leave out rows of length 0, which are the empty ones. "The same formula on the correct
    responses" in between keeps K from all lengths. Easy is asked before hard. As K is at least half of the longest
    length that is judged, or more, the bound of -1/2 is never reached.
15. The DAPO advantage has the same 1e-6 in the denominator and the same round-off rule as the rest, on rewards of rows;
    a group of fewer than two rows has advantage 0. Groups with 0 or G correct are the sampler's business: nothing is
    masked here, and a group whose rewards differ is normalised.
16. Losses are -J. The token mean is over all tokens of the batch handed in; the mean of GRPO-S over its non-empty rows.
    The log-ratio is not clamped.
17. Dual clip: where A < 0 the objective of the token is at least c * A.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

Token = tuple[int, int]

FLOAT64_EPS = 2.0**-52
FLOAT32_EPS = 2.0**-23
STD_EPSILON = 1e-6  # beside the standard deviation, in the denominator
LOWEST_ENTROPY = -1e-3  # below it is not round-off any more
SHARE_TOLERANCE = 1e-9  # of GROP's shares of correct answers


# Every value of every option.
_COMMON_AXES: dict[str, tuple[object, ...]] = {
    "normalization": ("all", "joint", "within", "none"),
    "negatives": ("zero", "inverse", "based_inverse"),
    "mean": ("arithmetic", "geometric"),
    "scope": ("group", "batch"),
    "norm_scope": ("group", "batch"),
    "degenerate": ("zero", "shape"),
    "preserve_sign": (False, True),
}
GRID_AXES = {
    "gtpo": _COMMON_AXES | {"axis": ("position", "response", "matrix")},
    "grpo_s": _COMMON_AXES | {"entropy_mean": ("arithmetic", "geometric")},
}


@dataclass(frozen=True)
class Options:
    """The options of both methods, under the names of the specification; ``scale1, scale2`` are α1, α2 or β1, β2."""

    scale1: float = 1.0
    scale2: float = 0.1
    negatives: str = "based_inverse"
    mean: str = "arithmetic"
    axis: str = "position"
    scope: str = "group"
    norm_scope: str = "group"
    normalization: str = "all"
    clip_kappa: float | None = None
    entropy_clip: tuple[float, float] | None = None
    entropy_floor: float = 1e-6
    degenerate: str = "zero"
    preserve_sign: bool = False
    entropy_mean: str = "arithmetic"


@dataclass(frozen=True)
class Result:
    """Dense outputs; and the sign flips of the correct (True) and of the wrong side as ``(counted, flips, zeros)``.

    ``zeros`` are the advantages too close to 0 for their sign to mean anything. They are not among the flips.
    """

    advantages: list[list[float]]
    shaped_rewards: list[list[float]] | list[float]
    flips: dict[bool, tuple[int, int, int]]


# ---------------------------------------------------------------------------------------------------- at the door


def as_list(values):
    """A list (of lists) of Python numbers; tensors and arrays bring their own ``tolist``."""
    return values.tolist() if hasattr(values, "tolist") else list(values)


def tokens_of(mask: Sequence[Sequence[bool]]) -> list[Token]:
    """The (row, column) of every true element. Alive at t means mask[i, t]; holes are simply not there."""
    return [(i, t) for i, row in enumerate(mask) for t, alive in enumerate(row) if alive]


def prepared_entropies(entropy, tokens: Iterable[Token], options: Options) -> dict[Token, float]:
    """Check, clamp, floor, in this order ("Entropy preparation", "Order")."""
    prepared = {}
    for i, t in tokens:
        value = entropy[i][t]
        if math.isnan(value) or math.isinf(value) or value < LOWEST_ENTROPY:
            raise ValueError(f"entropy {value} in row {i}, position {t}")
        if options.entropy_clip is not None:
            low, high = options.entropy_clip
            value = min(max(value, low), high)
        prepared[i, t] = max(value, options.entropy_floor)
    return prepared


def degenerate_groups(rows: Iterable[int], correct, group) -> set[int]:
    """Groups in which all the rows (none of them empty) are correct, or all are wrong."""
    polarities = defaultdict(set)
    for i in rows:
        polarities[group[i]].add(bool(correct[i]))
    return {g for g, seen in polarities.items() if len(seen) == 1}


# ------------------------------------------------------------------------------------------ weights and statistics


def arithmetic_mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(math.fsum(math.log(x) for x in values) / len(values))


MEANS = {"arithmetic": arithmetic_mean, "geometric": geometric_mean}


def weights(values: dict, compared_with: dict, mean: str) -> dict:
    """Each value over the mean of the values it is compared with: those under the same key of ``compared_with``.

    Early (2), (15), late (3), (5) with the arithmetic mean; early (3), (19), late App. C with the geometric one.
    """
    sets = defaultdict(list)
    for item, value in values.items():
        sets[compared_with[item]].append(value)
    means = {key: MEANS[mean](members) for key, members in sets.items()}
    return {item: value / means[compared_with[item]] for item, value in values.items()}


def mean_and_std(values: Sequence[float], eps: float) -> tuple[float, float]:
    """Mean and unbiased standard deviation; the latter is 0 for fewer than two values and under the round-off rule."""
    mean = arithmetic_mean(values)
    if len(values) < 2 or max(values) - min(values) <= 16 * eps * max(abs(x) for x in values):
        return mean, 0.0
    return mean, math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (len(values) - 1))


def standardised(value: float, mean: float, std: float) -> float:
    """The advantage of ``value`` in a set of this mean and deviation; 0 where the deviation is 0."""
    return 0.0 if std == 0.0 else (value - mean) / (std + STD_EPSILON)


def normalised(rewards: dict, is_correct: dict, norm_key: dict, options: Options, eps: float) -> dict:
    """Advantages of the items (tokens or rows), by the table of "Advantages": early (4), (16), (17); late (6)."""
    if options.normalization == "none":
        return dict(rewards)
    right, wrong = defaultdict(list), defaultdict(list)
    for item, reward in rewards.items():
        (right if is_correct[item] else wrong)[norm_key[item]].append(reward)
    statistics = {
        (key, side): mean_and_std(normalising_set(right[key], wrong[key], side, options), eps)
        for key, side in {(norm_key[item], is_correct[item]) for item in rewards}
    }
    return {
        item: standardised(reward, *statistics[norm_key[item], is_correct[item]]) for item, reward in rewards.items()
    }


def normalising_set(right: list[float], wrong: list[float], side: bool, options: Options) -> list[float]:
    """The values whose mean and deviation normalise one side of one group (or of the batch)."""
    if options.normalization == "joint":
        return right + wrong
    if options.normalization == "within":
        return right if side else wrong
    with_right = right + [0.0] * len(wrong)
    with_wrong = wrong + [0.0] * len(right)
    return with_right if side or options.negatives == "zero" else with_wrong


def shaped_reward(weight: float, side: bool, options: Options, penalty: float) -> float:
    """The reward of one token or response: early (2), (15), late (5); then the clip (13); then the penalty (14)."""
    if side:
        reward = options.scale1 + options.scale2 * weight
        if options.clip_kappa is not None:
            reward = min(max(reward, 1.0), options.scale1 + options.scale1 / options.clip_kappa)
        return reward + penalty
    if options.negatives == "zero":
        return 0.0
    if options.negatives == "inverse":
        return -weight
    return -options.scale1 - options.scale2 * weight


def count_flips(advantages: dict, is_correct: dict, tolerance: float) -> dict[bool, tuple[int, int, int]]:
    """Per side: how many advantages there are, how many have the wrong sign, and how many are within tolerance of 0."""
    counts = {}
    for side in (True, False):
        signed = [a if side else -a for item, a in advantages.items() if is_correct[item] == side]
        zeros = sum(abs(a) <= tolerance for a in signed)
        counts[side] = (len(signed), sum(a < -tolerance for a in signed), zeros)
    return counts


def sign_preserved(advantages: dict, is_correct: dict, options: Options) -> dict:
    """With ``preserve_sign``, an advantage of the wrong sign becomes 0."""
    if not options.preserve_sign:
        return advantages
    return {item: max(a, 0.0) if is_correct[item] else min(a, 0.0) for item, a in advantages.items()}


# -------------------------------------------------------------------------------------------- the two advantages


def gtpo_advantages(
    entropy, correct, mask, group, options: Options, length_penalty=None, eps=FLOAT64_EPS, sign_tolerance=1e-12
) -> Result:
    """GTPO: early (2)-(4), (13)-(17), (19); late (3), (5), (6), App. C. All inputs (B, T) or (B,); eps of their
    dtype.
    """
    entropy, correct, mask, group = as_list(entropy), as_list(correct), as_list(mask), as_list(group)
    penalty = [0.0] * len(correct) if length_penalty is None else as_list(length_penalty)

    prepared = prepared_entropies(entropy, tokens_of(mask), options)
    left_out = degenerate_groups({i for i, _ in prepared}, correct, group) if options.degenerate == "zero" else set()
    tokens = {token: h for token, h in prepared.items() if group[token[0]] not in left_out}
    side = {(i, t): bool(correct[i]) for i, t in tokens}

    # For correct answers the entropies are compared, for wrong ones their inverses.
    values = {token: h if side[token] else 1.0 / h for token, h in tokens.items()}
    compared_with = {(i, t): comparison_key(i, t, side[i, t], group[i], options) for i, t in tokens}
    weight = weights(values, compared_with, options.mean)

    rewards = {
        token: shaped_reward(weight[token], side[token], options, penalty[token[0]] if side[token] else 0.0)
        for token in tokens
    }
    norm_key = {(i, t): group[i] if options.norm_scope == "group" else "batch" for i, t in tokens}
    advantages = normalised(rewards, side, norm_key, options, eps)
    flips = count_flips(advantages, side, sign_tolerance)
    advantages = sign_preserved(advantages, side, options)
    return Result(dense(advantages, mask), dense(rewards, mask), flips)


def comparison_key(row: int, column: int, side: bool, group: int, options: Options) -> Hashable:
    """Names the set of values a token is compared with ("Which values are compared")."""
    if options.axis == "response":
        return row
    where = group if options.scope == "group" else "batch"
    return (side, where, column) if options.axis == "position" else (side, where)


def dense(values: dict[Token, float], mask) -> list[list[float]]:
    """(B, T) with the values at their tokens and 0 elsewhere."""
    return [[values.get((i, t), 0.0) for t in range(len(row))] for i, row in enumerate(mask)]


def grpo_s_advantages(
    entropy, correct, mask, group, options: Options, length_penalty=None, eps=FLOAT64_EPS, sign_tolerance=1e-12
) -> Result:
    """GRPO-S ("Sequence level"): one reward and one advantage a response; ``shaped_rewards`` is (B,)."""
    entropy, correct, mask, group = as_list(entropy), as_list(correct), as_list(mask), as_list(group)
    penalty = [0.0] * len(correct) if length_penalty is None else as_list(length_penalty)

    prepared = prepared_entropies(entropy, tokens_of(mask), options)
    of_row = defaultdict(list)
    for (i, _), h in prepared.items():
        of_row[i].append(h)
    left_out = degenerate_groups(of_row, correct, group) if options.degenerate == "zero" else set()
    mean_entropy = {i: MEANS[options.entropy_mean](hs) for i, hs in of_row.items() if group[i] not in left_out}
    side = {i: bool(correct[i]) for i in mean_entropy}

    values = {i: h if side[i] else 1.0 / h for i, h in mean_entropy.items()}
    compared_with = {i: (side[i], group[i] if options.scope == "group" else "batch") for i in mean_entropy}
    weight = weights(values, compared_with, options.mean)

    rewards = {i: shaped_reward(weight[i], side[i], options, penalty[i] if side[i] else 0.0) for i in mean_entropy}
    norm_key = {i: group[i] if options.norm_scope == "group" else "batch" for i in mean_entropy}
    advantages = normalised(rewards, side, norm_key, options, eps)
    flips = count_flips(advantages, side, sign_tolerance)
    advantages = sign_preserved(advantages, side, options)
    broadcast = {(i, t): advantages[i] for i, t in prepared if i in advantages}
    return Result(dense(broadcast, mask), [rewards.get(i, 0.0) for i in range(len(mask))], flips)


def dapo_advantages(rewards, group, eps=FLOAT64_EPS) -> list[float]:
    """A = (R - mean) / (std + 1e-6) within each group of rows (DAPO, arXiv 2503.14476, eq. 9; GRPO)."""
    rewards, group = as_list(rewards), as_list(group)
    of_group = defaultdict(list)
    for reward, g in zip(rewards, group, strict=True):
        of_group[g].append(reward)
    statistics = {g: mean_and_std(members, eps) for g, members in of_group.items()}
    return [standardised(reward, *statistics[g]) for reward, g in zip(rewards, group, strict=True)]


# ------------------------------------------------------------------------------------------------ length penalties


def soft_overlong_penalty(lengths, max_length: int, cache_length: int, denominator: str = "cache") -> list[float]:
    """Early (14), DAPO eq. 13, with L2 = max_length, L1 = cache_length and L = L2 - L1."""
    free = max_length - cache_length
    over = {"cache": cache_length, "max": max_length}[denominator]
    penalties = []
    for length in as_list(lengths):
        if length <= free:
            penalties.append(0.0)
        elif length <= max_length:
            penalties.append((free - length) / over)
        else:
            penalties.append(-1.0)
    return penalties


def group_relative_overlong_penalty(lengths, correct, group, gamma: float = 0.75) -> list[float]:
    """GROP (late App. D), per row; rows of length 0 are empty."""
    lengths, correct, group = as_list(lengths), as_list(correct), as_list(group)
    penalties = [0.0] * len(lengths)
    for g in set(group):
        rows = [i for i in range(len(lengths)) if group[i] == g and lengths[i] > 0]
        right = [i for i in rows if correct[i]]
        if not right:
            continue
        share = len(right) / len(rows)
        if share >= gamma - SHARE_TOLERANCE:
            knee = grop_knee([lengths[i] for i in right])
        elif share <= 1 - gamma + SHARE_TOLERANCE or len(right) <= len(rows) - len(right):
            continue
        else:
            knee = grop_knee([lengths[i] for i in rows])
        for i in right:
            penalties[i] = grop_curve(lengths[i], knee)
    return penalties


def grop_knee(lengths: Sequence[float]) -> float:
    return max((min(lengths) + max(lengths)) / 2, math.fsum(lengths) / len(lengths))


def grop_curve(length: float, knee: float) -> float:
    if length < knee:
        return 0.0
    return -0.5 * (length - knee) / knee if length < 2 * knee else -0.5


# ---------------------------------------------------------------------------------------------------------- losses


def clipped_objective(ratio: float, advantage: float, low: float, high: float) -> float:
    """min(w A, clip(w, 1 - low, 1 + high) A)."""
    return min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


def token_level_loss(log_probs, old_log_probs, advantages, mask, low=0.2, high=0.28, dual_clip=None) -> float:
    """-J of "Objective, token level": the mean over all tokens of the batch, with dual clip where A < 0 if asked."""
    log_probs, old_log_probs = as_list(log_probs), as_list(old_log_probs)
    advantages, tokens = as_list(advantages), tokens_of(as_list(mask))
    objectives = []
    for i, t in tokens:
        advantage = advantages[i][t]
        objective = clipped_objective(math.exp(log_probs[i][t] - old_log_probs[i][t]), advantage, low, high)
        if dual_clip is not None and advantage < 0:
            objective = max(objective, dual_clip * advantage)
        objectives.append(objective)
    return -arithmetic_mean(objectives)


def grpo_s_loss(log_probs, old_log_probs, advantages, mask, low=0.2, high=0.28, ratio="arithmetic") -> float:
    """-J of "Sequence level": the mean over responses of the clipped objective of the mean ratio; advantages (B,)."""
    log_probs, old_log_probs, advantages = as_list(log_probs), as_list(old_log_probs), as_list(advantages)
    ratios = defaultdict(list)
    for i, t in tokens_of(as_list(mask)):
        ratios[i].append(math.exp(log_probs[i][t] - old_log_probs[i][t]))
    return -arithmetic_mean([clipped_objective(MEANS[ratio](ws), advantages[i], low, high) for i, ws in ratios.items()])
