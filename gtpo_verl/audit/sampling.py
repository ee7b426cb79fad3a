"""The work of an audit: which prompts are sampled, which responses are chosen, which points are continued, in order.

All follows from the plan, the seed and what was sampled before, so that an audit that was stopped goes on.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gtpo_verl.audit.cuts import choose, cut_points
from gtpo_verl.audit.plan import AT_PROMPT, Plan
from gtpo_verl.audit.store import OF_BRANCH, OF_PROMPT, Branch, Count, Rollout, Store
from gtpo_verl.audit.values import Bools, Ints, Values
from gtpo_verl.errors import UserError
from gtpo_verl.evaluation.continuations import Continuation, Prefix
from gtpo_verl.runs.statistics import Floats

TRIED = 8  # prompts that are sampled at most for each that has contrast
ALL = -1  # in a key: a whole response

Continue = Callable[[Iterable[Prefix]], Iterator[tuple[Prefix, Sequence[Continuation]]]]
Describe = Callable[[int, Sequence[int]], tuple[str, str, list[str]]]  # row, tokens: cluster, prompt, texts
Advance = Callable[[str, int, int], None]  # what is done, how much of it, of how much


class Strata(NamedTuple):
    """Prompts by their number of correct responses: with contrast, all of them correct, none; rows of the data."""

    mixed: tuple[int, ...]
    solved: tuple[int, ...]
    never: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Chosen:
    """The audited responses: numbers among `batch` (N,), weights (N,), cut points (N, M + 1).

    batch: the responses of all prompts with contrast, which the methods see.
    """

    batch: tuple[Rollout, ...]
    rows: Ints
    weight: Floats
    points: Ints

    @property
    def is_step(self) -> Bools:
        """Which steps are not empty, (N, M)."""
        return np.diff(self.points) > 0

    @property
    def responses(self) -> list[Rollout]:
        return [self.batch[row] for row in self.rows]


def strata_of(rollouts: Sequence[Rollout], prompts: int) -> Strata:
    """Sort prompts by verdicts, in the order of sampling, up to the last of the first `prompts` with contrast."""
    verdicts: dict[int, list[bool]] = {}
    for rollout in sorted(rollouts, key=lambda each: each.place):
        verdicts.setdefault(rollout.row, []).append(rollout.correct)
    mixed: list[int] = []
    solved: list[int] = []
    never: list[int] = []
    for row, each in verdicts.items():
        if len(mixed) == prompts:
            break
        (solved if all(each) else mixed if any(each) else never).append(row)
    return Strata(tuple(mixed), tuple(solved), tuple(never))


def sample_rollouts(
    store: Store, plan: Plan, rows: int, seed: int, proceed: Continue, describe: Describe, advance: Advance
) -> None:
    """Sample responses, prompt by prompt in random order, until enough prompts have contrast; `rows` has the data.
    Raises UserError: no prompt has contrast.
    """
    for asked in _rounds(store, plan, rows, seed):
        for prefix, samples in proceed([Prefix((row, ALL), row, (), plan.samples, entropies=True) for row in asked]):
            place = asked[prefix.row]  # kept together: a row with any response is not sampled again
            store.add(*[_rollout(prefix.row, place, number, each, describe) for number, each in enumerate(samples)])
            mixed = len(strata_of(store.rollouts, plan.prompts).mixed)
            advance("prompts with contrast", mixed, plan.prompts)
    groups_with_contrast(store.rollouts, plan)  # raises without


def _rounds(store: Store, plan: Plan, rows: int, seed: int) -> Iterator[dict[int, int]]:
    """The rest of each round of rows to sample, with their places in the random order, until enough have contrast."""
    order = list(enumerate(np.random.default_rng(seed).permutation(rows)[: TRIED * plan.prompts].tolist()))
    for start in range(0, len(order), plan.prompts):
        done = {rollout.row for rollout in store.rollouts}
        asked = {row: place for place, row in order[start : start + plan.prompts] if row not in done}
        if asked:
            yield asked
        if len(strata_of(store.rollouts, plan.prompts).mixed) == plan.prompts:
            return


def _rollout(row: int, place: int, number: int, sampled: Continuation, describe: Describe) -> Rollout:
    assert sampled.entropies is not None
    assert sampled.log_probs is not None
    tokens = sampled.tokens.tolist()
    cluster, prompt, texts = describe(row, tokens)
    entropies, log_probs = sampled.entropies.tolist(), sampled.log_probs.tolist()
    verdict = sampled.correct, sampled.score, sampled.truncated
    return Rollout(row, place, number, cluster, prompt, tokens, texts, entropies, log_probs, *verdict)


def choose_responses(rollouts: Sequence[Rollout], plan: Plan, seed: int) -> Chosen:
    """Choose the responses to audit, and cut them. Raises UserError: no prompt has contrast."""
    batch = tuple(itertools.chain.from_iterable(groups_with_contrast(rollouts, plan)))
    prompts, correct = [str(each.row) for each in batch], np.array([each.correct for each in batch])
    rows, weight = choose(prompts, correct, plan.responses, seed)
    points = np.stack([cut_points(batch[row].texts, plan.steps) for row in rows])
    return Chosen(batch, rows, weight, points)


def groups_with_contrast(rollouts: Sequence[Rollout], plan: Plan) -> list[list[Rollout]]:
    """The responses to each prompt with contrast, in the order of sampling. Raises UserError: there is none."""
    strata = strata_of(rollouts, plan.prompts)
    if not strata.mixed:
        raise UserError(
            f"no prompt has contrast: of {len(strata.solved) + len(strata.never)} prompts {len(strata.solved)} are "
            f"always solved and {len(strata.never)} never, in {plan.samples} responses. Choose other data "
            "(data.val_files=FILE) or a larger --samples."
        )
    found: dict[int, list[Rollout]] = {row: [] for row in strata.mixed}
    for rollout in rollouts:
        if rollout.row in found:
            found[rollout.row].append(rollout)
    return list(found.values())


def second_stage(chosen: Chosen, plan: Plan, seed: int) -> list[int]:
    """Numbers among the chosen responses that get more continuations: two wrong ones a correct one, at random."""
    shuffled = np.random.default_rng(seed + 1).permutation(len(chosen.rows)).tolist()
    correct = [number for number in shuffled if chosen.responses[number].correct]
    wrong = [number for number in shuffled if not chosen.responses[number].correct]
    some = wrong[: plan.second_stage - plan.second_stage // 3]
    return sorted([*some, *correct[: plan.second_stage - len(some)]])


def wanted_counts(chosen: Chosen, plan: Plan, seed: int) -> list[Prefix]:
    """Every request for continuations of a point; those of V(0) first."""
    first = plan.continuations // 2  # of a half, in each stage
    more = plan.second_continuations // 2 - first
    again = set(second_stage(chosen, plan, seed)) if more > 0 else set()
    points = [
        (number, rollout, rollout.tokens[:place])
        for number, rollout in enumerate(chosen.responses)
        for place in chosen.points[number, 1:-1].tolist()
        if place < len(rollout.tokens)
    ]
    prompts = dict.fromkeys(rollout.row for rollout in chosen.responses)
    asked = [(row, OF_PROMPT, list[int](), AT_PROMPT * first, 1) for row in prompts]
    asked += [(rollout.row, rollout.sample, tokens, first, 1) for _, rollout, tokens in points]
    asked += [(rollout.row, rollout.sample, tokens, more, 2) for number, rollout, tokens in points if number in again]
    return [
        Prefix((row, sample, len(tokens), half, stage), row, tuple(tokens), count)
        for row, sample, tokens, count, stage in asked
        for half in (0, 1)
    ]


def wanted_branches(chosen: Chosen, plan: Plan) -> list[Prefix]:
    """A request for the branches from the start of every step."""
    wanted = []
    for rollout, points in zip(chosen.responses, chosen.points.tolist(), strict=True):
        for start, end in itertools.pairwise(points if plan.branches else ()):
            if start < end:
                key = rollout.row, rollout.sample, start, OF_BRANCH
                wanted.append(Prefix(key, rollout.row, tuple(rollout.tokens[:start]), plan.branches, most=end - start))
    return wanted


def wanted_counts_of_branches(store: Store, chosen: Chosen, plan: Plan) -> list[Prefix]:
    """A request for the continuations of every branch that was sampled and has not ended."""
    of = {(rollout.row, rollout.sample): rollout for rollout in chosen.responses}
    wanted = []
    for branch in store.branches.values():
        rollout = of.get((branch.row, branch.sample))
        if rollout and not branch.ended:
            tokens = *rollout.tokens[: branch.place], *branch.tokens
            wanted.append(Prefix((*branch.key, OF_BRANCH), branch.row, tokens, plan.of_a_branch))
    return wanted


def sample_values(store: Store, chosen: Chosen, plan: Plan, seed: int, proceed: Continue, advance: Advance) -> None:
    """Continue every point and every branch that has no counts yet, and keep each when it is finished."""
    _sample(store, wanted_counts(chosen, plan, seed), "continuations", proceed, advance)
    if plan.branches:
        _sample(store, wanted_branches(chosen, plan), "branches", proceed, advance)
        wanted = wanted_counts_of_branches(store, chosen, plan)
        _sample(store, wanted, "continuations of branches", proceed, advance)


def _sample(store: Store, wanted: Sequence[Prefix], what: str, proceed: Continue, advance: Advance) -> None:
    todo = [prefix for prefix in wanted if not _is_there(store, prefix)]
    total = sum(prefix.count for prefix in wanted)
    done = total - sum(prefix.count for prefix in todo)
    advance(what, done, total)
    for prefix, samples in proceed(todo):
        store.add(*_records(prefix, samples))
        done += prefix.count
        advance(what, done, total)


def _of_branches(prefix: Prefix) -> bool:
    """Whether it asks for branches, and not for the continuations that are counted: their keys have a stage as well."""
    return len(prefix.key) == 4


def _is_there(store: Store, prefix: Prefix) -> bool:
    return (*prefix.key[:3], 0) in store.branches if _of_branches(prefix) else prefix.key in store.counts


def _records(prefix: Prefix, samples: Sequence[Continuation]) -> list[Branch] | list[Count]:
    row, sample, place, *rest = prefix.key
    if _of_branches(prefix):
        return [
            Branch(row, sample, place, number, each.tokens.tolist(), each.ended or each.truncated, each.correct)
            for number, each in enumerate(samples)
        ]
    half, stage = rest
    successes, truncated = sum(each.correct for each in samples), sum(each.truncated for each in samples)
    decoded = sum(len(each.tokens) for each in samples)
    return [Count(row, sample, place, half, stage, len(samples), successes, decoded, truncated)]


def missing(store: Store, plan: Plan, rows: int, seed: int) -> bool:
    """Whether anything is left to sample."""
    if next(_rounds(store, plan, rows, seed), None):
        return True
    if plan.gradients:
        return False
    chosen = choose_responses(store.rollouts, plan, seed)
    wanted = wanted_counts(chosen, plan, seed) + wanted_branches(chosen, plan)
    return not all(_is_there(store, prefix) for prefix in wanted + wanted_counts_of_branches(store, chosen, plan))


def measured(store: Store, chosen: Chosen) -> Values:
    """The values of the chosen responses. Raises UserError where some were not sampled yet."""
    right, tried = Counter[tuple[int, ...]](), Counter[tuple[int, ...]]()
    for count in store.counts.values():
        if count.stage != OF_BRANCH:
            key = count.row, count.sample, count.place, count.half
            right[key] += count.successes
            tried[key] += count.trials
    responses = chosen.responses
    successes = np.zeros((2, len(responses), chosen.points.shape[1] - 1), np.int64)
    trials = np.zeros_like(successes)
    for half, number, point in np.ndindex(trials.shape):
        rollout, place = responses[number], int(chosen.points[number, point])
        key = rollout.row, rollout.sample if point else OF_PROMPT, place, half
        successes[half, number, point], trials[half, number, point] = right[key], tried[key]
    _check_sampled(int((trials < 2)[:, chosen.is_step].sum()), 2 * int(chosen.is_step.sum()), "points")
    correct = np.array([rollout.correct for rollout in responses])
    return Values.of_counts(successes, trials, correct, tuple(each.cluster for each in responses), chosen.weight)


def measured_branches(store: Store, chosen: Chosen, plan: Plan) -> tuple[Ints, Ints]:
    """Correct continuations behind the branches from the start of each step, and how many there were: (N, M, J) each.

    Branches that ended have 0 trials, and their verdict as successes; empty steps have 0 of both. Raises UserError as
    `measured`.
    """
    responses, left = chosen.responses, 0
    successes = np.zeros((len(responses), chosen.points.shape[1] - 1, plan.branches), np.int64)
    trials = np.zeros_like(successes)
    for place in np.ndindex(trials.shape):
        number, step, branch = place
        if not chosen.is_step[number, step]:
            continue
        key = responses[number].row, responses[number].sample, int(chosen.points[number, step]), branch
        drawn, count = store.branches.get(key), store.counts.get((*key, OF_BRANCH))
        if drawn is not None and drawn.ended:
            successes[place] = drawn.correct
        elif count is not None:
            successes[place], trials[place] = count.successes, count.trials
        else:
            left += 1
    _check_sampled(left, int(chosen.is_step.sum()) * plan.branches, "branches")
    return successes, trials


def _check_sampled(left: int, of: int, what: str) -> None:
    if left:
        raise UserError(f"{left} of {of} {what} were not sampled yet: repeat the command of the audit, which goes on.")
