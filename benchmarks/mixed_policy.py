"""Does a guide help where the policy is almost always wrong? DAPO against mixed-policy DAPO on a hard embedded task.

    python benchmarks/mixed_policy.py --seeds 3
    python benchmarks/mixed_policy.py --seeds 1 --arms dapo,zero-traces --steps 4        a look

The sums are made hard by a verifier that wants every step right, and by a policy whose demonstrations were off by one
in two steps of three, so that at most one response in twenty is correct; the guide is the task's own model, whose
demonstrations were so in one step of four. Arms: DAPO; `zero`, `mix` and LUFFY's setting, each with the guide's
responses as columns of the data (`traces`, sampled once by `gtpo-verl traces`) and by a server of its own (`server`).
All is run by `gtpo-verl train` with vLLM; a seed has the same order of data in every arm.

Reported is accuracy on validation problems by steps, and against the responses that were generated for it, with those
of the guide. Writes `mixed-policy.json`, `.md` and `.png` into benchmarks/results. A training that is complete, in its
directory or in the results, is not repeated.
"""

import argparse
import shlex
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gtpo_verl.files import read_json, write_json, write_text
from gtpo_verl.runs.directory import read_metrics_from, read_record
from gtpo_verl.runs.provenance import run_versions
from gtpo_verl.tasks import Task, WarmStart, set_thread_waiting
from gtpo_verl.tasks.prepare import prepare_task
from gtpo_verl.tasks.sums.task import TASK

RESULTS = Path(__file__).parent / "results"
# A warm start of 80 steps gives as low an accuracy (0.031), from which 24 steps of DAPO, seed 0, went to 0.051.
STUDENT = WarmStart(steps=800, batch_size=64, error_rate=0.67)
STRICT = f"reward.custom_reward_function.path={Path(__file__).with_name('strict_sums.py')}"
METHODS: dict[str, tuple[str, ...]] = {
    "dapo": ("algo=dapo",),
    "zero": ("algo=dapo_mixed", "algorithm.guide.mode=zero"),
    "mix": ("algo=dapo_mixed", "algorithm.guide.mode=mix"),
    "luffy": ("algo=luffy", "algorithm.filter_groups.enable=false"),
}
ARMS = ("dapo", *(f"{method}-{source}" for source in ("traces", "server") for method in ("zero", "mix", "luffy")))
SAMPLES = 4  # of the guide for each prompt, of which the correct ones are kept
GROUP = 8
ACCURACY = f"val/{TASK.data_source}/mean@1"


def run(command: Sequence[str], log: Path) -> None:
    """Run a command in a process of its own; Ctrl-C lets it keep what it has done."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
    if code:
        raise SystemExit(f"error: {shlex.join(command)} ended with {code}; see {log}")


def sampled(student: Task, guide: Task, directory: Path) -> Path:
    """The training data with the guide's correct responses and their log-probabilities."""
    output = directory / "with_traces.parquet"
    if not output.exists():
        command = [
            *(sys.executable, "-m", "gtpo_verl.cli", "traces", str(guide.model_path), str(student.train_file)),
            *("--output", str(output), "--samples", str(SAMPLES), "setting=quickstart", "hardware=cpu"),
            *(f"data.val_files={student.val_file}", STRICT),
        ]
        run(command, directory / "traces.out")
    return output


def share_kept(traces: Path) -> float:
    """The share of the guide's responses that the verifier called correct."""
    kept = pd.read_parquet(traces, columns=["guide_responses"])["guide_responses"]
    return float(kept.map(len).sum()) / (SAMPLES * len(kept))


def train(arm: str, seed: int, steps: int, student: Task, guide: Task, traces: Path, run_dir: Path) -> None:
    """Run one training, unless it is complete already."""
    record = read_record(run_dir)
    if record and record["status"] == "complete":
        return
    method, _, source = arm.partition("-")
    data = traces if source == "traces" else student.train_file
    overrides = [
        *(*METHODS[method], "setting=quickstart", "hardware=cpu", f"seed={seed}", f"trainer.run_dir={run_dir}"),
        STRICT,
        *(f"actor_rollout_ref.model.path={student.model_path}", f"data.train_files={data}"),
        *(f"data.val_files={student.val_file}", f"trainer.total_training_steps={steps}"),
        *(f"trainer.test_freq={max(1, steps // 4)}", "trainer.save_freq=-1"),
    ]
    if source == "server":
        overrides += [
            *("algorithm.guide.source=server", f"algorithm.guide.model={guide.model_path}"),
            "ray_kwargs.ray_init.num_gpus=2",
        ]
    run([sys.executable, "-m", "gtpo_verl.train", *overrides], run_dir.with_suffix(".out"))


def curve(run_dir: Path) -> dict[str, Any]:
    """Steps at which the run was validated, with accuracy there and the responses generated until then."""
    lines, _ = read_metrics_from(run_dir, 0)
    data = {line["step"]: line["data"] for line in lines}
    generated, points = 0, []
    for step in sorted(data):
        groups = data[step].get("training/filter_groups/generated_groups", data[step].get("credit/groups", 0))
        generated += GROUP * groups
        if ACCURACY in data[step]:
            points.append({"step": step, "responses": generated, "accuracy": data[step][ACCURACY]})
    guide = [values["guide/rows_share"] for values in data.values() if "guide/rows_share" in values]
    rescued = [values["guide/rescued_groups"] for values in data.values() if "guide/rescued_groups" in values]
    return {
        "points": points,
        "rows_share": statistics.fmean(guide) if guide else 0.0,
        "rescued_groups_a_step": statistics.fmean(rescued) if rescued else 0.0,
        "groups_a_step": statistics.fmean(values.get("credit/groups", 0) for step, values in data.items() if step),
        "seconds_a_step": statistics.median(
            values["timing_s/step"] for values in data.values() if "timing_s/step" in values
        ),
    }


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    said = (
        f"Accuracy (%) of the policy on {result['problems']} problems, by seed; {100 * result['guide_accuracy']:.1f} % "
        f"of the guide's responses to the training's prompts are correct (`benchmarks/mixed_policy.py`, "
        f"{result['steps']} steps of 24 groups of {GROUP})."
    )
    heads = ("arm", "before", "halfway", "after", "responses generated", "groups a step", "guide's rows", "s a step")
    lines = [said, "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for arm, runs in result["runs"].items():
        curves = list(runs.values())
        steps = [[point["step"] for point in one["points"]] for one in curves]
        middle = [points[len(points) // 2] for points in steps]

        def cell(chosen: Sequence[int], curves: Sequence[dict[str, Any]] = curves) -> str:
            values = [
                next(point["accuracy"] for point in one["points"] if point["step"] == step)
                for one, step in zip(curves, chosen, strict=True)
            ]
            return ", ".join(f"{100 * value:.1f}" for value in values)

        mean = {key: statistics.fmean(one[key] for one in curves) for key in ("groups_a_step", "rows_share")}
        cells = (
            *(arm, cell([one[0] for one in steps]), cell(middle), cell([one[-1] for one in steps])),
            f"{statistics.fmean(one['points'][-1]['responses'] for one in curves):,.0f}",
            *(f"{mean['groups_a_step']:.1f}", f"{mean['rows_share']:.3f}"),
            f"{statistics.median(one['seconds_a_step'] for one in curves):.1f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def draw(result: dict[str, Any], file: Path) -> None:
    """Accuracy against generated responses: a line for each training, the median of an arm in bold."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for number, (arm, runs) in enumerate(result["runs"].items()):
        for index, one in enumerate(runs.values()):
            axes.plot(
                [point["responses"] for point in one["points"]],
                [100 * point["accuracy"] for point in one["points"]],
                color=f"C{number}",
                linestyle="--" if arm.endswith("server") else "-",
                marker="o",
                markersize=3,
                linewidth=1,
                label=None if index else arm,
            )
    axes.set(xlabel="responses generated for training", ylabel="accuracy on validation problems (%)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(file, dpi=140)
    plt.close(figure)


def written(output: Path, steps: int) -> dict[str, dict[str, Any]]:
    """The curves that the results have of trainings of so many steps, by arm and seed."""
    result = read_json(output) or {}
    return result.get("runs", {}) if result.get("steps") == steps else {}


def main() -> int:
    """Train what is missing, and write; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("outputs/mixed-policy"))
    parser.add_argument("--arms", default=",".join(ARMS), help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--output", type=Path, default=RESULTS / "mixed-policy.json")
    args = parser.parse_args()
    arms = args.arms.split(",")
    unknown = sorted(set(arms) - set(ARMS))
    if unknown:
        parser.error(f"no such arm: {', '.join(unknown)}; there are {', '.join(ARMS)}")
    set_thread_waiting()
    directory = args.dir.resolve()
    student = prepare_task(TASK, directory / "student", warm_start=STUDENT)
    guide = prepare_task(TASK, directory / "guide")
    traces = sampled(student, guide, directory)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn()) as progress:
        bar = progress.add_task("trainings", total=len(arms) * args.seeds)
        runs: dict[str, dict[str, Any]] = {arm: {} for arm in arms}
        for seed in range(args.seeds):
            for arm in arms:
                if str(seed) in written(args.output, args.steps).get(arm, {}):
                    progress.advance(bar)
                    continue
                run_dir = directory / f"{arm}-{seed}"
                train(arm, seed, args.steps, student, guide, traces, run_dir)
                runs[arm][str(seed)] = curve(run_dir)
                progress.advance(bar)
                # after each training, so that nothing is lost
                before = written(args.output, args.steps)
                result = {
                    "steps": args.steps,
                    "guide_accuracy": share_kept(traces),
                    "problems": student.manifest["sizes"]["validation"],
                    "versions": run_versions(),
                    "runs": {
                        arm: before.get(arm, {}) | runs.get(arm, {}) for arm in ARMS if before.get(arm) or runs.get(arm)
                    },
                }
                write_json(args.output, result)
                write_text(args.output.with_suffix(".md"), table(result))
                draw(result, args.output.with_suffix(".png"))
    print(args.output.with_suffix(".md").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
