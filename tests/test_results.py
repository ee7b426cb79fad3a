"""The committed verdict is what its committed data say, and its statistics are what they are called."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from scipy import stats

from gtpo_verl.evaluation.summary import Sample, logged, summarize
from gtpo_verl.runs.directory import record_metrics

RESULTS = Path(__file__).parents[1] / "docs" / "results"


@pytest.fixture
def verdict(tmp_path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("verdict", RESULTS / "verdict.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["verdict"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def small(verdict: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Without data but the predictors, with half the seeds of part A, and parts that all end with their last seed."""
    monkeypatch.setattr(verdict, "DATA", tmp_path)
    for task in verdict.TASKS:
        shutil.copy(RESULTS / "data" / verdict.predictors(task).name, tmp_path)
    for part, seeds in (("A", range(101, 109)), ("B", range(101, 107)), ("C", range(101, 109)), ("D", range(101, 107))):
        monkeypatch.setitem(verdict.PARTS, part, replace(verdict.PARTS[part], seeds=seeds, most=len(seeds)))
    return verdict


def test_the_page_is_computed_from_the_data(verdict: ModuleType) -> None:
    assert verdict.page() == (RESULTS / "verdict.md").read_text()


def test_the_picture_shows_what_the_page_says(verdict: ModuleType) -> None:
    label = r'aria-label="(\w+, \w+ − \w+: [^"]+)"'
    said = re.findall(label, verdict.PICTURE.read_text())
    drawn = verdict.picture(verdict.used("A", verdict.every_run()))
    assert said == re.findall(label, drawn)
    assert len(said) == 12
    page = verdict.page()
    for each in said:
        task, contrast, mean, low, high = re.fullmatch(r"(\w+), (.*): (\S+) \((\S+) to (\S+)\)", each).groups()
        assert re.search(
            rf"\| {task} \| {contrast} \| 8 \| {re.escape(mean)} \| {re.escape(low)} to {re.escape(high)} \|", page
        ), each


def test_the_readme_has_the_primary_contrasts_of_the_page(verdict: ModuleType) -> None:
    seeds = verdict.used("A", verdict.every_run())
    readme = (RESULTS.parents[1] / "README.md").read_text()
    names = ("GTPO − DAPO", "GRPO-S − DAPO", "GTPO − half the blame for wrong answers (`dapo_blame`)")
    for name, pair in zip(names, verdict.PRIMARY, strict=True):
        found = verdict.contrasts_of(verdict.TASKS, [pair], seeds).values()
        cells = [f"{verdict.points(each.mean)} ({each.low:.2f} to {each.high:.2f})".replace("-", "−") for each in found]
        assert f"| {name} | {cells[0]} | {cells[1]} |" in readme


def run_of(verdict: ModuleType, accuracy: float) -> dict[str, object]:
    return {
        "validations": {str(step): accuracy + 0.01 * place for place, step in enumerate(verdict.VALIDATED)},
        "steps": {name: [1.0] * verdict.STEPS for name in verdict.KEPT},
        "commit": "c" * 40,
    }


GAINS = {"gtpo": 0.05, "grpo_s": 0.0, "random20": -0.1, "random60": -0.05}


def write_part(verdict: ModuleType, part: str, gains: dict[str, float]) -> None:
    """Runs whose pairs with DAPO differ by the gains and a little noise."""
    rng = np.random.default_rng(0)
    for task, seed, arm, _ in verdict.planned(part, list(verdict.TASKS)):
        record = verdict.read(task, seed)
        gain = 0.0 if arm == "dapo" else gains.get(arm, 0.0) + rng.normal(0, 0.005)
        record["runs"][arm] = run_of(verdict, 0.5 + gain)
        verdict.write_json(verdict.data_file(task, seed), record)


def change(verdict: ModuleType, task: str, seed: int, arm: str, **values: object) -> None:
    record = verdict.read(task, seed)
    record["runs"][arm] |= values
    verdict.write_json(verdict.data_file(task, seed), record)


def verdict_of(page: str, task: str, contrast: str) -> str:
    rows = (line for line in page.splitlines() if line.startswith(f"| {task} | {contrast} |"))
    (line,) = (row for row in rows if row.count("|") > 10)
    return line.split(" | ")[-1].removesuffix(" |")


@pytest.mark.parametrize("task", ["sums", "countdown"])
def test_validations_are_found_under_the_name_that_the_repeated_rows_give_them(
    verdict: ModuleType, tmp_path: Path, task: str
) -> None:
    samples = [Sample("a", "source", correct=place == 0) for place in range(verdict.REPEATS[task])]
    for step in (0, 1, 2, *(3, 4, 5, 6), 6):
        metrics = {"credit/entropy_all": float(step)} | (logged(summarize(samples)) if step in (0, 6) else {})
        record_metrics(tmp_path, step, metrics)

    found = verdict.numbers(tmp_path, task)

    assert found["validations"] == {"0": 1 / len(samples), "6": 1 / len(samples)}
    assert found["steps"]["entropy"] == [1, 2, 3, 4, 5, 6, *[None] * 18], "a repeated step counts once"


def test_a_failed_run_has_no_endpoint(verdict: ModuleType) -> None:
    run = run_of(verdict, 0.5)
    assert verdict.endpoint(run) == pytest.approx(0.515)
    assert verdict.endpoint(run | {"failed": "no memory"}) is None


def test_nothing_is_trained_before_the_predictors_are_there(
    verdict: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdict, "DATA", tmp_path)
    with pytest.raises(SystemExit, match="predictors-sums"):
        verdict.train("B", ["sums"], 1.0, tmp_path)


@pytest.fixture
def trainable(small: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """With a checkout of one commit around it, and one run to train, DAPO on sums, whose warm start is there."""
    checkout = tmp_path / "checkout"
    for folder in ("gtpo_verl", "configs", "docs/results"):
        (checkout / folder).mkdir(parents=True)
        (checkout / folder / "file").write_text("committed\n")
    for words in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "first")):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True, cwd=checkout)
    monkeypatch.setattr(small, "HERE", checkout / "docs" / "results")
    monkeypatch.setattr(small, "prepared", lambda task, seed, scratch: (scratch, {"weights": "w"}))
    one = replace(small.PARTS["A"], arms={"dapo": ("algo=dapo",)}, seeds=(101,), tasks=("sums",))
    monkeypatch.setitem(small.PARTS, "A", one)
    return small


@pytest.mark.parametrize("place", ["gtpo_verl/file", "gtpo_verl/new", "configs/file", "configs/new"])
def test_uncommitted_sources_are_not_trained(trainable: ModuleType, tmp_path: Path, place: str) -> None:
    (trainable.HERE.parents[1] / place).write_text("changed\n")
    with pytest.raises(SystemExit, match="has uncommitted changes") as error:
        trainable.train("A", ["sums"], 1.0, tmp_path)
    assert "commit or stash" in str(error.value)
    assert "\n" not in str(error.value)
    assert not trainable.data_file("sums", 101).exists()


def test_a_run_keeps_what_another_process_wrote_meanwhile_and_says_what_it_was(
    trainable: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = []

    def command(task: str, seed: int, overrides: tuple[str, ...], place: Path, run: Path) -> list[str]:
        """A first attempt that fails, and a second during which another process finishes GTPO."""
        attempts.append(run)
        if len(attempts) == 1:
            return [sys.executable, "-c", "raise SystemExit(1)"]
        run.mkdir()
        for step in trainable.VALIDATED:
            record_metrics(run, step, logged(summarize([Sample("a", "source", correct=True)])))
        other = {"start": {"weights": "w"}, "runs": {"gtpo": {"commit": "d" * 40}}}
        trainable.write_json(trainable.data_file(task, seed), other)
        return [sys.executable, "-c", ""]

    monkeypatch.setattr(trainable, "command", command)
    (trainable.HERE / "file").write_text("changed, and trained by nobody\n")

    trainable.train("A", ["sums"], 1.0, tmp_path)

    runs = trainable.read("sums", 101)["runs"]
    assert runs["gtpo"] == {"commit": "d" * 40}
    assert trainable.endpoint(runs["dapo"]) == 1.0
    assert runs["dapo"]["attempts"] == 2
    assert {"verl", "vllm", "torch", "ray", "transformers"} <= set(runs["dapo"]["versions"])
    assert len(runs["dapo"]["commit"]) == 40


def test_a_seed_that_another_machine_began_is_left_and_the_next_is_trained(
    trainable: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(task: str, seed: int, overrides: tuple[str, ...], place: Path, run: Path) -> list[str]:
        run.mkdir()
        for step in trainable.VALIDATED:
            record_metrics(run, step, logged(summarize([Sample("a", "source", correct=True)])))
        return [sys.executable, "-c", ""]

    monkeypatch.setattr(trainable, "command", command)
    monkeypatch.setitem(trainable.PARTS, "A", replace(trainable.PARTS["A"], seeds=(101, 102)))
    begun = {"start": {"weights": "of another machine"}, "runs": {"gtpo": {"commit": "d" * 40}}}
    trainable.write_json(trainable.data_file("sums", 101), begun)

    trainable.train("A", ["sums"], 1.0, tmp_path)

    assert trainable.read("sums", 101) == begun
    assert trainable.endpoint(trainable.read("sums", 102)["runs"]["dapo"]) == 1.0
    assert "sums 101 dapo: left, since sums-101.json is of another machine" in capsys.readouterr().out


def test_part_a_is_judged_when_all_its_runs_are_there_or_failed(small: ModuleType) -> None:
    verdict = small
    write_part(verdict, "A", GAINS)
    whole = verdict.read("sums", 101)
    without_control = {"runs": {arm: run for arm, run in whole["runs"].items() if arm != "random60"}}
    verdict.write_json(verdict.data_file("sums", 101), without_control)
    page = verdict.page()
    assert page.count("Not complete") == 4
    assert "| A | 112 | 111 | 0 | 102, 103, 104, 105, 106, 107, 108 | 8 | none |" in page
    assert "p at" not in page
    assert "Levels" not in page

    verdict.write_json(verdict.data_file("sums", 101), whole)
    change(verdict, "sums", 101, "gtpo", failed="no memory")
    change(verdict, "sums", 102, "gtpo", failed="no memory")
    page = verdict.page()
    assert (
        "| A | 112 | 110 | 2 | 101, 102, 103, 104, 105, 106, 107, 108 | 8 | 101, 102, 103, 104, 105, 106, 107, 108 |"
        in page
    )
    assert f"- part A, 112 runs of commit {'c' * 40}" in page
    assert "- failed: sums 102 gtpo\n" in page
    assert verdict_of(page, "sums", "gtpo − dapo") == "better"
    assert verdict_of(page, "sums", "grpo_s − dapo") == "equivalent within 2 points"

    change(verdict, "sums", 103, "gtpo", failed="no memory")
    page = verdict.page()
    assert "| sums | gtpo − dapo | too few |" in page
    assert verdict_of(page, "sums", "gtpo − dapo") == "not decided"
    assert verdict_of(page, "countdown", "gtpo − dapo") == "better"


@pytest.mark.parametrize(("part", "seeds"), [("A", 5), ("B", 3), ("C", 3), ("D", 3)])
def test_a_part_with_fewer_whole_seeds_than_the_least_is_not_decided(
    small: ModuleType, monkeypatch: pytest.MonkeyPatch, part: str, seeds: int
) -> None:
    verdict = small
    for name, gains in (("A", GAINS), ("B", {}), ("C", {}), ("D", {})):
        write_part(verdict, name, gains)

    def words(count: int) -> list[str]:
        for name in "ABCD" if part == "A" else part:  # the others need as many seeds of part A
            short = replace(verdict.PARTS[name], seeds=tuple(range(101, 101 + count)), most=count)
            monkeypatch.setitem(verdict.PARTS, name, short)
        return re.findall(r"^## Part .\n\n(?:\*\*(Not \w+)|.)", verdict.page(), re.MULTILINE)

    assert words(seeds + 1) == ["", "", "", ""]
    assert words(seeds) == ["Not decided" if part in ("A", name) else "" for name in "ABCD"]


def test_a_seed_is_whole_in_parts_b_and_c_only_if_it_is_in_part_a(small: ModuleType) -> None:
    verdict = small
    for part in "AC":
        write_part(verdict, part, GAINS)
    record = verdict.read("sums", 104)
    del record["runs"]["random20"]
    verdict.write_json(verdict.data_file("sums", 104), record)
    runs = {part: verdict.runs_of(part) for part in "AC"}
    assert verdict.whole("C", runs) == [101, 102, 103, 105, 106, 107, 108]


def test_a_part_ends_with_its_last_whole_seed_and_is_computed_over_those(
    small: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = small
    write_part(verdict, "A", GAINS)
    monkeypatch.setitem(verdict.PARTS, "A", replace(verdict.PARTS["A"], most=6))
    record = verdict.read("sums", 102)
    del record["runs"]["random20"]
    verdict.write_json(verdict.data_file("sums", 102), record)
    change(verdict, "sums", 108, "gtpo", **run_of(verdict, 0.0))

    page = verdict.page()

    assert "| A | 112 | 111 | 0 | 101, 103, 104, 105, 106, 107, 108 | 6 | 101, 103, 104, 105, 106, 107 |" in page
    assert verdict_of(page, "sums", "gtpo − dapo") == "better", "seed 108 is not used"
    assert "without seeds whose results were read before (of these 1)" in page
    monkeypatch.setattr(verdict, "prepared", lambda *_: pytest.fail("a run of a part that has ended"))
    verdict.train("A", ["sums"], 1.0, tmp_path)


def test_contrasts_are_shown_again_without_the_seeds_that_were_read(small: ModuleType) -> None:
    verdict = small
    write_part(verdict, "A", GAINS)
    for task in verdict.TASKS:
        for seed in (101, 102):
            change(verdict, task, seed, "gtpo", **run_of(verdict, 0.1))

    page = verdict.page()

    assert "without seeds whose results were read before (of these 2)" in page
    registered, described = (line for line in page.splitlines() if line.startswith("| countdown | gtpo − dapo |"))
    assert registered.startswith("| countdown | gtpo − dapo | 8 | −")
    assert described.startswith("| countdown | gtpo − dapo | 6 | +")
    assert described.count("|") == 7, "no p and no verdict"


def test_the_page_says_where_credits_were_those_of_dapo(small: ModuleType) -> None:
    write_part(small, "A", GAINS)
    page = small.page()
    assert "On sums the credits of gtpo and grpo_s had a correlation r ≥ 0.99 with dapo's before training." in page
    assert "On countdown the credits" not in page


@pytest.mark.parametrize("gain", [0.0, 0.05])
def test_nothing_is_concluded_where_a_control_is_not_worse(small: ModuleType, gain: float) -> None:
    verdict = small
    write_part(verdict, "A", GAINS)
    for seed in verdict.PARTS["A"].seeds:
        change(verdict, "sums", seed, "random60", **run_of(verdict, 0.5 + gain + 0.001 * (-1) ** seed))
    page = verdict.page()
    for arm in ("gtpo", "grpo_s"):
        assert verdict_of(page, "sums", f"{arm} − dapo") == "nothing is concluded (controls)"
    assert verdict_of(page, "countdown", "gtpo − dapo") == "better"
    assert page.count("**Nothing is concluded on sums: random60, not seen to be worse than DAPO there") == 1
    assert "Question 2 on sums" not in page


@pytest.mark.parametrize(
    ("gtpo", "blame", "said"),
    [
        (0.05, 0.0, "Question 2 on sums: the weights by entropy add to the smaller blame."),
        (0.05, 0.05, "Question 2 on sums: the weights by entropy add less than 2 points."),
        (0.05, 0.04, "Question 2 on sums: the weights by entropy add less than 2 points."),
        (0.05, 0.1, "Question 2 on sums: half the blame without entropies does more."),
        (0.0, -0.06, "Question 2 is not asked on sums, where GTPO is not found better than DAPO"),
    ],
)
def test_the_second_question_has_the_registered_answer(small: ModuleType, gtpo: float, blame: float, said: str) -> None:
    write_part(small, "A", GAINS | {"gtpo": gtpo, "dapo_blame": blame})
    assert said in small.page()


def write_predictors(verdict: ModuleType, gains: dict[str, float], unresolved: tuple[str, ...] = ()) -> None:
    figures = {name: [float(np.exp(-gain + step)) for step in (0, -0.1, 0.1)] for name, gain in gains.items()}
    figures |= {name: [None] * 3 for name in unresolved}
    methods = {name: {key: {"along/dapo": each} for key in ("sgd", "adam")} for name, each in figures.items()}
    for task in verdict.TASKS:
        record = {"counted": list(methods), "gradients": {"methods": methods}}
        verdict.write_json(verdict.predictors(task), record)


def test_part_b_leaves_out_and_names_methods_without_a_figure_or_pairs(small: ModuleType) -> None:
    verdict = small
    names = ["dapo", "psr", *list(verdict.PARTS["B"].arms)[3:]]
    gains = {name: 0.03 * place for place, name in enumerate(names)}
    write_part(verdict, "A", GAINS)
    write_part(verdict, "B", gains)
    write_predictors(verdict, gains, ("w_reinforce",))
    for seed in (101, 102):
        change(verdict, "sums", seed, "eapo", failed="no memory")

    lines = verdict.correlation(verdict.PARTS["B"].seeds)

    metric = "in the metric of plain gradient descent"
    assert lines[0] == f"Left out, {metric}, not resolved or too few pairs: w_reinforce."
    assert lines[1].startswith(
        f"On sums, {metric}: rank correlation 1.00 of 8 methods, p 2.48e-05. They are dapo, psr, "
    )
    assert lines[2] == "The same without the methods that were registered as known: 7, fewer than 8.", "PSR was known"
    left = "gtpo, grpo_s, fork20, dapo_blame, random60, prob_mask, qae"
    assert lines[-1].startswith("Not counted, as registered: random20, and because")
    assert lines[-1].endswith(f"a method before them: {left}.")
    assert lines[1] in verdict.page()
    assert "A description, not a test" in verdict.page()

    change(verdict, "sums", 103, "eapo", failed="no memory")
    lines = verdict.correlation(verdict.PARTS["B"].seeds)
    assert lines[0].endswith("not resolved or too few pairs: eapo, w_reinforce.")
    assert lines[1].startswith(f"On sums, {metric}: rank correlation 1.00 of 7 methods, too few for a test.")


def test_the_second_picture_has_the_methods_of_the_table(small: ModuleType) -> None:
    verdict = small
    gains = {name: 0.03 * place for place, name in enumerate(verdict.PARTS["B"].arms)}
    for part in "AB":
        write_part(verdict, part, gains)
    write_predictors(verdict, {"dapo": 0.0, **gains}, ("eapo",))

    drawn = verdict.learning_picture(verdict.PARTS["B"].seeds)

    said = re.findall(r'aria-label="(\w+), (\w+): (\S+) groups, (\S+) points"', drawn)
    assert [name for _, name, *_ in said] == ["dapo", *(name for name in gains if name != "eapo")]
    page = verdict.page()
    assert f"(../images/{verdict.LEARNING.name})" in page
    assert "| dapo | 1.00 (0.90 to 1.11) | 1.00 (0.90 to 1.11) | 0 |" in page
    assert "| eapo | not resolved | not resolved | +18." in page
    for task, name, needed, gain in said[1:]:
        assert task == "sums"
        assert re.search(rf"^\| {name} \| {needed} \(.*\| {re.escape(gain)} \(", page, re.MULTILINE), name


def test_part_d_is_described_under_its_seeds_and_decides_nothing(
    small: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = small
    gains = {name: 0.03 * place for place, name in enumerate(["dapo", *list(verdict.PARTS["B"].arms)[1:]])}
    write_part(verdict, "A", GAINS)
    for part in "BD":
        write_part(verdict, part, gains)
    write_predictors(verdict, gains, ("psr",))
    monkeypatch.setitem(verdict.PARTS, "D", replace(verdict.PARTS["D"], most=2))
    change(verdict, "countdown", 102, "qae", failed="no memory")
    change(verdict, "countdown", 103, "prob_mask", **run_of(verdict, 2.0))  # of no seed that is used

    def section() -> list[str]:
        return verdict.page().split("## Part D\n")[1].strip().splitlines()

    lines = section()
    assert lines[0] == "**Not decided: too few whole seeds.**"
    assert lines[2].startswith("A description under seeds 101 and 102 alone. It was not registered")
    metric = "in the metric of plain gradient descent"
    assert lines[4] == f"- Left out, {metric}, not resolved or too few pairs: qae, psr."
    new = "Without part A's arms, whose results were known: rank correlation 1.00 of 8 methods."
    for task, line in zip(verdict.TASKS, lines[5:7], strict=True):
        assert line == f"- On {task}, {metric}: rank correlation 1.00 of 9 methods. By seed: 1.00, 1.00. {new}"

    def cells(method: str) -> list[str]:
        (row,) = (line for line in lines if line.startswith(f"| {method} |"))
        return row.strip("| ").split(" | ")

    by_seed = [verdict.differences(task, "eapo", "dapo", [seed]) for task in verdict.TASKS for seed in (101, 102)]
    assert cells("eapo")[-4:] == [verdict.points(float(each[0])) for each in by_seed]
    assert cells("eapo")[1] == "yes"
    assert cells("gtpo_v1")[1] == "yes"
    assert cells("qae")[-1] == "–"
    assert cells("psr")[2] == "not resolved"

    change(verdict, "countdown", 101, "prob_mask", **run_of(verdict, 2.0))
    on_sums, on_countdown = section()[5:7]
    assert on_sums == lines[5]
    assert "rank correlation 0.53 of 9 methods. By seed: 0.53, 1.00." in on_countdown

    record = verdict.read("sums", 101)
    del record["runs"]["random60"]
    verdict.write_json(verdict.data_file("sums", 101), record)
    assert section() == ["**Not complete: nothing is computed, and nothing is concluded.**"], "part A is not complete"


def test_what_is_described_beside_accuracy_is_of_the_same_seeds(small: ModuleType) -> None:
    verdict = small
    write_part(verdict, "A", GAINS)
    seeds = verdict.PARTS["A"].seeds
    for place, seed in enumerate(seeds):
        falling = [float(seed - step) for step in range(verdict.STEPS)]
        change(verdict, "sums", seed, "dapo", steps=dict.fromkeys(verdict.KEPT, falling))
        rising = [*falling[:-1], falling[-1] + 2 + place % 2]  # at the end by 2 and 3 in turn
        groups = [None, *falling[1:-1], falling[-1] + 10.7]
        change(verdict, "sums", seed, "gtpo", steps=dict.fromkeys(verdict.KEPT, rising) | {"groups": groups})
    change(verdict, "sums", seeds[0], "grpo_s", failed="no memory")

    half = stats.t.ppf(0.975, 7) * np.sqrt(2 / 7 / 8)  # of eight values, half of them 2 and half 3
    low, high = 2.5 - half, 2.5 + half
    (gtpo,) = (line for line in verdict.beside(verdict.PARTS["A"], "sums", seeds) if line.startswith("| gtpo |"))
    assert gtpo.startswith(f"| gtpo | +2.5000 (+{low:.4f} to +{high:.4f}) | +2.50 (+{low:.2f} to +{high:.2f}) | −94 (")
    (gtpo,) = (line for line in verdict.changes(verdict.PARTS["A"], "sums", seeds) if line.startswith("| gtpo |"))
    assert gtpo.startswith(f"| gtpo | −20.500 (−{23 - low:.3f} to −{23 - high:.3f}) | +1.5000 (")
    first, second, *_ = verdict.by_seed(verdict.PARTS["A"], "sums", seeds)[2:]
    assert first.startswith("| 101 | – | 51.5 | +")
    assert first.split(" | ")[4] == "–"
    assert second.split(" | ")[4].startswith(("+", "−"))


def test_accuracy_is_compared_after_equally_many_groups_too(small: ModuleType) -> None:
    verdict = small
    write_part(verdict, "A", GAINS)
    for seed in verdict.PARTS["A"].seeds:
        for arm, groups in (("dapo", 10.0), ("gtpo", 16.0)):
            change(verdict, "sums", seed, arm, steps=dict.fromkeys(verdict.KEPT, [groups] * verdict.STEPS))
            rising = {str(step): step / 100 for step in (0, *verdict.VALIDATED)}
            change(verdict, "sums", seed, arm, validations=rising)
    (gtpo,) = (
        line
        for line in verdict.beside(verdict.PARTS["A"], "sums", verdict.PARTS["A"].seeds)
        if line.startswith("| gtpo |")
    )
    assert gtpo.endswith("| +144 (+144 to +144) | −9.00 (−9.00 to −9.00) |"), "15 steps of GTPO against 24 of DAPO"


def test_runs_of_another_commit_than_dapos_are_named(small: ModuleType) -> None:
    write_part(small, "A", GAINS)
    change(small, "sums", 103, "fork20", commit="d" * 40)
    page = small.page()
    assert f"- part A, 111 runs of commit {'c' * 40}\n- part A, 1 runs of commit {'d' * 40}\n" in page
    assert "- part A, of another commit than its DAPO: sums 103 fork20\n" in page


def test_a_seed_that_part_a_lacks_is_not_trained_in_other_parts(
    trainable: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = replace(trainable.PARTS["A"], seeds=(101, 102, 103), most=2)
    monkeypatch.setitem(trainable.PARTS, "A", one)
    monkeypatch.setitem(trainable.PARTS, "B", replace(one, arms={"psr": ("algo=psr",)}))
    for seed in (101, 103):
        record = {"start": {"weights": ""}, "runs": {"dapo": run_of(trainable, 0.5)}}
        trainable.write_json(trainable.data_file("sums", seed), record)
    trained = []
    monkeypatch.setattr(
        trainable, "prepared", lambda task, seed, scratch: trained.append(seed) or (scratch, {"weights": ""})
    )
    monkeypatch.setattr(trainable, "command", lambda *_: [sys.executable, "-c", "raise SystemExit(1)"])
    trainable.train("B", ["sums"], 1.0, tmp_path)
    assert trained == [101, 103]


def test_a_method_against_the_truth_is_ranked_last_and_p_is_of_permutations(verdict: ModuleType) -> None:
    pairs = [(-np.inf, -3.0), *((float(place), float(place % 4)) for place in range(8))]
    first, second = zip(*pairs, strict=True)
    expected = stats.spearmanr(first, second).statistic
    said = verdict.ranked(pairs, True)
    assert said.startswith(f"rank correlation {expected:.2f} of 9 methods, p ")
    assert float(said.split()[-1].rstrip(".")) == pytest.approx(stats.spearmanr(first, second).pvalue / 2, abs=0.01)


def test_a_contrast_is_of_paired_endpoints(
    verdict: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdict, "DATA", tmp_path)
    rng = np.random.default_rng(0)
    seeds = verdict.PARTS["A"].seeds
    gains = rng.normal(0.03, 0.02, len(seeds))
    base = rng.normal(0.5, 0.1, len(seeds))
    for seed, gain, start in zip(seeds, gains, base, strict=True):
        runs = {"dapo": run_of(verdict, start), "gtpo": run_of(verdict, start + gain)}
        verdict.write_json(verdict.data_file("sums", seed), {"runs": runs})
    change(verdict, "sums", seeds[0], "gtpo", failed="no memory")

    found = verdict.Contrast.of("sums", "gtpo", "dapo", seeds)

    values = 100 * gains[1:]
    assert found.pairs == len(values)
    assert found.mean == pytest.approx(values.mean())
    assert found.p == pytest.approx(stats.ttest_rel(100 * (base + gains)[1:], 100 * base[1:]).pvalue)
    error = values.std(ddof=1) / np.sqrt(len(values))
    above = stats.t.sf((values.mean() - 2) / error, len(values) - 1)
    assert found.equivalence == pytest.approx(1 - above)
    assert found.flips <= 0.001
    assert verdict.Contrast.of("sums", "gtpo", "dapo", seeds[:4]) is None, "three pairs"
    assert verdict.Contrast.of("sums", "gtpo", "dapo", seeds[:5]) is not None


@pytest.mark.parametrize(
    ("adjusted", "equivalence", "words"),
    [
        (0.01, 0.2, "worse"),
        (0.01, 0.01, "worse, and by less than 2 points"),
        (0.2, 0.01, "equivalent within 2 points"),
        (0.2, 0.2, "not decided"),
    ],
)
def test_the_words_are_the_registered_ones(
    verdict: ModuleType, adjusted: float, equivalence: float, words: str
) -> None:
    contrast = verdict.Contrast(16, -1.0, 1.0, -2.0, 0.0, 0.01, 0.01, equivalence)
    assert verdict.words(contrast, adjusted) == words
    assert f"| {words} |" in (RESULTS / "registration.md").read_text().replace("better, or worse", "worse")


def test_data_of_a_run_names_its_commit_and_overrides() -> None:
    for file in (RESULTS / "data").glob("*-[0-9]*.json"):
        for arm, run in json.loads(file.read_text())["runs"].items():
            assert run["overrides"], (file.name, arm)
            assert len(run["commit"]) == 40
            lengths = {sum(value is not None for value in steps) for steps in run["steps"].values()}
            assert "failed" in run or lengths == {24}, (file.name, arm)
