"""The work of an audit: which prompts are sampled, which responses are chosen, which points are continued, in order.

All of it follows from the plan, the seed and what was sampled before, so an audit that was stopped goes on where it
was.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gtpo_verl.audit.cuts import choose, cut_points
from gtpo_verl.audit.plan import AT_PROMPT, Plan
from gtpo_verl.audit.store import OF_BRANCH, OF_PROMPT, Branch, Count, Rollout, Store
from gtpo_verl.audit.values import Ints, Values
from gtpo_verl.errors import UserError
from gtpo_verl.evaluation.continuations import Continuation, Prefix
from gtpo_verl.runs.statistics import Floats

TRIED = 8  # prompts that are sampled at most for each that has contrast
ALL = -1  # in a key: a whole response


Continue = Callable[[Iterable[Prefix]], Iterator[tuple[Prefix, Sequence[Continuation]]]]
Describe = Callable[[int, Sequence[int]], tuple[str, str, list[str]]]  # row, tokens: cluster, prompt, texts
Advance = Callable[[str, int, int], None]  # what is done, how much of it, of how much


@dataclass(frozen=True, eq=False)
class Strata:
    """Prompts by their number of correct responses: with contrast, all of them correct, none; rows of the data."""

    mixed: tuple[int, ...]
    solved: tuple[int, ...]
    never: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Chosen:
    """The audited responses: numbers among `batch` (N,), weights (N,), cut points (N, M + 1).

    batch: the responses of all prompts with contrast, which the methods see. short: responses of fewer tokens than
    steps, left out.
    """

    batch: tuple[Rollout, ...]
    rows: Ints
    weight: Floats
    points: Ints
    short: int

    @property
    def responses(self) -> list[Rollout]:
        return [self.batch[row] for row in self.rows]


def strata_of(rollouts: Sequence[Rollout], prompts: int) -> Strata:
    """Sort prompts by verdicts, in the order of sampling; only the first `prompts` with contrast count."""
    right, asked, places = Counter[int](), Counter[int](), dict[int, int]()
    for rollout in rollouts:
        asked[rollout.row] += 1
        right[rollout.row] += rollout.correct
        places[rollout.row] = rollout.place
    rows = sorted(asked, key=lambda row: places[row])
    mixed = [row for row in rows if 0 < right[row] < asked[row]]
    solved = tuple(row for row in rows if right[row] == asked[row])
    return Strata(tuple(mixed[:prompts]), solved, tuple(row for row in rows if right[row] == 0))


def sample_rollouts(
    store: Store, plan: Plan, rows: int, seed: int, proceed: Continue, describe: Describe, advance: Advance
) -> Strata:
    """Sample responses, prompt by prompt in random order, until enough prompts have contrast.

    Args:
        rows: of the data.
        seed: of the order.

    Raises:
        UserError: no prompt has contrast.
    """
    places = {row: place for place, row in enumerate(_order(rows, plan, seed))}
    try:
        for asked in _rounds(store, plan, rows, seed):
            prefixes = [Prefix((row, ALL), row, (), plan.samples, entropies=True) for row in asked]
            for prefix, samples in proceed(prefixes):
                store.add_rollouts(
                    _rollout(prefix.row, places[prefix.row], number, each, describe)
                    for number, each in enumerate(samples)
                )
                mixed = len(strata_of(store.rollouts, plan.prompts).mixed)
                advance("prompts with contrast", mixed, plan.prompts)
    finally:
        store.flush()
    strata = strata_of(store.rollouts, plan.prompts)
    if not strata.mixed:
        raise UserError(
            f"no prompt has contrast: of {len(strata.solved) + len(strata.never)} prompts {len(strata.solved)} are "
            f"always solved and {len(strata.never)} never, in {plan.samples} responses. Choose other data "
            "(data.val_files=FILE) or a larger --samples."
        )
    return strata


def _order(rows: int, plan: Plan, seed: int) -> list[int]:
    """The rows of the data that may be sampled, in random order."""
    order: list[int] = np.random.default_rng(seed).permutation(rows)[: TRIED * plan.prompts].tolist()
    return order


def _rounds(store: Store, plan: Plan, rows: int, seed: int) -> Iterator[list[int]]:
    """The rows to sample next, until enough have contrast: the rest of a round of as many as are wanted."""
    order = _order(rows, plan, seed)
    for start in range(0, len(order), plan.prompts):
        done = {rollout.row for rollout in store.rollouts}
        asked = [row for row in order[start : start + plan.prompts] if row not in done]
        if asked:
            yield asked
        if len(strata_of(store.rollouts, plan.prompts).mixed) == plan.prompts:
            return


def _rollout(row: int, place: int, number: int, sampled: Continuation, describe: Describe) -> Rollout:
    assert sampled.entropies is not None
    assert sampled.log_probs is not None
    tokens = sampled.tokens.tolist()
    cluster, prompt, texts = describe(row, tokens)
    return Rollout(
        row=row,
        place=place,
        sample=number,
        cluster=cluster,
        prompt=prompt,
        tokens=tokens,
        texts=texts,
        entropies=sampled.entropies.tolist(),
        log_probs=sampled.log_probs.tolist(),
        correct=sampled.correct,
        score=sampled.score,
        truncated=sampled.truncated,
    )


def choose_responses(rollouts: Sequence[Rollout], plan: Plan, seed: int) -> Chosen:
    """Choose the responses to audit, and cut them.

    Raises:
        UserError: all of them have fewer tokens than steps.
    """
    mixed = set(strata_of(rollouts, plan.prompts).mixed)
    ordered = sorted(rollouts, key=lambda rollout: (rollout.place, rollout.sample))
    batch = tuple(rollout for rollout in ordered if rollout.row in mixed)
    lengths = np.array([len(rollout.tokens) for rollout in batch])
    possible = lengths >= plan.steps
    if not possible.any():
        raise UserError(
            f"--steps {plan.steps}: the longest response has {lengths.max()} tokens, and a step has at least one. "
            f"Choose --steps {max(2, int(np.median(lengths)) // 2)} or less."
        )
    rows, weight = choose(
        [str(rollout.row) for rollout in batch],
        np.array([rollout.correct for rollout in batch]),
        possible,
        plan.responses,
        seed,
    )
    points = np.stack([cut_points(batch[row].texts, plan.steps) for row in rows])
    return Chosen(batch, rows, weight, points, int((~possible).sum()))


def groups_with_contrast(rollouts: Sequence[Rollout], plan: Plan) -> list[list[Rollout]]:
    """The responses to each prompt with contrast, in the order of sampling."""
    found: dict[int, list[Rollout]] = {row: [] for row in strata_of(rollouts, plan.prompts).mixed}
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
    half = plan.continuations // 2
    wanted = []

    def add(row: int, sample: int, place: int, tokens: Sequence[int], count: int, stage: int) -> None:
        for number in (0, 1):
            key = (row, sample, place, number, stage)
            wanted.append(Prefix(key, row, tuple(tokens[:place]), count))

    for row in dict.fromkeys(rollout.row for rollout in chosen.responses):
        add(row, OF_PROMPT, 0, (), AT_PROMPT * half, 1)
    for number, rollout in enumerate(chosen.responses):
        for place in chosen.points[number, 1:-1].tolist():
            add(rollout.row, rollout.sample, place, rollout.tokens, half, 1)
    more = plan.second_continuations // 2 - half
    for number in second_stage(chosen, plan, seed) if more > 0 else []:
        rollout = chosen.responses[number]
        for place in chosen.points[number, 1:-1].tolist():
            add(rollout.row, rollout.sample, place, rollout.tokens, more, 2)
    return wanted


def wanted_branches(chosen: Chosen, plan: Plan) -> list[Prefix]:
    """A request for the branches from the start of every step."""
    return [
        Prefix(
            (rollout.row, rollout.sample, start, OF_BRANCH),
            rollout.row,
            tuple(rollout.tokens[:start]),
            plan.branches,
            most=end - start,
        )
        for number, rollout in enumerate(chosen.responses)
        for start, end in itertools.pairwise(chosen.points[number].tolist())
        if plan.branches
    ]


def wanted_counts_of_branches(store: Store, chosen: Chosen, plan: Plan) -> list[Prefix]:
    """A request for the continuations of every branch that was sampled and has not ended."""
    of = {(rollout.row, rollout.sample): rollout for rollout in chosen.responses}
    return [
        Prefix(
            (*branch.key, OF_BRANCH),
            branch.row,
            (*of[branch.row, branch.sample].tokens[: branch.place], *branch.tokens),
            plan.of_a_branch,
        )
        for branch in store.branches.values()
        if not branch.ended and (branch.row, branch.sample) in of
    ]


def sample_values(store: Store, chosen: Chosen, plan: Plan, seed: int, proceed: Continue, advance: Advance) -> None:
    """Continue every point and every branch that has no counts yet, and keep each when it is finished."""
    _count(store, wanted_counts(chosen, plan, seed), "continuations", proceed, advance)
    if plan.branches:
        _sample_branches(store, wanted_branches(chosen, plan), proceed, advance)
        wanted = wanted_counts_of_branches(store, chosen, plan)
        _count(store, wanted, "continuations of branches", proceed, advance)


def _count(store: Store, wanted: Sequence[Prefix], what: str, proceed: Continue, advance: Advance) -> None:
    todo = [prefix for prefix in wanted if prefix.key not in store.counts]
    total = sum(prefix.count for prefix in wanted)
    done = total - sum(prefix.count for prefix in todo)
    advance(what, done, total)
    try:
        for prefix, samples in proceed(todo):
            row, sample, place, number, stage = prefix.key
            store.add(
                Count(
                    row,
                    sample,
                    place,
                    number,
                    stage,
                    trials=len(samples),
                    successes=sum(each.correct for each in samples),
                    decoded=sum(len(each.tokens) for each in samples),
                    truncated=sum(each.truncated for each in samples),
                )
            )
            done += prefix.count
            advance(what, done, total)
    finally:
        store.flush()


def _sample_branches(store: Store, wanted: Sequence[Prefix], proceed: Continue, advance: Advance) -> None:
    todo = [prefix for prefix in wanted if (*prefix.key[:3], 0) not in store.branches]
    done = len(wanted) - len(todo)
    advance("points with branches", done, len(wanted))
    try:
        for prefix, samples in proceed(todo):
            row, sample, place, _ = prefix.key
            store.add_branches(
                Branch(row, sample, place, number, each.tokens.tolist(), each.ended or each.truncated, each.correct)
                for number, each in enumerate(samples)
            )
            done += 1
            advance("points with branches", done, len(wanted))
    finally:
        store.flush()


def missing(store: Store, plan: Plan, rows: int, seed: int) -> bool:
    """Whether anything is left to sample."""
    if next(_rounds(store, plan, rows, seed), None):
        return True
    if plan.gradients:
        return False
    chosen = choose_responses(store.rollouts, plan, seed)
    if any((*prefix.key[:3], 0) not in store.branches for prefix in wanted_branches(chosen, plan)):
        return True
    wanted = wanted_counts(chosen, plan, seed) + wanted_counts_of_branches(store, chosen, plan)
    return any(prefix.key not in store.counts for prefix in wanted)


def measured(store: Store, chosen: Chosen, *, stages: Sequence[int] = (1, 2)) -> Values:
    """The values of the chosen responses.

    Raises:
        UserError: some were not sampled yet.
    """
    responses, points = chosen.points.shape
    successes, trials = np.zeros((2, responses, points - 1), np.int64), np.zeros((2, responses, points - 1), np.int64)
    found: dict[tuple[int, int, int, int], list[Count]] = {}
    for count in store.counts.values():
        if count.stage in stages:
            found.setdefault((count.row, count.sample, count.place, count.half), []).append(count)
    for number, rollout in enumerate(chosen.responses):
        for point, place in enumerate(chosen.points[number, :-1].tolist()):
            sample = OF_PROMPT if point == 0 else rollout.sample
            for half in (0, 1):
                counts = found.get((rollout.row, sample, place, half), [])
                successes[half, number, point] = sum(count.successes for count in counts)
                trials[half, number, point] = sum(count.trials for count in counts)
    if (trials < 2).any():
        left = int((trials < 2).sum())
        raise UserError(
            f"{left} of {trials.size} points were not sampled yet: repeat the command of the audit, which goes on."
        )
    correct = np.array([rollout.correct for rollout in chosen.responses])
    clusters = tuple(rollout.cluster for rollout in chosen.responses)
    return Values.of_counts(successes, trials, correct, clusters, chosen.weight)


def measured_branches(store: Store, chosen: Chosen, plan: Plan) -> tuple[Ints, Ints]:
    """Correct continuations behind the branches from the start of each step, and how many there were: (N, M, J) each.

    Branches that ended have 0 trials, and their verdict as successes.

    Raises:
        UserError: some were not sampled yet.
    """
    responses, points = chosen.points.shape
    successes = np.zeros((responses, points - 1, plan.branches), np.int64)
    trials = np.zeros_like(successes)
    left = 0
    for number, rollout in enumerate(chosen.responses):
        for step, place in enumerate(chosen.points[number, :-1].tolist()):
            for branch in range(plan.branches):
                key = rollout.row, rollout.sample, place, branch
                drawn, count = store.branches.get(key), store.counts.get((*key, OF_BRANCH))
                if drawn is not None and drawn.ended:
                    successes[number, step, branch] = drawn.correct
                elif count is not None:
                    successes[number, step, branch], trials[number, step, branch] = count.successes, count.trials
                else:
                    left += 1
    if left:
        raise UserError(
            f"{left} of {trials.size} branches were not sampled yet: repeat the command of the audit, which goes on."
        )
    return successes, trials
