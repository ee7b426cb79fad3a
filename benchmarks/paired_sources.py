"""Training on vLLM's entropies against the actor's: accuracy and time, on pairs of short trainings equal in all else.

    python benchmarks/paired_sources.py --pairs 10

Each pair trains GTPO twice with one seed on the quickstart's task, through `gtpo-verl train`, with
algorithm.entropy.source=rollout and =actor, in alternating order. Both draw their responses with the same random
numbers, so a pair samples the same tokens until rounding changes one. Reported are paired differences, rollout minus
actor, with Student's 95 % interval over the pairs: validation accuracy after the last step, accuracy and credit on the
training responses of the last half, seconds of a step; and the spread between seeds, to which a difference has to be
compared. Writes `paired-sources.json` and `paired-sources.png` into benchmarks/results.

Complete trainings are not repeated: the command resumes after Ctrl-C, and more pairs can be added later.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gtpo_verl.evaluation.paired import student_interval
from gtpo_verl.runs.directory import read_metrics_from, read_record
from gtpo_verl.runs.provenance import hardware, run_versions
from gtpo_verl.tasks import Task
from gtpo_verl.tasks import task as embedded_task
from gtpo_verl.tasks.prepare import prepare_task

RESULTS = Path(__file__).parent / "results"
SOURCES = ("rollout", "actor")
WARM_UP = 2  # steps whose times are left out; source=rollout checks itself against the actor in them
# what is compared: name in the result, name in metrics.jsonl, and over which steps
TRAINING = {
    "training accuracy": "training/accuracy",
    "entropy": "credit/entropy_all",
    "spread of credit in a response": "credit/advantage_spread",
    "sign flips, correct": "credit/sign_flip_correct",
}
TIMES = {
    "seconds a step": "timing_s/step",
    "seconds of old log-probs": "timing_s/old_log_prob",
    "seconds of generation": "timing_s/gen",
}


def train(task: Task, run_dir: Path, source: str, seed: int, steps: int) -> None:
    """Run one training in its own process, unless it is complete already."""
    record = read_record(run_dir)
    if record and record["status"] == "complete":
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    command = [
        *(sys.executable, "-m", "gtpo_verl.train", "algo=gtpo", "setting=quickstart", "hardware=cpu"),
        f"actor_rollout_ref.model.path={task.model_path}",
        f"data.train_files={task.train_file}",
        f"data.val_files={task.val_file}",
        f"trainer.run_dir={run_dir}",
        f"algorithm.entropy.source={source}",
        # two updates a step: in the first all ratios are 1, whatever the old log-probs
        *("actor_rollout_ref.actor.ppo_mini_batch_size=12", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=48"),
        f"seed={seed}",
        f"trainer.total_training_steps={steps}",
        f"trainer.test_freq={steps}",
        *("trainer.val_before_train=False", "trainer.save_freq=-1", "trainer.credit_dump_freq=1"),
    ]
    with (run_dir / "train.log").open("a") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)  # saves a checkpoint, from which the next call goes on
            process.wait()
            raise
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if code:
        raise SystemExit(f"the training in {run_dir} failed: see {run_dir / 'train.log'}")


def figures(run_dir: Path, steps: int) -> dict[str, float]:
    """The compared quantities of one training."""
    lines, _ = read_metrics_from(run_dir, 0)
    data = {line["step"]: line["data"] for line in lines}
    validation = next(
        value for name, value in data[steps].items() if name.startswith("val-core/") and "/acc/mean@" in name
    )
    last_half = range(steps // 2 + 1, steps + 1)
    timed = range(WARM_UP + 1, steps + 1)
    return (
        {"validation accuracy": validation}
        | {name: statistics.mean(data[step][key] for step in last_half) for name, key in TRAINING.items()}
        | {name: statistics.median(data[step][key] for step in timed) for name, key in TIMES.items()}
    )


def responses(run_dir: Path, step: int) -> Counter[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The (prompt, response) pairs that a step trained on."""
    import torch  # not before OMP_WAIT_POLICY is set, see main

    batch = torch.load(run_dir / "credit" / f"{step}.pt", weights_only=False)
    rows = zip(batch["prompts"], batch["responses"], batch["response_mask"], strict=True)
    return Counter((tuple(prompt.tolist()), tuple(tokens[mask].tolist())) for prompt, tokens, mask in rows)


def in_common(first: Path, second: Path, steps: int) -> list[float]:
    """Share of responses that two trainings have in common, per step."""
    shares = []
    for step in range(1, steps + 1):
        ours, theirs = responses(first, step), responses(second, step)
        shares.append((ours & theirs).total() / max(ours.total(), theirs.total()))
    return shares


def paired(differences: Sequence[float]) -> dict[str, float]:
    """Mean of paired differences, with a 95 % interval if there is more than one pair."""
    mean = statistics.mean(differences)
    result = {"difference": mean}
    interval = student_interval(differences)
    return result | {"low": interval.low, "high": interval.high} if interval else result


def summarise(pairs: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """The result: mean of each quantity by source, its paired difference, and the pairs."""
    compared = {}
    for name in pairs[0]["actor"]:
        values = {source: [pair[source][name] for pair in pairs] for source in SOURCES}
        compared[name] = {source: statistics.mean(values[source]) for source in SOURCES}
        compared[name] |= paired([r - a for r, a in zip(values["rollout"], values["actor"], strict=True)])
        if len(pairs) > 1:
            compared[name]["spread of seeds"] = statistics.mean(statistics.stdev(values[source]) for source in SOURCES)
    setting = {"algorithm": "gtpo", "task": "quickstart", "steps": steps, "pairs": len(pairs)}
    return {
        "compared": compared,
        "responses in common": [
            statistics.mean(each) for each in zip(*(pair["in common"] for pair in pairs), strict=True)
        ],
        "setting": setting,
        "hardware": hardware(),
        "versions": run_versions(),
        "pairs": pairs,
    }


def draw(result: dict[str, Any], path: Path) -> None:
    """Two panels: accuracy of every pair, and the time of a step by phase."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    accuracy, seconds = figure.subplots(1, 2)
    for pair in result["pairs"]:
        ends = [pair[source]["validation accuracy"] for source in ("actor", "rollout")]
        accuracy.plot([0, 1], ends, color="#6a7282", marker="o", linewidth=1)
    difference = result["compared"]["validation accuracy"]
    interval = f" ({difference['low']:+.3f} to {difference['high']:+.3f})" if "low" in difference else ""
    accuracy.set_title(f"rollout − actor: {difference['difference']:+.3f}{interval}", fontsize=9)
    accuracy.set_xticks([0, 1], ["actor's", "rollout's"])
    accuracy.set_xlim(-0.3, 1.3)
    accuracy.set_ylabel("validation accuracy")
    bottom = [0.0, 0.0]
    parts = {"generation": "seconds of generation", "old log-probs": "seconds of old log-probs", "the rest": ""}
    for (label, name), colour in zip(parts.items(), ("#0072b2", "#e69f00", "#b8c0cc"), strict=True):
        step = [result["compared"]["seconds a step"][source] for source in ("actor", "rollout")]
        heights = [result["compared"][name][source] for source in ("actor", "rollout")] if name else None
        heights = heights or [whole - below for whole, below in zip(step, bottom, strict=True)]
        seconds.bar([0, 1], heights, bottom=bottom, width=0.5, color=colour, label=label)
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    seconds.set_xticks([0, 1], ["actor's", "rollout's"])
    seconds.set_ylabel("seconds a step")
    seconds.set_xlim(-0.5, 2.4)  # room for the legend
    seconds.legend(frameon=False, fontsize=8, loc="center right")
    for panel in (accuracy, seconds):
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=160)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return round(value, 5) if isinstance(value, float) else value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10, help="pairs of trainings (default 10)")
    parser.add_argument("--steps", type=int, default=12, help="steps of a training (default 12)")
    parser.add_argument("--runs", type=Path, default=Path("outputs/paired-sources"), help="where trainings are kept")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where result and figure go")
    options = parser.parse_args()
    if options.pairs < 1:
        parser.error(f"--pairs {options.pairs}: at least 1")
    if options.steps <= WARM_UP:
        parser.error(f"--steps {options.steps}: more than {WARM_UP}, whose times are left out")

    os.environ.setdefault(
        "OMP_WAIT_POLICY", "PASSIVE"
    )  # read when torch is first imported; spinning threads starve the rest
    task = prepare_task(embedded_task("sums"), options.runs / "task")
    pairs = []
    columns = (
        *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()),
        *(TextColumn("left"), TimeRemainingColumn()),
    )
    try:
        with Progress(*columns) as progress:
            bar = progress.add_task("trainings", total=2 * options.pairs)
            for seed in range(options.pairs):
                pair: dict[str, Any] = {}
                dirs = []
                for source in SOURCES if seed % 2 == 0 else reversed(SOURCES):
                    progress.update(bar, description=f"seed {seed}, entropies of the {source}")
                    run_dir = (options.runs / f"steps-{options.steps}" / f"seed-{seed}-{source}").resolve()
                    train(task, run_dir, source, seed, options.steps)
                    dirs.append(run_dir)
                    pair[source] = figures(run_dir, options.steps)
                    progress.advance(bar)
                pair["in common"] = in_common(*dirs, steps=options.steps)
                pairs.append(pair)
                result = summarise(pairs, options.steps)
                options.results.mkdir(parents=True, exist_ok=True)
                (options.results / "paired-sources.json").write_text(json.dumps(_rounded(result), indent=1) + "\n")
                draw(result, options.results / "paired-sources.png")
    except KeyboardInterrupt:
        print(f"Stopped after {len(pairs)} pairs; the same command resumes.", file=sys.stderr)
        return 130
    for name, row in result["compared"].items():
        interval = f" ({row['low']:+.4f} to {row['high']:+.4f})" if "low" in row else ""
        spread = f"; between seeds {row['spread of seeds']:.4f}" if "spread of seeds" in row else ""
        values = f"rollout {row['rollout']:.4f}, actor {row['actor']:.4f}, difference {row['difference']:+.4f}"
        print(f"{name}: {values}{interval}{spread}")
    print("responses in common, per step:", " ".join(f"{share:.3f}" for share in result["responses in common"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
