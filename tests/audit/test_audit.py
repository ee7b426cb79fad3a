"""An audit from sampling to its page, on a policy whose values are known in the place of a model."""

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from softmax_table import products_of
from tabular_policy import TabularPolicy

from gtpo_verl.audit.methods import effective_credit, methods
from gtpo_verl.audit.page import wilson, write_page
from gtpo_verl.audit.plan import Plan
from gtpo_verl.audit.references import branch_shares, branch_variance
from gtpo_verl.audit.render import COLUMNS, kinds_table, print_plan, print_table, values_table
from gtpo_verl.audit.sampling import (
    choose_responses,
    groups_with_contrast,
    measured,
    measured_branches,
    missing,
    sample_rollouts,
    sample_values,
    second_stage,
    strata_of,
    wanted_branches,
    wanted_counts,
)
from gtpo_verl.audit.score import Result, measurement, score
from gtpo_verl.audit.store import OF_PROMPT, ROLLOUTS_FILE, Rollout, Store, as_facts, plan_of, read_records, reopen
from gtpo_verl.cli import main
from gtpo_verl.errors import UserError
from gtpo_verl.evaluation.continuations import Continuation, Prefix

PLAN = Plan(prompts=24, samples=6, responses=48, steps=8, continuations=16, second_stage=6, second_continuations=32)
SEED = 3
TEXTS = ("3", "<", " so;", " we", ",")  # of the tokens; the third ends a clause


class Table:
    """Continues prefixes by the table; each request has a stream of its own, as on a server. last: a token that ends a
    response.
    """

    def __init__(self, prompts: int = 40, stop_after: int | None = None, last: int | None = None) -> None:
        self.policy = TabularPolicy(prompts, seed=5)
        self.asked: list[tuple[int, ...]] = []
        self.stop_after, self.last = stop_after, last

    def proceed(self, prefixes: Iterable[Prefix]) -> Iterator[tuple[Prefix, Sequence[Continuation]]]:
        for prefix in prefixes:
            if self.stop_after is not None and len(self.asked) == self.stop_after:
                raise KeyboardInterrupt
            self.asked.append(prefix.key)
            rng = np.random.default_rng([abs(number) for number in prefix.key])
            yield prefix, [self._continued(prefix, rng) for _ in range(prefix.count)]

    def _continued(self, prefix: Prefix, rng: np.random.Generator) -> Continuation:
        policy, row, state = self.policy, prefix.row, int(self.policy.start[prefix.row])
        for t, token in enumerate(prefix.tokens):
            state = int(policy.next[row, t, state, token])
        tokens, entropies, log_probs = [], [], []
        end = policy.length if prefix.most is None else min(policy.length, len(prefix.tokens) + prefix.most)
        for t in range(len(prefix.tokens), end):
            token = int(rng.choice(5, p=policy.probs[row, t, state]))
            tokens.append(token)
            entropies.append(policy.entropy[row, t, state])
            log_probs.append(policy.log_probs[row, t, state, token])
            state = int(policy.next[row, t, state, token])
            if token == self.last:
                break
        correct = state >= policy.states // 2
        wanted = prefix.entropies
        return Continuation(
            tokens=np.array(tokens, dtype=np.int32),
            correct=correct,
            score=1.0 if correct else -1.0,
            truncated=False,
            ended=len(prefix.tokens) + len(tokens) == policy.length or tokens[-1] == self.last,
            entropies=np.array(entropies, dtype=np.float32) if wanted else None,
            log_probs=np.array(log_probs, dtype=np.float32) if wanted else None,
        )

    def describe(self, row: int, tokens: Sequence[int]) -> tuple[str, str, list[str]]:
        return f"cluster {row}", f"prompt {row}", [TEXTS[token] for token in tokens]


def audit(table: Table, store: Store, plan: Plan = PLAN) -> None:
    rows = len(table.policy.start)
    try:
        sample_rollouts(store, plan, rows, SEED, table.proceed, table.describe, _nothing)
        sample_values(store, choose_responses(store.rollouts, plan, SEED), plan, SEED, table.proceed, _nothing)
    finally:
        store.flush()


def _nothing(what: str, done: int, total: int) -> None:
    assert done <= total


def facts_of(plan: Plan = PLAN, **more: Any) -> dict[str, Any]:
    return {
        "model": "a/table",
        "command": "gtpo-verl audit table",
        "versions": {"torch": "2"},
        "hardware": "none",
        "overlong": None,
        "seed": SEED,
        "seconds": 0.0,
        "settings": as_facts(plan) | more,
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = Store(tmp_path_factory.mktemp("audit"), facts_of())
    audit(Table(), store)
    return store


@pytest.fixture(scope="module")
def result(finished: Store) -> Result:
    return score(finished, PLAN, SEED, methods(["gtpo", "fork20", "kl_cov", "dr_grpo", "grpo"]), None)


# -------------------------------------------------------------------- sampling


@pytest.mark.slow
def test_a_stopped_audit_goes_on_and_samples_nothing_twice(finished: Store, tmp_path: Path) -> None:
    asked: list[tuple[int, ...]] = []
    for stop_after in (10, 60, 200, None):
        table, store = Table(stop_after=stop_after), Store(tmp_path, facts_of())
        try:
            audit(table, store)
        except KeyboardInterrupt:
            assert stop_after is not None
        asked += table.asked
    assert len(set(asked)) == len([key for key in asked if len(key) == 5]) + len({k for k in asked if len(k) == 2})
    assert store.counts == finished.counts
    assert not missing(store, PLAN, 40, SEED)
    assert reopen(tmp_path).counts == finished.counts
    assert reopen(tmp_path).rollouts == store.rollouts
    assert choose_responses(store.rollouts, PLAN, SEED).batch == choose_responses(finished.rollouts, PLAN, SEED).batch
    assert plan_of(reopen(tmp_path)) == PLAN


def test_a_killed_audit_leaves_whole_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gtpo_verl.audit.store.WRITE_EVERY", -1.0)  # as where every prompt takes longer
    written: list[list[int]] = []
    flush = Store.flush

    def look(store: Store) -> None:
        flush(store)
        written.append(list(Counter(each.row for each in read_records(tmp_path / ROLLOUTS_FILE, Rollout)).values()))

    monkeypatch.setattr(Store, "flush", look)
    table = Table(stop_after=3)
    with pytest.raises(KeyboardInterrupt):
        sample_rollouts(Store(tmp_path, facts_of()), PLAN, 40, SEED, table.proceed, table.describe, _nothing)
    assert written == [[6], [6, 6], [6, 6, 6]]


def test_other_settings_are_refused_and_fresh_discards(finished: Store, tmp_path: Path) -> None:
    store = Store(tmp_path, facts_of(model="A"))
    store.rollouts = list(finished.rollouts)
    store.flush()
    with pytest.raises(UserError, match="model was A, is B"):
        Store(tmp_path, facts_of(model="B"))
    assert Store(tmp_path, facts_of(model="B"), fresh=True).rollouts == []
    with pytest.raises(UserError, match="holds no finished audit"):
        reopen(tmp_path / "nothing")


@pytest.mark.slow
def test_the_counts_are_those_of_the_chosen_points(finished: Store, result: Result) -> None:
    chosen = result.chosen
    values = measured(finished, chosen)
    assert set(values.trials[0, :, 0]) == {4 * PLAN.continuations // 2}
    more = second_stage(chosen, PLAN, SEED)
    assert [chosen.responses[number].correct for number in more].count(False) == 4
    expected = [16.0 if number in more else 8.0 for number in range(len(chosen.rows))]
    assert values.trials[0, :, 3].tolist() == expected
    # V of the table at the same prefixes: z values of all points are standard normal
    policy = Table().policy
    z = []
    for number, rollout in enumerate(chosen.responses):
        state = int(policy.start[rollout.row])
        for t, token in enumerate(rollout.tokens):
            if t in chosen.points[number, 1:-1]:
                V, point = policy.V[rollout.row, t, state], int(np.flatnonzero(chosen.points[number] == t)[0])
                if 0.05 < V < 0.95:
                    trials = values.trials[:, number, point].sum()
                    z.append((values.mean[number, point] - V) / np.sqrt(V * (1 - V) / trials))
            state = int(policy.next[rollout.row, t, state, token])
    assert abs(np.mean(z)) < 3.5 / np.sqrt(len(z) / 3)  # points of a prompt share a state now and then
    assert np.std(z) == pytest.approx(1, abs=0.2)


def test_without_contrast_there_is_nothing_to_audit(tmp_path: Path) -> None:
    table = Table(12)
    table.policy.start[:] = 0  # lost before the first token
    with pytest.raises(UserError, match=r"no prompt has contrast: of 12 prompts 0 are always solved and 12 never"):
        audit(table, Store(tmp_path, facts_of()))


def test_prompts_are_counted_up_to_the_last_with_contrast_that_is_used() -> None:
    verdicts = {7: [0, 1], 3: [1, 1], 5: [0, 0], 2: [1, 0], 8: [0, 0], 9: [0, 1]}  # by row, in the order of sampling
    rollouts = [
        Rollout(row, place, number, "", "", [], [], [], [], bool(right), 0.0, False)
        for place, (row, each) in enumerate(verdicts.items())
        for number, right in enumerate(each)
    ]
    assert strata_of(rollouts[::-1], 2) == ((7, 2), (3,), (5,))
    assert strata_of(rollouts, 4) == ((7, 2, 9), (3,), (5, 8))


def test_more_steps_than_tokens_are_a_step_for_every_token(finished: Store) -> None:
    plan = Plan(steps=30)
    chosen = choose_responses(finished.rollouts, plan, SEED)
    assert {len(rollout.tokens) for rollout in chosen.responses} == {24}
    assert set(map(tuple, chosen.points)) == {(*range(24), *[24] * 7)}
    inside = [prefix.key[2] for prefix in wanted_counts(chosen, plan, SEED) if prefix.key[1] != OF_PROMPT]
    assert set(inside) == set(range(1, 24))
    assert {len(prefix.tokens) for prefix in wanted_branches(chosen, replace(plan, branches=2))} == set(range(24))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"continuations": 6}, "--continuations 6: it must be an even number, at least 8"),
        ({"continuations": 9}, "--continuations 9: it must be an even number"),
        ({"steps": 1}, "--steps 1: it must be at least 2"),
        ({"samples": 1}, "--samples 1: it must be at least 2"),
        ({"second_stage": -1}, "--second-stage -1"),
        ({"branches": 1}, "--branches 1: it must be 0, or at least 2"),
        ({"gradients": 19}, "--gradients 19: it must be at least 20"),
        ({"gradients": 65}, "--gradients 65: it must be at least 20, for intervals, and at most --prompts 64"),
    ],
)
def test_plans_that_cannot_be(options: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        Plan(**options)


def test_the_plan_knows_cost_and_power(capsys: pytest.CaptureFixture[str]) -> None:
    plan = Plan()
    assert plan.continued == 128 * 15 * 16 + 64 * 64
    assert plan.decoded(1000) == pytest.approx(64 * (8 + 64) * 1000 + 128 * 15 * 16 * 500)
    branched = replace(plan, branches=8)
    assert branched.continued - plan.continued == 128 * 16 * 8 * 8
    assert branched.decoded(1000) - plan.decoded(1000) == pytest.approx(128 * 16 * 64 * 500 + 128 * 8 * 1000)
    assert plan.reliability == 0.5
    assert plan.detectable == pytest.approx(0.11, abs=0.005)
    print_plan(plan, 1000, 100, measured=True, cached=True)
    printed = capsys.readouterr().out
    assert "34,816 continuations" in printed
    assert "Smallest alignment seen at 5 %, power 80 %: 0.11" in printed
    print_plan(plan, 10, 100, measured=True)  # a response of ten tokens has ten steps
    assert f"in at most 16 steps, about {128 * 9 * 16 + 64 * 64:,} continuations" in capsys.readouterr().out
    print_plan(replace(PLAN, gradients=20), 30, methods=4, measured=False)
    assert "20 groups with contrast and 4 more in the true gradient" in capsys.readouterr().out


def test_responses_of_fewer_tokens_than_steps(tmp_path: Path) -> None:
    plan = replace(PLAN, second_stage=0, branches=2)
    store = Store(tmp_path, facts_of(plan))
    audit(Table(last=3), store, plan)
    found = score(store, plan, SEED, methods(["gtpo", "fork20"]), None)
    values, lengths = found.values, np.array([len(rollout.tokens) for rollout in found.chosen.responses])
    assert lengths.min() == 1
    assert np.unique(lengths).size > 8
    assert values.is_step.sum(1).tolist() == np.minimum(lengths, plan.steps).tolist()
    assert (np.diff(found.chosen.points) > 0).tolist() == values.is_step.tolist()
    assert values.advantages.sum(2) == pytest.approx(values.correct - values.halves[:, :, 0])
    assert not values.advantages[:, ~values.is_step].any()
    figures = found.analysis.methods["gtpo"]["figures"]["all"]
    assert all(figure.value is not None for figure in figures.values()), figures
    for verdict in found.analysis.kinds.values():
        for name in ("tokens", "energy"):
            assert sum(kind[name].value for kind in verdict.values()) == pytest.approx(1)
    measured = measurement(store, found)
    assert measured["tokens_a_step"] == pytest.approx(lengths.sum() / np.minimum(lengths, plan.steps).sum())
    facts = measured | {"solved": 0, "never": 0}
    page = write_page(store, values_table(found, plan, facts), facts, responses=(found, plan)).read_text()
    shown = re.findall(r'<div class="text" id="credit-\d">(.*?)</div>', page)
    assert len(shown) == 8
    assert all(text.count("data-token") > 1 for text in shown)  # of one token there is nothing to see


# -------------------------------------------------------------------- branches

BRANCHED = replace(PLAN, second_stage=0, responses=24, branches=8)


@pytest.fixture(scope="module")
def branched(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """An audit with branches that was stopped among the branches and among their continuations."""
    directory = tmp_path_factory.mktemp("branched")
    for stop_after in (450, 700, None):
        try:
            audit(Table(stop_after=stop_after), Store(directory, facts_of(BRANCHED)), BRANCHED)
        except KeyboardInterrupt:
            assert missing(reopen(directory), BRANCHED, 40, SEED)
    return reopen(directory)


@pytest.mark.slow
def test_the_variance_of_the_branches_is_that_of_the_table(branched: Store) -> None:
    assert plan_of(branched) == BRANCHED
    assert not missing(branched, BRANCHED, 40, SEED)
    chosen = choose_responses(branched.rollouts, BRANCHED, SEED)
    successes, trials = measured_branches(branched, chosen, BRANCHED)
    assert successes.shape == (24, 8, 8)
    assert set(trials[:, :-1].ravel()) == {BRANCHED.continuations // 2}
    assert set(trials[:, -1].ravel()) == {0}  # responses end there, and their verdicts are known
    assert np.isin(successes[:, -1], (0, 1)).all()
    policy, exact = Table().policy, np.zeros(successes.shape[:2])
    V = np.zeros_like(exact)
    for number, rollout in enumerate(chosen.responses):
        states = [int(policy.start[rollout.row])]
        for t, token in enumerate(rollout.tokens):
            states.append(int(policy.next[rollout.row, t, states[-1], token]))
        for step, (start, end) in enumerate(itertools.pairwise(chosen.points[number].tolist())):
            exact[number, step] = policy.variance_behind(start, end)[rollout.row, states[start]]
            V[number, step] = policy.V[rollout.row, start, states[start]]
    error = branch_variance(successes, trials) - exact
    assert abs(error.mean()) < 4 * error.std() / np.sqrt(error.size)
    assert np.corrcoef(branch_variance(successes, trials).ravel(), exact.ravel())[0, 1] > 0.6
    difference = branch_shares(successes, trials).mean(axis=-1) - V
    assert abs(difference.mean()) < 4 * difference.std() / np.sqrt(difference.size)


@pytest.mark.slow
def test_the_state_oracle_is_a_row_where_branches_were_sampled(
    branched: Store, result: Result, capsys: pytest.CaptureFixture[str]
) -> None:
    found = score(branched, BRANCHED, SEED, methods(["gtpo", "fork20"]), None)
    state = found.analysis.methods["state"]["figures"]
    for stratum in ("correct", "wrong"):
        assert state[stratum]["alignment"].value > found.analysis.methods["gtpo"]["figures"][stratum]["alignment"].value
    print_table(values_table(found, BRANCHED, measurement(branched, found) | {"solved": 0, "never": 0}))
    assert "state oracle" in capsys.readouterr().out
    assert "state" not in result.analysis.methods


@pytest.mark.slow
def test_branches_that_are_missing_are_counted(finished: Store) -> None:
    chosen = choose_responses(finished.rollouts, PLAN, SEED)
    size = len(chosen.rows) * PLAN.steps * 8
    with pytest.raises(UserError, match=rf"{size} of {size} branches were not sampled yet: repeat the command"):
        measured_branches(finished, chosen, replace(PLAN, branches=8))


# -------------------------------------------------------------------- figures


@pytest.mark.slow
def test_credit_as_it_enters_the_gradient() -> None:
    A = np.array([[1.0, 1.0, 0.0], [-2.0, 0.0, 0.0]])
    mask = np.array([[True, True, False], [True, False, False]])
    assert effective_credit(A, mask, "token-mean") == pytest.approx(A)
    # 3 tokens, 2 responses: A / (2 · length) · 3
    assert effective_credit(A, mask, "seq-mean-token-mean")[:, 0].tolist() == pytest.approx([0.75, -3.0])
    names = {method.name: method for method in methods(["gtpo", "kl_cov", "gspo", "clip_cov", "grpo"])}
    assert [name for name, method in names.items() if not method.scored] == ["kl_cov", "clip_cov"]
    assert names["gtpo"].settings.entropy_floor == 1e-3  # the preset's
    assert methods(["gtpo"], ["algorithm.gtpo.alpha2=0.5", "data.seed=1"])[1].settings.alpha2 == 0.5
    with pytest.raises(UserError, match=r"--methods gtpoo: no such algorithm; did you mean gtpo"):
        methods(["gtpoo"])


@pytest.mark.slow
def test_the_table_and_the_page(finished: Store, result: Result, capsys: pytest.CaptureFixture[str]) -> None:
    facts = measurement(finished, result) | {"solved": 3, "never": 4}
    assert facts["responses_audited"] == len(result.chosen.rows) <= 48
    assert facts["continuations"] == sum(count.trials for count in finished.counts.values())
    table = values_table(result, PLAN, facts)
    print_table(table)
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("DAPO", "GTPO", "random weights", "position alone", "8 continuations"))
    assert "…" not in printed
    assert all(word in printed for name, *_ in COLUMNS for word in name.replace(",", "").split())
    assert "With DAPO's credit at ratios of 1: kl_cov." in printed
    assert "3 prompts always solved and 4 never" in " ".join(printed.split())
    page = write_page(finished, table, facts, responses=(result, PLAN)).read_text()
    assert len(re.findall(r'<div class="picture">', page)) == 8
    assert page.count('data-token="') == 8 * 24
    assert 'class="step down lost"' in page or 'class="step down unsure lost"' in page
    assert not re.search(r'(src|href|url\()\s*=?\s*["\']?(https?:)?//', page)
    (credit,) = re.findall(r"const credit = (.*);\n", page)
    values = json.loads(credit)
    assert set(values) == {"gtpo", "fork20", "dr_grpo", "grpo"}
    assert max(map(abs, values["gtpo"][0])) == 1
    assert values["dr_grpo"][0] == []  # nothing to colour: the same for every token
    assert {heading for heading, *_ in COLUMNS} <= set(re.findall(r"<th>([^<]+)</th>", page))
    batch = tuple(replace(rollout, texts=[" "] * 24) for rollout in result.chosen.batch)
    spaces = replace(result, chosen=replace(result.chosen, batch=batch))
    page = write_page(finished, table, facts, responses=(spaces, PLAN)).read_text()
    assert page.count("␄") == 8 * 2  # a sign for the end alone, in both lines


@pytest.mark.slow
def test_the_breakdown_by_kinds_of_tokens(finished: Store, result: Result) -> None:
    kinds = result.analysis.kinds
    assert {verdict: set(each) for verdict, each in kinds.items()} == {
        verdict: {"numbers", "operators", "words", "punctuation"} for verdict in ("correct", "wrong")
    }
    table = kinds_table(kinds, PLAN)
    assert table.columns[:2] == ["share of tokens", "share of Σ A²"]
    assert {"DAPO", "GTPO", "DAPO, forking tokens"} <= set(table.columns)
    assert "GRPO" not in table.columns  # all responses have one length: its credit is DAPO's
    assert len(table.rows) == 8
    facts = measurement(finished, result) | {"solved": 3, "never": 4}
    alone = score(finished, PLAN, SEED, methods(["dapo"]), None)
    assert kinds_table(alone.analysis.kinds, PLAN).columns == ["share of tokens", "share of Σ A²"]
    old = replace(result, analysis=replace(result.analysis, kinds={}))
    pages = [
        write_page(finished, values_table(one, PLAN, facts), facts, responses=(one, PLAN)).read_text()
        for one in (result, alone, old)
    ]
    assert ["<h2>Breakdown</h2>" in page for page in pages] == [True, True, False]
    assert ["under a method’s name" in page for page in pages] == [True, False, False]
    value, interval = table.rows[0][1][1][:2]
    assert table.rows[0][0] == "correct, numbers"
    assert f"<td>{value}<small>{interval}</small></td>" in pages[0]
    assert interval


def test_figures_are_in_the_record(finished: Store, result: Result) -> None:
    finished.record(vars(result.analysis))
    record = json.loads((finished.directory / "audit.json").read_text())
    value, low, high = record["methods"]["fork20"]["figures"]["wrong"]["alignment"]
    assert low < value < high
    assert record["methods"]["fork20"]["minus"]["gtpo"]["wrong"]["alignment"][0] is not None
    assert 0 < record["reliability"]["all"]["half"][0] < 1
    assert len(record["mean_advantage_by_step"]) == PLAN.steps
    numbers = record["kinds"]["wrong"]["numbers"]
    assert numbers["tokens"][1] < numbers["tokens"][0] < numbers["tokens"][2]
    assert set(numbers["credit"]) == set(result.tokens)


def test_intervals_of_shares() -> None:
    low, high = wilson(np.array([0.0, 0.5, 1.0, 0.3]), np.array([16.0, 16.0, 16.0, np.inf]))
    assert low[0] == pytest.approx(0, abs=1e-12)
    assert high[0] == pytest.approx(0.1936, abs=1e-3)
    assert (low[1], high[1]) == pytest.approx((0.2800, 0.7200), abs=1e-3)
    assert low[3] == high[3] == 0.3


# -------------------------------------------------------------------- gradients


def test_an_audit_of_gradients_samples_groups_alone_and_is_analysed_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = replace(PLAN, gradients=20, second_stage=0)
    more = {"step": 12, "chosen": "layers", "parameters": 6, "log_prob_difference": 1e-6}
    store = Store(tmp_path, facts_of(plan) | more)
    table = Table()
    sample_rollouts(store, plan, 40, SEED, table.proceed, table.describe, _nothing)
    store.flush()
    assert not missing(store, plan, 40, SEED)
    groups = groups_with_contrast(store.rollouts, plan)
    assert len(groups) == 24
    assert all(len(group) == 6 and len({each.row for each in group}) == 1 for group in groups)
    assert all(0 < sum(each.correct for each in group) < 6 for group in groups)
    with pytest.raises(UserError, match="holds no finished audit"):  # before its gradients are there
        reopen(tmp_path)
    rng = np.random.default_rng(0)
    audited, h = np.arange(24) < 20, rng.normal(size=(24, 6)) + 1
    g = {
        name: (h + noise * rng.normal(size=h.shape)) * audited[:, None] for name, noise in (("dapo", 0.1), ("gtpo", 2))
    }
    products_of(g, h, audited, np.ones(6)).write(tmp_path / "gradients.npz")
    assert plan_of(reopen(tmp_path)) == plan
    assert main(["audit", "--reanalyse", str(tmp_path), "--methods", "gtpo"]) == 2
    assert "leave out --methods" in capsys.readouterr().err
    assert main(["audit", "--reanalyse", str(tmp_path)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "20 groups of 6 responses with contrast and 4 more in the true gradient" in printed
    assert "For as much progress along the true gradient GTPO needs" in printed
    found = json.loads((tmp_path / "audit.json").read_text())["gradients"]["methods"]
    value, low, high = found["gtpo"]["sgd"]["along/dapo"]
    assert 1 < low < value < high
    page = (tmp_path / "audit.html").read_text()
    assert "How much signal and how much noise has each gradient?" in page
    assert "Where are signal and noise?" in page
    Store(tmp_path, facts_of(plan))  # the command again, stopped before it has measured
    with pytest.raises(UserError, match="holds no finished audit"):
        reopen(tmp_path)
    assert "Where credit was due" not in page


# -------------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name what to audit"),
        (["nothing/at/all", "--continuations", "6"], "--continuations 6"),
        (["--reanalyse", "nothing"], "holds no finished audit"),
    ],
)
def test_what_is_refused_in_one_line(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["audit", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_results_are_not_written_to_an_address(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["audit", "model", "--output", "s3://bucket/audit"])
    assert "argument --output: s3://bucket/audit is remote storage" in capsys.readouterr().err


def test_a_pattern_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["audit", "model", "--gradients", "20", "--gradient-params", "["])
    assert "argument --gradient-params: '[' is no regular expression" in capsys.readouterr().err


@pytest.mark.slow
def test_analysing_again_needs_no_model(finished: Store, capsys: pytest.CaptureFixture[str]) -> None:
    file = finished.directory / "audit.json"
    before = json.loads(file.read_text())
    file.write_text(json.dumps({key: value for key, value in before.items() if key != "kinds"}))  # of an older version
    assert main(["audit", "--reanalyse", str(finished.directory), "--methods", "fork20"]) == 0
    printed = capsys.readouterr().out
    assert "DAPO" in printed
    assert (finished.directory / "audit.html").is_file()
    record = json.loads((finished.directory / "audit.json").read_text())
    assert set(record["methods"]) == {"dapo", "fork20", "position", "random", "oracle"}
    assert set(record["kinds"]["wrong"]["numbers"]["credit"]) == {"dapo", "fork20"}
