"""Is a training faster than at an earlier commit? Pairs of trainings, the earlier commit's and this one's in turn.

    python benchmarks/compare_commits.py d304c8a~1 --pairs 3 --flames
    python benchmarks/compare_commits.py d304c8a~1 --pairs 3 --quickstart

Each training is an arm of the quickstart, GTPO, on the embedded task with one seed. Compared are its start (from the
command to the first generation: the end of the first step less its time), a step (median of those after the first that
do not validate), a validation, and CPU seconds of its processes; ratios are of pairs. That both have trained the same
is checked on rewards and entropies of the first step. Each commit is installed into a directory of its own, beside this
environment's packages, so it must run with them. Writes `commits.json` and `.md` into benchmarks/results.

With --flames a last pair, whose times do not count, is sampled by py-spy (`pip install py-spy`), which reads a process
while it runs: `flames/COMMIT-PROCESS.svg`.

With --quickstart what is compared are whole quickstarts, which prepare their task and train every arm: seconds, and the
points of accuracy that each arm gained. Writes `quickstarts.json` and `.md`.

Times mean something on a machine with nothing beside it.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from rich.progress import track

from gtpo_verl.files import write_json, write_text
from gtpo_verl.tasks import Task
from gtpo_verl.tasks.prepare import prepare_task
from gtpo_verl.tasks.sums.task import TASK

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
MEASURES = {"start": "s", "step": "s", "validation": "s", "cpu": "s", "quickstart": "s"}
SAME = ("training/accuracy", "credit/entropy_all")  # of the first step
LOOK = 0.5  # seconds between two looks at the processes
# how processes call themselves, in the order of the table
PROCESSES = {
    "AgentLoopWorkerTQ": "agent loop",
    "GroupAgentLoopWorker": "agent loop",
    "SeededAgentLoopWorker": "agent loop",
    "VLLM::EngineCore": "vLLM's engine",
    "EntropyVLLMHttpServer": "vLLM's server",
    "WorkerDict": "FSDP worker",
    "TaskRunner": "task runner",
    "RewardLoopWorker": "reward worker",
    "GroupRewardLoopWorker": "reward worker",
    "BoundedRewardLoopWorker": "reward worker",
    "GlobalRequestLoadBalancer": "load balancer",
    "TransferQueueController": "TransferQueue's controller",
    "SimpleStorageUnit": "TransferQueue's storage",
}
COMMAND, OTHER = "command", "others"
LABELS = (*dict.fromkeys(PROCESSES.values()), COMMAND, OTHER)
RATE = 40  # samples a second


def install(commit: str, place: Path) -> Path:
    """Install the package as it was at a commit, without its requirements; returns the directory for PYTHONPATH."""
    tree, target = place / f"{commit}-tree", place / commit
    subprocess.run(["git", "-C", ROOT, "worktree", "add", "--quiet", "--detach", tree, commit], check=True)
    try:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--no-deps", "--no-build-isolation", "--target", target, tree], check=True)
        subprocess.run([sys.executable, "-m", "compileall", "-q", target], check=True)
    finally:
        subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", tree], check=True)
    return target


def train(installed: Path, run_dir: Path, task: Task, steps: int, flames: Path | None = None) -> dict[str, Any]:
    """One training; returns what is measured.

    Args:
        flames: a directory for flame graphs of its processes.
    """
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True)
    command = [
        *(sys.executable, "-m", "gtpo_verl.train", "algo=gtpo", "setting=quickstart", "hardware=cpu"),
        *(f"actor_rollout_ref.model.path={task.model_path}", f"data.train_files={task.train_file}"),
        *(f"data.val_files={task.val_file}", f"trainer.run_dir={run_dir}", f"trainer.total_training_steps={steps}"),
        *(f"trainer.test_freq={steps // 2}", "trainer.val_before_train=False", "trainer.save_freq=-1"),
    ]
    metrics = run_dir / "metrics.jsonl"
    used: dict[tuple[int, float], tuple[str, float]] = {}
    samplers: dict[str, subprocess.Popen[bytes]] = {}
    began, first = time.monotonic(), None
    # not in the checkout, whose package would be found before the installed one
    with (run_dir / "terminal").open("w") as terminal:
        process = subprocess.Popen(
            command, cwd=run_dir, stdout=terminal, stderr=terminal, env=os.environ | {"PYTHONPATH": str(installed)}
        )
        while process.poll() is None:
            time.sleep(LOOK)
            if first is None and metrics.exists() and metrics.stat().st_size:
                first = time.monotonic() - began
            for one in _processes(process.pid):
                try:
                    label = COMMAND if one.pid == process.pid else _label(one)
                    times, identity = one.cpu_times(), (one.pid, one.create_time())
                except psutil.Error:  # it has ended
                    continue
                if label == OTHER and identity in used:  # a process whose name cannot be read for a moment
                    label = used[identity][0]
                used[identity] = label, times.user + times.system
                if flames is not None and label != OTHER and label not in samplers:
                    samplers[label] = _sampler(one.pid, flames / f"{installed.name}-{_slug(label)}.svg")
    for sampler in samplers.values():
        sampler.wait(60)
    seconds: Counter[str] = Counter()
    for label, spent in used.values():
        seconds[label] += spent
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    if process.returncode or first is None:
        raise _failed(installed, process.returncode, run_dir)
    data = {line["step"]: line["data"] for line in lines}
    plain = [data[step] for step in data if step > 1 and "timing_s/testing" not in data[step]]
    return {
        "start": first - data[1]["timing_s/step"],
        "step": statistics.median(values["timing_s/step"] for values in plain),
        "validation": statistics.median(
            values["timing_s/testing"] for values in data.values() if "timing_s/testing" in values
        ),
        "cpu": seconds.total(),
        "processes": {label: round(seconds[label], 1) for label in LABELS},
        **{key: data[1][key] for key in SAME if key in data[1]},
    }


def quickstart(installed: Path, output: Path) -> dict[str, Any]:
    """A whole quickstart: seconds, and the points that each arm gained."""
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    command = [sys.executable, "-m", "gtpo_verl.cli", "quickstart", "--output", str(output)]
    began = time.monotonic()
    with (output / "terminal").open("w") as terminal:
        done = subprocess.run(
            command, cwd=output, stdout=terminal, stderr=terminal, env=os.environ | {"PYTHONPATH": str(installed)}
        )
    seconds = time.monotonic() - began
    if done.returncode:
        raise _failed(installed, done.returncode, output)
    (summary,) = output.glob("quickstart-*/summary.json")
    gains = {}
    for arm in json.loads(summary.read_text())["arms"]:
        (task,) = arm.get("trainings", [arm])[0]["sources"].values()  # an earlier report had one training an arm
        gains[arm["name"]] = round(100 * task["change"]["difference"]["value"], 1)
    return {"quickstart": seconds, "gains": gains}


def _failed(installed: Path, code: int, place: Path) -> SystemExit:
    """With the end of what it printed, which goes with its directory."""
    printed = (place / "terminal").read_text(errors="replace")
    return SystemExit(f"{printed[-2000:]}\nerror: a training of {installed.name} ended with {code}: see above")


def _processes(pid: int) -> list[psutil.Process]:
    """A process and its descendants."""
    try:
        return [root := psutil.Process(pid), *root.children(recursive=True)]
    except psutil.Error:
        return []


def _label(process: psutil.Process) -> str:
    line = process.cmdline()
    return PROCESSES.get(line[0].removeprefix("ray::").split(".")[0].split("(")[0] if line else "", OTHER)


def _slug(label: str) -> str:
    return label.lower().replace("'s", "").replace(" ", "-")


def _sampler(pid: int, file: Path) -> "subprocess.Popen[bytes]":
    options = ["--rate", str(RATE), "--duration", "unlimited", "--format", "flamegraph", "--nonblocking"]
    # the graph's title is the command line, which should name no directory
    command = ["py-spy", "record", "--pid", str(pid), "--output", file.name, *options]
    return subprocess.Popen(
        command, executable=_py_spy(), cwd=file.parent, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def _py_spy() -> str:
    found = shutil.which("py-spy") or shutil.which("py-spy", path=Path(sys.executable).parent)
    if found is None:
        raise SystemExit("error: py-spy is missing: python -m pip install py-spy, or leave --flames out")
    return found


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    count = len(result["pairs"])
    first = result["pairs"][0]["old"]
    said = (
        f"{'A whole' if 'gains' in first else 'An arm of the'} quickstart at {result['old']} and at {result['new']}: "
        "medians (ranges) of "
        f"{count} pair{'s' * (count > 1)}, in turn, on {result['machine']}."
    )
    lines = [said, "", "| | before | now | now / before |", "|---|---|---|---|"]
    for name, unit in MEASURES.items():
        if name not in first:
            continue
        before, now = ([pair[which][name] for pair in result["pairs"]] for which in ("old", "new"))
        ratios = [one / other for one, other in zip(now, before, strict=True)]
        lines.append(f"| {name}, {unit} | {_spread(before)} | {_spread(now)} | {_spread(ratios, 2)} |")
    for name in first.get("gains", ()):
        before, now = ([pair[which]["gains"][name] for pair in result["pairs"]] for which in ("old", "new"))
        lines.append(f"| {name} gains, points | {_spread(before)} | {_spread(now)} | |")
    if "processes" not in first:
        return "\n".join([*lines, ""])
    lines += ["", "| CPU seconds, medians | before | now |", "|---|---|---|"]
    for label in LABELS:
        before, now = ([pair[which]["processes"][label] for pair in result["pairs"]] for which in ("old", "new"))
        lines.append(f"| {label} | {statistics.median(before):.0f} | {statistics.median(now):.0f} |")
    return "\n".join([*lines, ""])


def _spread(values: Sequence[float], digits: int = 1) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def main() -> int:
    """Compare, write and print; returns the exit code: 1 where the trainings were not the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", metavar="COMMIT")
    parser.add_argument("--new", metavar="COMMIT", default="HEAD")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="of a training (default: %(default)s)")
    parser.add_argument("--task", type=Path, default=Path("outputs/task-sums"), metavar="DIR")
    parser.add_argument("--flames", action="store_true", help="sample one more pair: flame graphs of its processes")
    parser.add_argument("--quickstart", action="store_true", help="compare whole quickstarts instead")
    parser.add_argument("--output", type=Path, help="a .json file (default: in benchmarks/results)")
    args = parser.parse_args()
    output: Path = args.output or RESULTS / ("quickstarts.json" if args.quickstart else "commits.json")
    if args.flames and args.quickstart:
        parser.error("--flames samples trainings: leave --quickstart out")
    if args.flames:
        _py_spy()
    names = [
        subprocess.run(
            ["git", "-C", ROOT, "rev-parse", "--short", commit], check=True, capture_output=True, text=True
        ).stdout.strip()
        for commit in (args.old, args.new)
    ]
    if args.quickstart:
        measure: Callable[..., dict[str, Any]] = quickstart
    else:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        task = prepare_task(TASK, args.task)
        measure = partial(train, task=task, steps=args.steps)
    result: dict[str, Any] = {
        "old": names[0],
        "new": names[1],
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        "pairs": [],
    }
    if not args.quickstart:
        result["steps"] = args.steps
    with tempfile.TemporaryDirectory(prefix="gtpo-verl-commits-") as place:
        installed = [install(name, Path(place)) for name in names]
        for number in track(range(args.pairs), "pairs"):
            order = (0, 1) if number % 2 == 0 else (1, 0)
            pair = {("old", "new")[which]: measure(installed[which], Path(place) / f"run-{which}") for which in order}
            result["pairs"].append(pair)
            write_json(output, result)
            write_text(output.with_suffix(".md"), table(result))
        if args.flames:
            flames = output.parent / "flames"
            flames.mkdir(exist_ok=True)
            for which in (0, 1):
                measure(installed[which], Path(place) / f"run-{which}", flames=flames)
    print(table(result))
    different = [key for pair in result["pairs"] for key in SAME if pair["old"].get(key) != pair["new"].get(key)]
    if different:
        print(f"The first steps differ in {', '.join(sorted(set(different)))}: look why before comparing times.")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
