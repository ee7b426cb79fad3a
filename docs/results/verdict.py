"""Train the runs of registration.md, keep their numbers in data/, and compute the page verdict.md from them.

    python docs/results/verdict.py train [--part A] [--tasks sums] [--hours 3]    one run after another; goes on
    python docs/results/verdict.py predict [--tasks sums]                         the figures that part B is about
    python docs/results/verdict.py page                  verdict.md and its pictures; what `make results` runs

`train` writes data/TASK-SEED.json after every run, and skips what is there and parts that have ended; by now all have.
A machine with another processor makes other warm starts, so those in --scratch are needed until their seed is whole.
Uncommitted changes are refused. It prints no result, and the page has none of a part before it and part A have ended.
"""

import argparse
import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import vl_convert
from scipy import stats

from gtpo_verl.evaluation.paired import (
    detectable_difference,
    deviation_at_most,
    holm,
    least_sign_flip_p,
    student_bounds,
)
from gtpo_verl.files import write_json
from gtpo_verl.report.charts import THEMES, variables
from gtpo_verl.runs.provenance import code_state, run_versions
from gtpo_verl.runs.reader import read_metrics

HERE = Path(__file__).parent
DATA = HERE / "data"
PICTURE = HERE.parent / "images" / "verdict.svg"
LEARNING = HERE.parent / "images" / "verdict_learning.svg"
TASKS = ("sums", "countdown")
CONTROLS = ("random20", "random60")
DESCRIBED = ("dapo_blame", "fork20")  # of part A, against DAPO
VALIDATED = (6, 12, 18, 24)  # the steps whose mean accuracy is the endpoint
STEPS = 24
REPEATS = {"sums": 1, "countdown": 4}  # samples of each validation prompt, as rows of the data: 1,024 and 1,488


@dataclass(frozen=True)
class Part:
    """Arms, each an algorithm with its overrides, trained under every seed and on every task.

    most: whole seeds with which the part ends. least: with fewer it is not decided.
    """

    arms: dict[str, tuple[str, ...]]
    seeds: Sequence[int]
    most: int
    least: int
    tasks: tuple[str, ...] = TASKS


def arms(names: str) -> dict[str, tuple[str, ...]]:
    return {name: (f"algo={name}",) for name in names.split()}


RATE = "actor_rollout_ref.actor.optim.lr"
PARTS = {
    "A": Part(arms("dapo gtpo grpo_s fork20 dapo_blame random20 random60"), range(101, 117), most=8, least=6),
    "B": Part(
        arms("psr prob_mask qae polarity_entropy entropy_bonus empg eapo gtpo_v1 gtpo_shuffled w_reinforce"),
        range(101, 110),
        most=4,
        least=4,
        tasks=("sums",),
    ),
    "C": Part(
        {
            f"{name}, lr x {text}": (f"algo={name}", f"{RATE}={3e-4 * factor:g}")
            for name in ("dapo", "gtpo")
            for text, factor in (("1/2", 0.5), ("2", 2.0))
        },
        range(101, 109),
        most=4,
        least=4,
        tasks=("countdown",),
    ),
}
# What was part B on countdown; ended with two seeds by the amendment of 2026-11-30.
PARTS["D"] = replace(PARTS["B"], most=2, tasks=("countdown",))
PRIMARY = (("gtpo", "dapo"), ("grpo_s", "dapo"), ("gtpo", "dapo_blame"))  # of part A, on each task
EQUIVALENT = 2.0  # points
MISSING = 2  # pairs of a contrast; with more, or fewer than `PAIRS` left, it is not computed
PAIRS = 4
READ = (101, 102)  # seeds whose results were read before the amendments of 2026-11-26
FEWEST = 8  # methods of a test of part B
KNOWN = ("gtpo", "grpo_s", "fork20", "dapo_blame", "psr", "prob_mask", "qae")  # in trials on sums, or chosen by them
ALIKE = 0.99  # correlation of the credits of two methods that are counted as one
ALPHA = 0.05
# What is kept of every step under these names.
KEPT = {
    "entropy": "credit/entropy_all",
    "length": "response_length/mean",
    "gradient norm": "actor/grad_norm",
    "groups": "training/filter_groups/generated_groups",
}


def planned(parts: str, tasks: list[str]) -> Iterator[tuple[str, int, str, tuple[str, ...]]]:
    """Task, seed, arm and its overrides of every run, seeds varying slowest: a stop leaves whole pairs."""
    seeds = sorted({seed for part in parts for seed in PARTS[part].seeds})
    for seed in seeds:
        for task in tasks:
            for part in (PARTS[name] for name in parts):
                if seed in part.seeds and task in part.tasks:
                    for arm, overrides in part.arms.items():
                        yield task, seed, arm, overrides


def data_file(task: str, seed: int) -> Path:
    return DATA / f"{task}-{seed}.json"


def read(task: str, seed: int) -> dict[str, Any]:
    file = data_file(task, seed)
    return json.loads(file.read_text()) if file.is_file() else {"runs": {}}


def predictors(task: str) -> Path:
    return DATA / f"predictors-{task}.json"


def prepared(task: str, seed: int, scratch: Path) -> tuple[Path, dict[str, Any]]:
    """The directory of the seed's own warm start, and what identifies it."""
    from gtpo_verl.tasks import set_thread_waiting
    from gtpo_verl.tasks import task as embedded

    set_thread_waiting()
    import pyarrow as pa
    from pyarrow import parquet

    from gtpo_verl.tasks.prepare import prepare_task

    made = prepare_task(embedded(task), scratch / f"{task}-{seed}", seed=seed)
    rows = parquet.read_table(made.val_file)
    parquet.write_table(pa.concat_tables([rows] * REPEATS[task]), scratch / f"{task}-{seed}" / "repeated.parquet")
    weights = hashlib.sha256((made.model_path / "model.safetensors").read_bytes()).hexdigest()
    return scratch / f"{task}-{seed}", {"weights": weights, "baseline": made.manifest["baseline"]}


def command(task: str, seed: int, overrides: tuple[str, ...], place: Path, run: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "gtpo_verl.cli", "train", "setting=quickstart", "hardware=cpu", f"task={task}"),
        *(*overrides, f"seed={seed}", f"trainer.total_training_steps={STEPS}", "trainer.test_freq=6"),
        *("trainer.save_freq=-1", "algorithm.filter_groups.enable=true", f"trainer.run_dir={run}"),
        *(f"actor_rollout_ref.model.path={place / 'model'}", f"data.train_files={place / 'train.parquet'}"),
        f"data.val_files={place / 'repeated.parquet'}",
    ]


def numbers(run: Path, task: str) -> dict[str, Any]:
    """What is kept of a run; of a step that a second attempt repeated, the later values."""
    metrics, _ = read_metrics(run / "metrics.jsonl")
    validations = {
        str(step): value
        for step, data in metrics.items()
        for key, value in data.items()
        # equal rows are one problem with several samples
        if key.startswith("val/") and key.endswith(f"/mean@{REPEATS[task]}")
    }
    kept = {name: [metrics.get(step, {}).get(key) for step in range(1, STEPS + 1)] for name, key in KEPT.items()}
    return {"validations": validations, "steps": kept}


def commit_of_sources() -> str:
    """The commit that is trained. Raises SystemExit: gtpo_verl/ or configs/ is not as in a commit."""
    code, _ = code_state(HERE.parents[1])
    if code["commit"] is None or code["diff"] is not None:
        raise SystemExit(
            "error: gtpo_verl/ or configs/ has uncommitted changes, so no commit would say what was trained: commit or "
            "stash what `git status gtpo_verl configs` lists."
        )
    return code["commit"]


def train(parts: str, tasks: list[str], hours: float, scratch: Path) -> None:
    """Train what is not in the data, one run after another; refused before the predictors of part B are there, and
    with changes that no commit has.
    """
    if lacking := [predictors(task).name for task in tasks if not predictors(task).is_file()]:
        raise SystemExit(f"error: {', '.join(lacking)}: run `verdict.py predict` and commit what it writes first.")
    end = time.monotonic() + 3600 * hours
    runs = every_run()
    unfinished = "".join(part for part in parts if not used(part, runs))
    todo = [each for each in planned(unfinished, tasks) if each[2] not in read(*each[:2])["runs"]]
    print(f"{len(todo)} runs are left", flush=True)
    for number, (task, seed, arm, overrides) in enumerate(todo):
        part = next(name for name, each in PARTS.items() if arm in each.arms and task in each.tasks)
        runs = every_run()
        if used(part, runs) or (used("A", runs) and seed not in whole("A", runs)):
            continue  # the part has ended, or the seed cannot be whole
        if time.monotonic() > end:
            print(f"{len(todo) - number} runs are left")
            return
        commit = commit_of_sources()
        place, start = prepared(task, seed, scratch)
        record = {"start": start} | read(task, seed)
        if record["start"]["weights"] != start["weights"]:
            print(
                f"{number + 1}/{len(todo)} {task} {seed} {arm}: left, since {data_file(task, seed).name} is of another "
                "machine, whose warm start has other weights: train it there, or see Failures in registration.md",
                flush=True,
            )
            continue
        run = scratch / f"{task}-{seed}-{arm}".translate(str.maketrans({" ": "", ",": "-", "/": "_"}))
        began = time.monotonic()
        for attempt in (1, 2):  # registration.md: once more from the beginning, then a failure
            words = command(task, seed, overrides, place, run)
            done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"RAY_ADDRESS": "local"})
            result = numbers(run, task) if (run / "metrics.jsonl").is_file() else {}
            result["attempts"] = attempt
            if done.returncode == 0 and endpoint(result) is not None:
                break
        else:
            result["failed"] = f"exit code {done.returncode}"
        result |= {"overrides": list(overrides), "commit": commit, "versions": run_versions()}
        record = {"start": start} | read(task, seed)  # again: another process may have trained other arms meanwhile
        record["runs"][arm] = result
        write_json(data_file(task, seed), record)
        state = "failed" if "failed" in result else "finished"
        print(f"{number + 1}/{len(todo)} {task} {seed} {arm}: {state}, {time.monotonic() - began:.0f} s", flush=True)


def predict(tasks: list[str], scratch: Path) -> None:
    """Measure signal and noise of every method's gradient on the warm start of the first seed."""
    for task in tasks:
        place, start = prepared(task, PARTS["B"].seeds[0], scratch)
        output = scratch / f"{task}-gradients"
        names = [arm for part in "AB" for arm in PARTS[part].arms]
        subprocess.run(
            [
                *(sys.executable, "-m", "gtpo_verl.cli", "audit", str(place / "model"), "setting=quickstart"),
                *("hardware=cpu", f"task={task}", f"data.val_files={place / 'train.parquet'}", "--output", str(output)),
                *("--gradients", "384", "--prompts", "1536", "--methods", ",".join(names)),
            ],
            check=True,
        )
        record = {"start": start, "counted": counted(output, names)} | {
            name: value
            for name, value in json.loads((output / "audit.json").read_text().replace(f"{scratch}/", "")).items()
            if name in ("settings", "measurement", "gradients", "versions")
        }
        write_json(predictors(task), record)


def counted(audit: Path, names: list[str]) -> list[str]:
    """The methods of the rank correlation: without random20, and the first of those with nearly the same credits."""
    from gtpo_verl.audit.backward import parts_of
    from gtpo_verl.audit.methods import methods
    from gtpo_verl.audit.sampling import groups_with_contrast
    from gtpo_verl.audit.store import plan_of, reopen
    from gtpo_verl.integrations.context import Overlong

    store = reopen(audit)
    plan, facts = plan_of(store), store.facts
    overlong = facts["overlong"] and Overlong(*facts["overlong"])
    groups = groups_with_contrast(store.rollouts, plan)
    parts, number = parts_of(groups, plan.gradients, facts["step"], methods(names), overlong, facts["seed"])
    audited = [part.credits for part in parts if len(part.credits) > 1]
    columns = np.array([np.concatenate([part[row].flatten() for part in audited]) for row in number.values()])
    alike = np.corrcoef(columns) >= ALIKE
    kept: list[int] = []
    for place, name in enumerate(number):
        if name != "random20" and not alike[place, kept].any():
            kept.append(place)
    return [list(number)[place] for place in kept]


def endpoint(run: dict[str, Any]) -> float | None:
    """Mean accuracy of the validations at `VALIDATED`; None of a run that failed or has not reached the last."""
    found = [run.get("validations", {}).get(str(step)) for step in VALIDATED]
    return None if "failed" in run or None in found else float(np.mean(found))


def differences(task: str, arm: str, other: str, seeds: Sequence[int]) -> np.ndarray:
    """Of the endpoints in points, under the seeds that both arms finished."""
    runs = [read(task, seed)["runs"] for seed in seeds]
    ends = [(endpoint(each.get(arm, {})), endpoint(each.get(other, {}))) for each in runs]
    return np.array([100 * (end[0] - end[1]) for end in ends if None not in end])


def too_few(pairs: int, seeds: Sequence[int]) -> bool:
    return pairs < max(len(seeds) - MISSING, PAIRS)


@dataclass(frozen=True)
class Contrast:
    """Two arms over seeds.

    p: of the paired t test. flips: of the exact sign-flip test. equivalence: the larger p of the two one-sided t tests
    at ± `EQUIVALENT`.
    """

    pairs: int
    mean: float
    deviation: float
    low: float
    high: float
    p: float
    flips: float
    equivalence: float

    @classmethod
    def of(cls, task: str, arm: str, other: str, seeds: Sequence[int]) -> "Contrast | None":
        """None with more than `MISSING` pairs missing, or fewer than `PAIRS`."""
        values = differences(task, arm, other, seeds)
        if too_few(len(values), seeds):
            return None
        test = stats.ttest_1samp(values, 0.0)
        interval = test.confidence_interval(1 - ALPHA)
        above = stats.ttest_1samp(values, -EQUIVALENT, alternative="greater").pvalue
        below = stats.ttest_1samp(values, EQUIVALENT, alternative="less").pvalue
        flips = stats.permutation_test((values,), np.mean, permutation_type="samples", n_resamples=2**20).pvalue
        numbers = (values.mean(), values.std(ddof=1), *interval, test.pvalue, flips, max(above, below))
        return cls(len(values), *map(float, numbers))


def words(contrast: Contrast, adjusted: float) -> str:
    """The verdict in the words that registration.md fixes."""
    equivalent = contrast.equivalence <= ALPHA
    if not adjusted <= ALPHA:  # nan where no pair differs
        return f"equivalent within {EQUIVALENT:g} points" if equivalent else "not decided"
    better = "better" if contrast.mean > 0 else "worse"
    return f"{better}, and by less than {EQUIVALENT:g} points" if equivalent else better


Found = dict[tuple[str, str, str], Contrast | None]  # by task, arm and other


def contrasts_of(tasks: tuple[str, ...], pairs: Iterable[tuple[str, str]], seeds: Sequence[int]) -> Found:
    return {(task, *pair): Contrast.of(task, *pair, seeds) for task in tasks for pair in pairs}


def against_dapo(tasks: tuple[str, ...], names: Iterable[str], seeds: Sequence[int]) -> Found:
    return contrasts_of(tasks, [(arm, "dapo") for arm in names], seeds)


def unseen(controls: Found, task: str) -> list[str]:
    """The controls that were not seen to be worse than DAPO on a task; with one of them nothing is concluded there."""
    return [
        arm
        for (where, arm, _), each in controls.items()
        if where == task and not (each is not None and each.mean < 0 and each.p <= ALPHA)
    ]


def insensitive(controls: Found, tasks: tuple[str, ...]) -> list[str]:
    """A sentence for each task on which nothing is concluded."""
    found = [(task, " and ".join(arms)) for task in tasks if (arms := unseen(controls, task))]
    said = "not seen to be worse than DAPO there, so the experiment cannot see what it is for."
    return [line for task, arms in found for line in (f"**Nothing is concluded on {task}: {arms}, {said}**", "")]


def verdicts(primary: Found, controls: Found) -> dict[tuple[str, str, str], tuple[str, str]]:
    """Holm's p and the words of each primary contrast; one that is not computed counts among them with p = 1."""
    adjusted = holm([1.0 if each is None else each.p for each in primary.values()])
    said = {}
    for (key, each), p in zip(primary.items(), adjusted, strict=True):
        word = "not decided" if each is None else words(each, p)
        said[key] = (f"{p:.3g}", "nothing is concluded (controls)" if unseen(controls, key[0]) else word)
    return said


def second_question(said: dict[tuple[str, str, str], tuple[str, str]], task: str) -> str:
    """What the weights by entropy add to less blame, in the words that registration.md fixes."""
    (_, gain), (_, more) = said[task, "gtpo", "dapo"], said[task, "gtpo", "dapo_blame"]
    if not gain.startswith("better"):
        return (
            f"Question 2 is not asked on {task}, where GTPO is not found better than DAPO: GTPO − dapo_blame is "
            "reported alone."
        )
    if more == "better":
        answer = "the weights by entropy add to the smaller blame."
    elif more.startswith("worse"):
        answer = "half the blame without entropies does more."
    else:
        answer = (
            "no answer." if more == "not decided" else f"the weights by entropy add less than {EQUIVALENT:g} points."
        )
    return f"Question 2 on {task}: {answer}"


def points(value: float, digits: int = 2) -> str:
    return f"{value:+z.{digits}f}".replace("-", "−")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def lines_of(
    found: Found, tested: bool = False, said: dict[tuple[str, str, str], tuple[str, str]] | None = None
) -> list[str]:
    """A table; tested: with p values. said: what `verdicts` returns."""
    head = ["task", "contrast", "pairs", "difference", "95 % interval", "s.d."]
    head += (["p", "sign flips"] if tested else []) + (
        ["shown with 80 %", "p at ± 2", "Holm", "verdict"] if said else []
    )
    rows = []
    for (task, arm, other), each in found.items():
        cells = [task, f"{arm} − {other}"]
        if each is None:
            cells += ["too few", *["–"] * (len(head) - len(cells) - 1 - (2 if said else 0))]
        else:
            cells += [f"{each.pairs}", points(each.mean), f"{points(each.low)} to {points(each.high)}"]
            cells += [f"{each.deviation:.2f}", *([f"{each.p:.3g}", f"{each.flips:.3g}"] if tested else [])]
            if said:
                spreads = each.deviation, deviation_at_most(each.deviation, each.pairs - 1)
                power, most = (detectable_difference(spread, each.pairs, len(found)) for spread in spreads)
                cells += [f"{power:.1f} (at most {most:.1f})", f"{each.equivalence:.3g}"]
        rows.append([*cells, *(said[task, arm, other] if said else ())])
    return table(head, rows)


def finished(task: str, arm: str, seeds: Sequence[int]) -> dict[int, dict[str, Any]]:
    """The runs of an arm that have an endpoint, by seed."""
    runs = {seed: read(task, seed)["runs"].get(arm, {}) for seed in seeds}
    return {seed: run for seed, run in runs.items() if endpoint(run) is not None}


def curves(run: dict[str, Any]) -> dict[str, np.ndarray]:
    """What `KEPT` names, (`STEPS`,) each, nan where a step has none."""
    return {name: np.array(run["steps"][name], dtype=float) for name in KEPT}


def levels(part: Part, task: str, seeds: Sequence[int]) -> list[str]:
    """Mean endpoint, first and last entropy, length and groups generated of each arm."""
    rows = []
    for arm in dict.fromkeys(["dapo", *part.arms]):
        if runs := finished(task, arm, seeds):
            steps = [curves(run) for run in runs.values()]
            entropy, length, groups = (
                np.nanmean([each[name] for each in steps], axis=0) for name in ("entropy", "length", "groups")
            )
            mean = 100 * np.mean([endpoint(run) for run in runs.values()])
            ends = (
                f"{entropy[0]:.3f}, {np.nanmin(entropy):.3f}, {entropy[-1]:.3f}",
                f"{length[0]:.1f}, {length[-1]:.1f}",
            )
            rows.append([arm, f"{len(runs)}", f"{mean:.1f}", *ends, f"{np.nansum(groups):.0f}"])
    heads = "entropy, first, lowest and last step", "length, first and last"
    return table(["arm", "runs", "endpoint", *heads, "groups generated"], rows)


def with_intervals(values: list[np.ndarray], digits: Sequence[int]) -> list[str]:
    """Means over runs (N, K), the digits (K,) of each, and Student's 95 % intervals."""
    columns = np.transpose(values)
    found = zip(columns.mean(-1), *student_bounds(columns), digits, strict=True)
    return [f"{points(mean, d)} ({points(low, d)} to {points(high, d)})" for mean, low, high, d in found]


def accuracy_after(run: dict[str, Any], groups: float) -> float:
    """Of the last validations, in points, when so many groups had been generated; between two of them by a line."""
    generated = np.nancumsum(curves(run)["groups"])
    steps = [step for step in (0, *VALIDATED) if str(step) in run["validations"]]
    at = [generated[step - 1] if step else 0.0 for step in steps]
    return 100 * float(np.interp(groups, at, [run["validations"][str(step)] for step in steps]))


def beside(part: Part, task: str, seeds: Sequence[int]) -> list[str]:
    """Differences from DAPO in what is described beside the endpoint."""

    def measured(run: dict[str, Any]) -> np.ndarray:
        steps = curves(run)
        return np.array([steps["entropy"][-1], steps["length"][-1], np.nansum(steps["groups"])])

    rows, base = [], finished(task, "dapo", seeds)
    for arm in part.arms:
        runs = finished(task, arm, seeds)
        pairs = []
        for seed in filter(base.__contains__, runs):
            run, dapo = runs[seed], base[seed]
            fewer = min(np.nansum(curves(each)["groups"]) for each in (run, dapo))
            accuracy = accuracy_after(run, fewer) - accuracy_after(dapo, fewer)
            pairs.append(np.append(measured(run) - measured(dapo), accuracy))
        if arm != "dapo" and not too_few(len(pairs), seeds):
            rows.append([arm, *with_intervals(pairs, (4, 2, 0, 2))])
    heads = (
        "entropy of the last step",
        "length of the last step",
        "groups generated",
        "accuracy after equally many groups",
    )
    return table(["arm", *heads], rows)


def changes(part: Part, task: str, seeds: Sequence[int]) -> list[str]:
    """What the paper observed, that entropies rise again and answers grow, in every run."""

    def measured(run: dict[str, Any]) -> np.ndarray:
        steps = curves(run)
        entropy, length = steps["entropy"], steps["length"]
        return np.array([entropy[-1] - entropy[0], entropy[-1] - np.nanmin(entropy), length[-1] - length[0]])

    rows = []
    for arm in part.arms:
        values = [measured(run) for run in finished(task, arm, seeds).values()]
        if not too_few(len(values), seeds):
            rows.append([arm, *with_intervals(values, (3, 4, 1))])
    return table(
        ["arm", "entropy, last − first step", "entropy, last − lowest step", "length, last − first step"], rows
    )


def by_seed(part: Part, task: str, seeds: Sequence[int]) -> list[str]:
    """Accuracy before training and DAPO's endpoint in percent, and the differences that the contrasts are of."""
    others = [arm for arm in part.arms if arm != "dapo"]
    rows = []
    for seed in seeds:
        runs = read(task, seed)["runs"]
        dapo = endpoint(runs["dapo"])
        before = runs["dapo"].get("validations", {}).get("0")
        cells = ["–" if value is None else f"{100 * value:.1f}" for value in (before, dapo)]
        gains = [differences(task, arm, "dapo", [seed]) for arm in others]
        rows.append([f"{seed}", *cells, *("".join(map(points, gain)) or "–" for gain in gains)])
    return table(["seed", "before training", "dapo", *others], rows)


def colours(theme: str) -> dict[str, str]:
    """Those of the report, for what the picture shows."""
    known = variables({}, theme)
    return {
        "primary": f"rgb({known['credit']})",
        "control": f"rgb({known['debit']})",
        "described": known["muted"],
        "ink": known["ink"],
    }


def picture(seeds: Sequence[int]) -> str:
    """The contrasts of part A with their intervals, as SVG for light and dark pages; random20 is far to the left."""
    light = colours(THEMES[0])
    kinds = {
        "primary": contrasts_of(TASKS, PRIMARY, seeds),
        "described": against_dapo(TASKS, DESCRIBED, seeds),
        "control": against_dapo(TASKS, CONTROLS[1:], seeds),
    }
    rows = [
        {"task": task, "contrast": f"{arm} − {other}", "kind": kind}
        | {name: round(getattr(each, name), 2) for name in ("mean", "low", "high")}
        | {"said": f"{task}, {arm} − {other}: {points(each.mean)} ({points(each.low)} to {points(each.high)})"}
        for kind, found in kinds.items()
        for (task, arm, other), each in found.items()
        if each is not None
    ]
    title = f"points, unadjusted 95 % intervals; grey: ± {EQUIVALENT:g}"
    x = {"type": "quantitative", "title": title, "axis": {"grid": False, "format": "+d", "tickCount": 7}}
    names = list(dict.fromkeys(row["contrast"] for row in rows))
    y = {"field": "contrast", "type": "nominal", "title": None, "sort": names}
    colour = {"domain": list(kinds), "range": [light[kind] for kind in kinds]}
    shape = {"domain": list(kinds), "range": ["circle", "diamond", "square"]}
    kind = {"field": "kind", "type": "nominal", "title": None, "legend": {"orient": "top"}}
    own = {"data": {"values": [{"low": -EQUIVALENT, "high": EQUIVALENT}]}}
    grey = {"type": "rect", "color": light["described"], "opacity": 0.18, "aria": False}
    zero = {"type": "rule", "color": light["ink"], "aria": False}
    ends = {"x": x | {"field": "low"}, "x2": {"field": "high"}}
    marked = {"y": y, "color": kind | {"scale": colour}, "description": {"field": "said"}}
    layers = [
        own | {"mark": grey, "encoding": ends},
        own | {"mark": zero, "encoding": {"x": x | {"datum": 0}}},
        {"mark": {"type": "rule", "strokeWidth": 2, "aria": False}, "encoding": marked | ends},
        {
            "mark": {"type": "point", "filled": True, "size": 70, "opacity": 1},
            "encoding": marked | {"x": x | {"field": "mean"}, "shape": kind | {"scale": shape}},
        },
    ]
    return drawn({"width": 330, "height": {"step": 24}, "layer": layers}, rows)


def drawn(panel: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """A panel for every task of the rows as SVG, in the colours of `colours` for light and dark pages."""
    light, dark = (colours(theme) for theme in THEMES)
    ink = {"labelColor": light["ink"], "titleColor": light["ink"], "titleFontWeight": "normal"}
    chart = {
        "data": {"values": rows},
        "facet": {"column": {"field": "task", "title": None, "sort": list(TASKS)}},
        "spec": panel,
        "config": {
            "background": None,
            "padding": 24,
            "font": "Helvetica, Arial, sans-serif",
            "view": {"stroke": None},
            "axis": ink,
            "legend": ink,
            "header": ink,
        },
    }
    rules = "".join(f'[{part}="{light[name]}"]{{{part}:{dark[name]}}}' for name in light for part in ("fill", "stroke"))
    style = f"<style>@media(prefers-color-scheme:dark){{{rules}}}</style>"
    return re.sub(r"(<svg [^>]*>)", rf"\g<1>{style}", vl_convert.vegalite_to_svg(chart), count=1) + "\n"


def expected(task: str) -> list[str]:
    """What a null says on a task where `counted` left out arms for DAPO's credits: those before the next it kept."""
    counted = json.loads(predictors(task).read_text())["counted"]
    alike = list(itertools.takewhile(lambda arm: arm not in counted, list(PARTS["A"].arms)[1:]))
    if not alike:
        return []
    said = (
        f"On {task} the credits of {' and '.join(alike)} had a correlation r ≥ {ALIKE} with dapo's before training. "
        "A small difference from DAPO is expected there, and one from dapo_blame is nearly that of DAPO. Equivalent, "
        "or not decided, is no evidence about tasks on which the credits differ."
    )
    return [said, ""]


def learned(metric: str, seeds: Sequence[int]) -> dict[str, tuple[float, float]]:
    """On sums: what `expectation` says and the mean difference from DAPO, of the methods counted."""
    pairs = {}
    for method, figures, found in measured_and_learned(seeds):
        value = figures[metric][0]
        if value is not None and (method == "dapo" or found is not None):
            pairs[method] = (expectation(value), 0.0 if found is None else found.mean)
    return pairs


def expectation(needed: float) -> float:
    """−log of the groups needed; a method that goes against the truth has a negative figure: it is last."""
    return -np.log(needed) if needed > 0 else -np.inf


METRICS = {"sgd": "in the metric of plain gradient descent", "adam": "in Adam's metric"}


def counted_on_sums() -> list[str]:
    names: list[str] = json.loads(predictors("sums").read_text())["counted"]
    return names


# Groups needed and the ends of its 95 % interval, by metric; None where it is not resolved.
Figures = dict[str, list[float | None]]


def groups_needed(task: str, method: str) -> Figures:
    """Measured at step 0."""
    figures = json.loads(predictors(task).read_text())["gradients"]["methods"][method]
    return {metric: figures[metric]["along/dapo"] for metric in METRICS}


def measured_and_learned(seeds: Sequence[int]) -> Iterator[tuple[str, Figures, Contrast | None]]:
    """On sums, of the methods counted: the groups needed and the contrast."""
    for method in counted_on_sums():
        contrast = Contrast.of("sums", method, "dapo", seeds) if method != "dapo" else None
        yield method, groups_needed("sums", method), contrast


def in_cells(figures: Figures) -> list[str]:
    return [
        "not resolved" if value is None else f"{value:.2f} ({low:.2f} to {high:.2f})"
        for value, low, high in figures.values()
    ]


NEEDED = [f"groups needed, {metric}" for metric in METRICS]


def measured_beside_learned(seeds: Sequence[int]) -> list[str]:
    rows = []
    for method, figures, found in measured_and_learned(seeds):
        gain = "0" if method == "dapo" else "too few"
        gain = f"{points(found.mean)} ({points(found.low)} to {points(found.high)})" if found else gain
        rows.append([method, *in_cells(figures), gain])
    return table(["method", *NEEDED, "difference from dapo"], rows)


def learning_picture(seeds: Sequence[int]) -> str:
    """On sums: groups needed in the metric of plain gradient descent against what was learned, as SVG."""
    light = colours(THEMES[0])
    rows = [
        {"task": "sums", "method": method, "kind": "part A's" if method in PARTS["A"].arms else "part B's"}
        | dict(zip(("needed", "least", "most"), figures["sgd"], strict=True))
        | {name: 0.0 if found is None else round(getattr(found, name), 2) for name in ("mean", "low", "high")}
        for method, figures, found in measured_and_learned(seeds)
        if (figures["sgd"][0] or 0) > 0 and (found is not None or method == "dapo")
    ]
    for row in rows:
        row["said"] = f"{row['task']}, {row['method']}: {row['needed']:.2f} groups, {points(row['mean'])} points"
    grid = {"axis": {"grid": False}}
    x = {
        "type": "quantitative",
        "title": "groups needed at step 0, DAPO 1",
        "scale": {"type": "log", "nice": False, "padding": 12},
    } | grid
    y = {
        "type": "quantitative",
        "title": "points from DAPO, unadjusted 95 % intervals",
        "axis": {"grid": False, "format": "+d"},
    }
    colour = {"domain": ["part A's", "part B's"], "range": [light["described"], light["primary"]]}
    kind = {"field": "kind", "type": "nominal", "title": None, "legend": {"orient": "top"}, "scale": colour}
    middle = {"x": x | {"field": "needed"}, "y": y | {"field": "mean"}, "color": kind}
    line = {"type": "rule", "aria": False}
    of_a = 'datum.kind == "part A\'s"'
    layers = [
        {"mark": line | {"color": light["ink"]}, "encoding": {"y": y | {"datum": 0}}},
        {"mark": line, "encoding": middle | {"x": x | {"field": "least"}, "x2": {"field": "most"}}},
        {"mark": line, "encoding": middle | {"y": y | {"field": "low"}, "y2": {"field": "high"}}},
        {
            "mark": {"type": "point", "filled": True, "size": 70, "opacity": 1},
            "encoding": middle | {"description": {"field": "said"}},
        },
        {
            "mark": {
                "type": "text",
                "color": light["ink"],
                "aria": False,
                "align": {"expr": f"{of_a} ? 'right' : 'left'"},
                "dx": {"expr": f"{of_a} ? -6 : 6"},
                "dy": {"expr": f"{of_a} || datum.mean < 0 ? 10 : -7"},
            },
            "encoding": {key: middle[key] for key in "xy"} | {"text": {"field": "method"}},
        },
    ]
    return drawn({"width": 420, "height": 320, "layer": layers}, rows)


def left_out(found: Collection[str], name: str) -> list[str]:
    absent = [method for method in counted_on_sums() if method not in found]
    return [f"Left out, {name}, not resolved or too few pairs: {', '.join(absent)}."] if absent else []


def correlation(seeds: Sequence[int]) -> list[str]:
    """Part B: rank correlation of learning on sums with the figure measured at step 0."""
    lines = []
    for metric, name in METRICS.items():
        found = learned(metric, seeds)
        lines += left_out(found, name)
        lines.append(f"On sums, {name}: {ranked(list(found.values()), True)} They are {', '.join(found)}.")
        unknown = [pair for method, pair in found.items() if method not in KNOWN]
        beside = ranked(unknown, True) if len(unknown) >= FEWEST else f"{len(unknown)}, fewer than {FEWEST}."
        lines.append(f"The same without the methods that were registered as known: {beside}")
        unread = [pair for method, pair in found.items() if method not in PARTS["A"].arms]
        lines.append(f"Not registered, without part A's arms, whose results were known: {ranked(unread, False)}")
    every = (*PARTS["A"].arms, *PARTS["B"].arms)
    alike = [arm for arm in every if arm not in counted_on_sums() and arm != CONTROLS[0]]
    why = f"because of credits that correlate with r ≥ {ALIKE} with those of a method before them"
    lines.append(f"Not counted, as registered: {CONTROLS[0]}, and {why}: {', '.join(alike)}.")
    return lines


def tasks_compared(seeds: Sequence[int]) -> list[str]:
    """Part D, which ended with too few seeds, as a description: correlations on both tasks and their figures."""

    def pairs(task: str, metric: str, methods: Iterable[str], some: Sequence[int]) -> list[tuple[float, float]]:
        needed = {method: groups_needed(task, method)[metric][0] for method in methods}
        return [
            (expectation(value), float(differences(task, method, "dapo", some).mean()))
            for method, value in needed.items()
        ]

    said = (
        f"A description under seeds {' and '.join(map(str, seeds))} alone. It was not registered, and by the rule of "
        f"{PARTS['D'].least} seeds no coefficient would be computed. Correlations are those of differences from DAPO "
        "with −log of the groups needed on the same task, over the methods that part B counts, DAPO with 0. "
        "Seeds of the same number share nothing between the tasks."
    )
    lines = [said, ""]
    for metric, name in METRICS.items():
        resolved = [m for m in counted_on_sums() if None not in [groups_needed(t, m)[metric][0] for t in TASKS]]
        both = [m for m in resolved if all(len(differences(t, m, "dapo", seeds)) == len(seeds) for t in TASKS)]
        lines += [f"- {line}" for line in left_out(both, name)]
        new = [method for method in both if method not in PARTS["A"].arms]
        for task in TASKS:
            alone = [f"{coefficient(pairs(task, metric, both, [seed])):.2f}" for seed in seeds]
            rest = ranked(pairs(task, metric, new, seeds), False).removesuffix(".")
            said = f"{ranked(pairs(task, metric, both, seeds), False)} By seed: {', '.join(alone)}.".replace("-", "−")
            lines.append(f"- On {task}, {name}: {said} Without part A's arms, whose results were known: {rest}.")
    rows = []
    for method in dict.fromkeys((*counted_on_sums()[1:], *PARTS["D"].arms)):
        gains = [differences(task, method, "dapo", [seed]) for task in TASKS for seed in seeds]
        counted = "yes" if method in counted_on_sums() else "no"
        cells = ["".join(map(points, gain)) or "–" for gain in gains]
        rows.append([method, counted, *in_cells(groups_needed("countdown", method)), *cells])
    head = ["method", "counted", *NEEDED, *(f"{task} {seed}" for task in TASKS for seed in seeds)]
    what = "Groups needed on countdown with 95 % intervals, and differences from DAPO in points, by task and seed:"
    return [*lines, "", what, "", *table(head, rows), ""]


def coefficient(pairs: list[tuple[float, float]]) -> float:
    """The rank correlation of pairs, nan of fewer than three."""
    return float(stats.spearmanr(*zip(*pairs, strict=True)).statistic) if len(pairs) > 2 else float("nan")


def ranked(pairs: list[tuple[float, float]], tested: bool) -> str:
    """The rank correlation of pairs, with its one-sided p by permutation where that is wanted and they are enough."""
    if len(pairs) < 3:
        return f"{len(pairs)} methods, no correlation."
    first, second = (stats.rankdata(each) for each in zip(*pairs, strict=True))

    def products(order: np.ndarray, axis: int = -1) -> np.ndarray:  # all of the correlation that a permutation changes
        return (order * second).sum(axis)

    said = f"rank correlation {coefficient(pairs):.2f} of {len(pairs)} methods".replace("-", "−")
    if not tested or len(pairs) < FEWEST:
        return f"{said}, too few for a test." if tested else f"{said}."
    options = {"permutation_type": "pairings", "alternative": "greater", "n_resamples": 100_000, "rng": 1}
    return f"{said}, p {stats.permutation_test((first,), products, **options).pvalue:.3g}."


Runs = dict[tuple[str, int, str], dict[str, Any] | None]  # by task, seed and arm; None where there is none yet


def runs_of(part: str) -> Runs:
    """Every planned run, finished or failed."""
    found: Runs = {}
    for task, seed, arm, _ in planned(part, list(TASKS)):
        run = read(task, seed)["runs"].get(arm, {})
        found[task, seed, arm] = run if "failed" in run or endpoint(run) is not None else None
    return found


def every_run() -> dict[str, Runs]:
    return {name: runs_of(name) for name in PARTS}


def whole(name: str, runs: dict[str, Runs]) -> list[int]:
    """The seeds under which no run of the part is missing, and none of part A, whose DAPO and controls it needs."""
    missing = {seed for part in ("A", name) for (_, seed, _), run in runs[part].items() if run is None}
    return [seed for seed in PARTS[name].seeds if seed in PARTS["A"].seeds and seed not in missing]


def used(name: str, runs: dict[str, Runs]) -> list[int]:
    """The seeds that a part is computed over: the first `most` whole ones; none before its end."""
    seeds, most = whole(name, runs), PARTS[name].most
    return seeds[:most] if len(seeds) >= most else []


def results_of(name: str, seeds: Sequence[int], controls: Found) -> list[str]:
    """What the page says of a part that has ended. seeds: those used."""
    part = PARTS[name]
    lines = insensitive(controls, part.tasks)
    if name == "A":
        primary = contrasts_of(TASKS, PRIMARY, seeds)
        said = verdicts(primary, controls)
        lines += [f"![The contrasts of the tables below, without random20](../images/{PICTURE.name})", ""]
        lines += ["Primary contrasts:", "", *lines_of(primary, True, said), ""]
        least = f"With {len(seeds)} pairs the exact sign-flip p cannot be below {least_sign_flip_p(len(seeds)):.2g}."
        power = (
            "Shown with 80 %: the true difference in points that so many pairs show with that probability at 5 % / "
            f"{len(primary)}, estimated from their s.d. (from the upper end of its 95 % interval)."
        )
        once = (
            "An interval and p are of one contrast, Holm's p of all six: an interval may leave 0 out where no "
            f"difference is found. Equivalent means that the 90 % interval is within {EQUIVALENT:g} points, not that "
            "two arms are the same, and is not adjusted."
        )
        lines += [f"{once} {least} {power}", ""]
        asked = [task for task in TASKS if not unseen(controls, task)]
        lines += [line for task in asked for line in (second_question(said, task), "")]
        lines += [line for task in TASKS for line in expected(task)]
        if known := [seed for seed in seeds if seed in READ]:
            rest = [seed for seed in seeds if seed not in READ]
            unread = contrasts_of(TASKS, PRIMARY, rest) | against_dapo(TASKS, CONTROLS, rest)
            title = f"As a description, without seeds whose results were read before (of these {len(known)}):"
            lines += [title, "", *lines_of(unread), ""]
        lines += ["Controls, which must be worse than DAPO:", "", *lines_of(controls, True), ""]
        lines += ["As a description:", "", *lines_of(against_dapo(TASKS, DESCRIBED, seeds)), ""]
        paper = (
            "The paper reports that entropy falls and rises again, and that answers grow, over far more than 24 steps. "
            "Here a rise is the last step minus the lowest, above 0 by noise alone; groups trained on become others as "
            "accuracy grows, so a change of length is in part one of prompts."
        )
        lines += [paper, ""]
        for task in TASKS:
            lines += [f"Changes on {task}, with 95 % intervals:", "", *changes(part, task, seeds), ""]
    else:
        if name == "B":
            said = (
                "A description, not a test: a p, by at most 100,000 permutations, takes methods for exchangeable, "
                "which kin are not, and decides nothing. The figure is −log of the groups needed along the truth, "
                f"measured on one warm start, of seed {part.seeds[0]}."
            )
            lines += [said, "", *(f"- {line}" for line in correlation(seeds)), ""]
            known = (
                "Results of seven of the ten were known: DAPO's 0 by construction, those of fork20, dapo_blame and "
                "random60 on these seeds, of PSR, prob_mask and QAE in trials."
            )
            lines += [known, ""]
            said = "Groups needed in the metric of plain gradient descent and the differences on sums"
            lines += [f"![{said}, of the tables below](../images/{LEARNING.name})", ""]
            what = "Groups needed to learn as much as DAPO with one, and what was learned, with 95 % intervals:"
            lines += [what, "", *measured_beside_learned(seeds), ""]
        if name == "C":
            said = "GTPO − DAPO at the same learning rate, a description that was added after the results were read:"
            rates = [("gtpo", "dapo"), *zip(list(part.arms)[2:], part.arms, strict=False)]
            lines += [said, "", *lines_of(contrasts_of(part.tasks, rates, seeds)), "", "Registered, from DAPO:", ""]
        lines += [*lines_of(against_dapo(part.tasks, part.arms, seeds)), ""]
    for task in part.tasks:
        what = "one validation before training and DAPO's endpoint, in percent; differences, in points"
        lines += [f"By seed on {task}: {what}:", ""]
        lines += [*by_seed(part, task, seeds), ""]
        lines += [
            f"Levels on {task}, means; entropy in nat a token and length in tokens, of the groups trained on:",
            "",
            *levels(part, task, seeds),
            "",
        ]
        same = "and at the end in accuracy, in points, when both had generated as many groups as the one with fewer"
        lines += [f"Differences from DAPO on {task} in the same, {same}, with 95 % intervals:", ""]
        lines += [*beside(part, task, seeds), ""]
    return lines


def page() -> str:
    """verdict.md, from the data alone."""
    runs = every_run()
    there = {key: run for part in PARTS for key, run in runs[part].items() if run is not None}
    over = {name: used(name, runs) for name in PARTS}
    controls = against_dapo(TASKS, CONTROLS, over["A"])
    least = PARTS["A"].least, PARTS["B"].least
    rule = (
        "Computed by `make results` from `data/`; [`registration.md`](registration.md) was committed before the first "
        f"run, with {len(PARTS['A'].seeds)} seeds for part A, 6 for B and D and 8 for C, and amended since. A part "
        "ends with as many whole seeds as the table says; D, which is part B on countdown, was ended with two because "
        "the machine of its warm starts was lost. Part A is not decided with fewer than "
        f"{least[0]}, the others with fewer than {least[1]}."
    )
    unit = (
        "A difference is one of endpoints, in points, between two arms of the same seed; the endpoint is the mean "
        f"accuracy of the validations after steps {', '.join(map(str, VALIDATED))}. The models have 0.66 million "
        "parameters, and nothing here can say which method is better on a large one."
    )
    lines = [
        *("# Verdict", "", rule, "", unit, ""),
        "| part | planned runs | finished | failed | whole seeds | ends with | used |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, part in PARTS.items():
        failed = sum("failed" in run for run in runs[name].values() if run is not None)
        finished = sum(run is not None for run in runs[name].values()) - failed
        seeds = [", ".join(map(str, each)) or "none" for each in (whole(name, runs), over[name])]
        lines.append(f"| {name} | {len(runs[name])} | {finished} | {failed} | {seeds[0]} | {part.most} | {seeds[1]} |")
    lines.append("")
    for name in PARTS:
        in_use = {key: run for key, run in runs[name].items() if run is not None and key[1] in over[name]}
        commits = Counter(run["commit"] for run in in_use.values())
        lines += [f"- part {name}, {count} runs of commit {commit}" for commit, count in sorted(commits.items())]
        mixed = [key for key, run in in_use.items() if run["commit"] != there[*key[:2], "dapo"]["commit"]]
        lines += [f"- part {name}, of another commit than its DAPO: {' '.join(map(str, key))}" for key in mixed]
    lines += [f"- failed: {' '.join(map(str, key))}" for key, run in there.items() if "failed" in run]
    machines = (
        "Commits are those of the runs used. The arms of parts B, C and D, and in sums 109 those of part A but DAPO, "
        "were trained on another machine than DAPO, from the same weights; in each of these seeds the validation "
        "before training and the first step's entropy, length and groups are the same for all arms. Arms are explained "
        "under [methods](../reference/methods.md), words in the [glossary](../inside/glossary.md), parts, tests and "
        "what each part asks in the registration."
    )
    lines += ["", machines, ""]
    for name in PARTS:
        lines += [f"## Part {name}", ""]
        if not (over["A"] and over[name]):
            lines += ["**Not complete: nothing is computed, and nothing is concluded.**", ""]
        elif any(len(over[each]) < PARTS[each].least for each in ("A", name)):  # the controls are of part A
            lines += ["**Not decided: too few whole seeds.**", ""]
            if name == "D":
                lines += tasks_compared(over["D"])
        else:
            lines += results_of(name, over[name], controls)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("train", help="train the runs that are not in data/")
    runs.add_argument("--part", default="".join(PARTS), help="of the registration, such as A or BD (default: all)")
    runs.add_argument("--hours", type=float, default=1000.0, help="begin no run after so many")
    audits = commands.add_parser("predict", help="measure the predictors of part B")
    for each in (runs, audits):
        each.add_argument("--tasks", default=",".join(TASKS), help="default: %(default)s")
        each.add_argument("--scratch", type=Path, default=Path("outputs/verdict"), help="default: %(default)s")
    commands.add_parser("page", help="compute verdict.md")
    options = parser.parse_args()
    if options.command == "train":
        train(options.part, options.tasks.split(","), options.hours, options.scratch.absolute())
    elif options.command == "predict":
        predict(options.tasks.split(","), options.scratch.absolute())
    else:
        (HERE / "verdict.md").write_text(page())
        print(HERE / "verdict.md")
        runs = every_run()
        over = {name: seeds for name in "AB" if len(seeds := used(name, runs)) >= PARTS[name].least}
        if "A" in over:
            PICTURE.write_text(picture(over["A"]))
            print(PICTURE)
        if "A" in over and "B" in over:
            LEARNING.write_text(learning_picture(over["B"]))
            print(LEARNING)


if __name__ == "__main__":
    main()
