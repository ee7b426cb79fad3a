"""Train the runs of registration.md, keep their numbers in data/, and compute the page verdict.md from them.

    python docs/results/verdict.py train [--part A] [--tasks sums] [--hours 3]    one run after another; goes on
    python docs/results/verdict.py predict [--tasks sums]                         the figures that part B is about
    python docs/results/verdict.py page                                           what `make results` runs

`train` writes data/TASK-SEED.json after every run and skips what is there, so it continues on another machine from what
is committed. Models and logs are kept in --scratch and are not needed again.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from gtpo_verl.evaluation.paired import holm

HERE = Path(__file__).parent
DATA = HERE / "data"
TASKS = ("sums", "countdown")
CONTROLS = ("random20", "random60")
VALIDATED = (6, 12, 18, 24)  # the steps whose mean accuracy is the endpoint
STEPS = 24
REPEATS = {"sums": 1, "countdown": 4}  # samples of each validation prompt, as rows of the data: 1,024 and 1,488


@dataclass(frozen=True)
class Part:
    """Arms, each an algorithm with its overrides, trained under every seed and on every task."""

    arms: dict[str, tuple[str, ...]]
    seeds: range
    tasks: tuple[str, ...] = TASKS


def arms(*names: str) -> dict[str, tuple[str, ...]]:
    return {name: (f"algo={name}",) for name in names}


RATE = "actor_rollout_ref.actor.optim.lr"
PARTS = {
    "A": Part(arms("dapo", "gtpo", "grpo_s", "fork20", "dapo_blame", "random20", "random60"), range(101, 117)),
    "B": Part(
        arms(
            *("psr", "prob_mask", "qae", "polarity_entropy", "entropy_bonus"),
            *("empg", "eapo", "gtpo_v1", "gtpo_shuffled", "w_reinforce"),
        ),
        range(101, 107),
    ),
    "C": Part(
        {
            f"{name}, lr x {text}": (f"algo={name}", f"{RATE}={3e-4 * factor:g}")
            for name in ("dapo", "gtpo")
            for text, factor in (("1/2", 0.5), ("2", 2.0))
        },
        range(101, 109),
        ("countdown",),
    ),
}
PRIMARY = (("gtpo", "dapo"), ("grpo_s", "dapo"), ("gtpo", "dapo_blame"))  # of part A, on each task
EQUIVALENT = 2.0  # points
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


def write(task: str, seed: int, record: dict[str, Any]) -> None:
    DATA.mkdir(exist_ok=True)
    unfinished = data_file(task, seed).with_suffix(".unfinished")
    unfinished.write_text(json.dumps(record, indent=1) + "\n")
    unfinished.replace(data_file(task, seed))


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


def numbers(run: Path) -> dict[str, Any]:
    """What is kept of a finished run."""
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (name,) = {key for step in steps for key in step["data"] if key.startswith("val/") and key.endswith("/mean@1")}
    return {
        "validations": {str(step["step"]): step["data"][name] for step in steps if name in step["data"]},
        "steps": {kept: [step["data"].get(key) for step in steps if step["step"] > 0] for kept, key in KEPT.items()},
    }


def train(parts: str, tasks: list[str], hours: float, scratch: Path) -> None:
    """Train what is not in the data, one run after another."""
    end = time.monotonic() + 3600 * hours
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True, cwd=HERE)
    todo = [each for each in planned(parts, tasks) if each[2] not in read(*each[:2])["runs"]]
    print(f"{len(todo)} runs are left", flush=True)
    for number, (task, seed, arm, overrides) in enumerate(todo):
        if time.monotonic() > end:
            print(f"{len(todo) - number} runs are left")
            return
        place, start = prepared(task, seed, scratch)
        record = {"start": start} | read(task, seed)
        if record["start"]["weights"] != start["weights"]:
            raise SystemExit(
                f"error: another machine made another warm start of {task}, seed {seed}. Remove "
                f"{data_file(task, seed)}, which trains all of its arms again."
            )
        run = scratch / f"{task}-{seed}-{arm}".translate(str.maketrans({" ": "", ",": "-", "/": "_"}))
        began = time.monotonic()
        done = subprocess.run(command(task, seed, overrides, place, run), capture_output=True, text=True)
        if (
            done.returncode != 0
        ):  # registration.md: once more, from the start of the run or its checkpoint, then a failure
            done = subprocess.run(command(task, seed, overrides, place, run), capture_output=True, text=True)
        result = numbers(run) if (run / "metrics.jsonl").is_file() else {}
        if done.returncode != 0:
            result["failed"] = (done.stderr.strip().splitlines() or ["no message"])[-1]
        result |= {"overrides": list(overrides), "commit": commit.stdout.strip()}
        record["runs"][arm] = result
        write(task, seed, record)
        accuracy = endpoint(result)
        print(
            f"{number + 1}/{len(todo)} {task} {seed} {arm}: "
            f"{'failed' if accuracy is None else format(accuracy, '.3f')}, {time.monotonic() - began:.0f} s",
            flush=True,
        )


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
            for name, value in json.loads((output / "audit.json").read_text()).items()
            if name in ("settings", "measurement", "gradients", "versions")
        }
        (DATA / f"predictors-{task}.json").write_text(json.dumps(record, indent=1) + "\n")


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
    alike = np.abs(np.corrcoef(columns)) >= ALIKE
    kept: list[int] = []
    for place, name in enumerate(number):
        if name != "random20" and not alike[place, kept].any():
            kept.append(place)
    return [list(number)[place] for place in kept]


def endpoint(run: dict[str, Any]) -> float | None:
    """Mean accuracy of the validations at `VALIDATED`; None of a run that has not reached the last."""
    found = [run.get("validations", {}).get(str(step)) for step in VALIDATED]
    return None if None in found else float(np.mean(found))


def differences(task: str, arm: str, other: str, seeds: range) -> tuple[list[int], np.ndarray]:
    """The seeds that both arms finished, and the differences of their endpoints in points."""
    pairs = {}
    for seed in seeds:
        runs = read(task, seed)["runs"]
        ends = [endpoint(runs.get(name, {})) for name in (arm, other)]
        if None not in ends:
            pairs[seed] = 100 * (ends[0] - ends[1])
    return list(pairs), np.array(list(pairs.values()))


@dataclass(frozen=True)
class Contrast:
    """Two arms over seeds.

    p: of the paired t test. flips: of the exact sign-flip test. equivalence: the larger p of the two one-sided t tests
    at ± `EQUIVALENT`.
    """

    task: str
    arm: str
    other: str
    seeds: int
    mean: float
    deviation: float
    low: float
    high: float
    p: float
    flips: float
    equivalence: float

    @classmethod
    def of(cls, task: str, arm: str, other: str, seeds: range) -> "Contrast | None":
        """None with fewer than three pairs."""
        found, values = differences(task, arm, other, seeds)
        if len(found) < 3:
            return None
        test = stats.ttest_1samp(values, 0.0)
        interval = test.confidence_interval(1 - ALPHA)
        sides = [
            stats.ttest_1samp(values, bound, alternative=side).pvalue
            for bound, side in ((-EQUIVALENT, "greater"), (EQUIVALENT, "less"))
        ]
        flips = stats.permutation_test((values,), np.mean, permutation_type="samples", n_resamples=2**20).pvalue
        return cls(
            *(task, arm, other, len(found), float(values.mean()), float(values.std(ddof=1))),
            *(float(interval.low), float(interval.high), float(test.pvalue), float(flips), float(max(sides))),
        )


def words(contrast: Contrast, adjusted: float) -> str:
    """The verdict in the words that registration.md fixes."""
    different, equivalent = adjusted <= ALPHA, contrast.equivalence <= ALPHA
    better = "better" if contrast.mean > 0 else "worse"
    if different and equivalent:
        return f"{better}, and by less than {EQUIVALENT:g} points"
    if different:
        return better
    return f"equivalent within {EQUIVALENT:g} points" if equivalent else "not decided"


def lines_of(contrasts: list[Contrast], adjusted: list[float] | None = None) -> list[str]:
    head = "| task | contrast | pairs | difference | 95 % interval | s.d. | p | sign flips | p at ± 2 |"
    lines = [
        head + (" Holm | verdict |" if adjusted else ""),
        "|---" * (head.count("|") - 1 + (2 if adjusted else 0)) + "|",
    ]
    for place, each in enumerate(contrasts):
        line = (
            f"| {each.task} | {each.arm} − {each.other} | {each.seeds} | {each.mean:+.2f} | {each.low:+.2f} to "
            f"{each.high:+.2f} | {each.deviation:.2f} | {each.p:.3g} | {each.flips:.3g} | {each.equivalence:.3g} |"
        )
        lines.append(line + (f" {adjusted[place]:.3g} | {words(each, adjusted[place])} |" if adjusted else ""))
    return lines


def contrasts_of(wanted: list[tuple[str, str, str]], seeds: range) -> list[Contrast]:
    found = [Contrast.of(task, arm, other, seeds) for task, arm, other in wanted]
    return [each for each in found if each is not None]


def levels(part: Part, task: str) -> list[str]:
    """Mean endpoint, first and last entropy, length and groups generated of each arm."""
    lines = [
        "| arm | runs | endpoint | entropy, first, lowest and last step | length, first and last | groups generated |"
    ]
    lines.append("|---|---|---|---|---|---|")
    for arm in part.arms:
        runs = [read(task, seed)["runs"].get(arm, {}) for seed in part.seeds]
        runs = [run for run in runs if endpoint(run) is not None]
        if not runs:
            continue
        column = {name: np.array([run["steps"][name] for run in runs], dtype=float) for name in KEPT}
        entropy, length = column["entropy"].mean(0), column["length"].mean(0)
        lines.append(
            f"| {arm} | {len(runs)} | {100 * np.mean([endpoint(run) for run in runs]):.1f} | {entropy[0]:.3f}, "
            f"{entropy.min():.3f}, {entropy[-1]:.3f} | {length[0]:.1f}, {length[-1]:.1f} | "
            f"{column['groups'].sum(1).mean():.0f} |"
        )
    return lines


def correlation(task: str) -> list[str]:
    """Part B: rank correlation of learning with the figure measured at step 0; none before both are there."""
    file = DATA / f"predictors-{task}.json"
    if not file.is_file():
        return [f"{task}: the predictors are not measured yet."]
    record = json.loads(file.read_text())
    lines = []
    for metric in ("sgd", "adam"):
        needed, learned = [], []
        for method in record["counted"]:
            value = record["gradients"]["methods"][method][metric]["along/dapo"][0]
            _, found = differences(task, method, "dapo", PARTS["B"].seeds)
            if value is None or (len(found) < len(PARTS["B"].seeds) and method != "dapo"):
                continue
            # a method that goes against the truth has a negative figure: it is last
            needed.append(-np.log(value) if value > 0 else -np.inf)
            learned.append(0.0 if method == "dapo" else float(found.mean()))
        if len(needed) < len(record["counted"]):
            lines.append(f"{task}, {metric}: {len(needed)} of {len(record['counted'])} methods are there.")
            continue

        def rank(order: np.ndarray, learned: list[float] = learned) -> float:
            return float(stats.spearmanr(order, learned).statistic)

        test = stats.permutation_test(
            (needed,), rank, permutation_type="pairings", alternative="greater", n_resamples=100_000, rng=1
        )
        lines.append(
            f"{task}, {metric}: rank correlation {test.statistic:.2f} of {len(needed)} methods, p {test.pvalue:.3g}."
        )
    return lines


def page() -> str:
    """verdict.md, from the data alone."""
    a = PARTS["A"]
    planned_runs = list(planned("ABC", list(TASKS)))
    done = [endpoint(read(task, seed)["runs"].get(arm, {})) is not None for task, seed, arm, _ in planned_runs]
    failed = [
        f"{task} {seed} {arm}: {run['failed']}"
        for task, seed, arm, _ in planned_runs
        if "failed" in (run := read(task, seed)["runs"].get(arm, {}))
    ]
    primary = contrasts_of([(task, *pair) for task in TASKS for pair in PRIMARY], a.seeds)
    complete = len(primary) == len(TASKS) * len(PRIMARY) and all(each.seeds == len(a.seeds) for each in primary)
    controls = contrasts_of([(task, control, "dapo") for task in TASKS for control in CONTROLS], a.seeds)
    lines = [
        "# Verdict",
        "",
        "Computed by `make results` from `data/`; `registration.md` was committed before the first run.",
        "",
        f"{sum(done)} of {len(done)} runs are finished, {len(failed)} failed.",
        *(f"- {line}" for line in failed),
        "",
        "## Part A",
        "",
    ]
    if not complete:
        lines += ["**The runs are not complete: no test below is the registered one, and nothing is concluded.**", ""]
    if primary:
        lines += [
            "Primary contrasts:",
            "",
            *lines_of(primary, list(holm([each.p for each in primary])) if complete else None),
            "",
        ]
    if controls:
        lines += ["Controls, which must be worse than DAPO:", "", *lines_of(controls), ""]
    other = [(task, arm, "dapo") for task in TASKS for arm in ("fork20", "dapo_blame")]
    if secondary := contrasts_of(other, a.seeds):
        lines += ["Secondary:", "", *lines_of(secondary), ""]
    for task in TASKS:
        if len(table := levels(a, task)) > 2:
            lines += [f"Levels on {task}:", "", *table, ""]
    lines += ["## Part B", "", *(f"- {line}" for task in TASKS for line in correlation(task)), ""]
    b = contrasts_of([(task, arm, "dapo") for task in TASKS for arm in PARTS["B"].arms], PARTS["B"].seeds)
    lines += [*lines_of(b), ""] if b else []
    c = contrasts_of([("countdown", arm, "dapo") for arm in PARTS["C"].arms], PARTS["C"].seeds)
    lines += ["## Part C", "", *(lines_of(c) if c else ["No runs yet."]), ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("train", help="train the runs that are not in data/")
    runs.add_argument("--part", default="ABC", help="of the registration, such as A or BC (default: all)")
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


if __name__ == "__main__":
    main()
