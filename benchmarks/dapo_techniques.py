"""Effect of each DAPO technique in a real training: the six rows of Table 1, and carry-over, on the quickstart's task.

    python benchmarks/dapo_techniques.py --parts ladder carry-over

`ladder` trains every row of DAPO's Table 1 (`algo=ladder/...`) for some steps, through `gtpo-verl train`, with a limit
of 24 tokens so that some responses are truncated, and reports the numbers in which a technique shows. One update per
step, so that the loss is that of the batch itself; the two rows that clip-higher separates are trained again with four
updates per step, where ratios differ from 1. `carry-over` trains DAPO to the same number of batches with and without
`algorithm.filter_groups.carry_over`, on prompts of which a third can be answered, a third never and a third always, and
reports the groups that had to be generated. Writes `dapo-techniques.json` and `.md` into benchmarks/results. Takes
about 25 minutes on two cores.

Complete trainings are not repeated: the command resumes after Ctrl-C.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from gtpo_verl.config import choices
from gtpo_verl.runs.directory import read_metrics_from, read_record
from gtpo_verl.runs.provenance import hardware, run_versions
from gtpo_verl.tasks import Task
from gtpo_verl.tasks import task as embedded_task
from gtpo_verl.tasks.prepare import prepare_task

RESULTS = Path(__file__).parent / "results"
STEPS = 3
CARRY_OVER_STEPS = 10
OFF_POLICY = ("2_overlong_filtering", "3_clip_higher")  # the rows that clip-higher sets apart

# A third of the prompts is beyond the model and a third beneath it, whatever it writes; the others are judged.
REWARD = """
from gtpo_verl.tasks.sums.reward import compute_score as judge

def thirds(data_source, solution_str, ground_truth, extra_info=None, **settings):
    third = sum(map(ord, extra_info["question"])) % 3
    if third == 0:
        return judge(data_source, solution_str, ground_truth, extra_info, **settings)
    return {"score": 1.0 if third == 1 else -1.0, "acc": float(third == 1), "pred": ""}
"""


def train(task: Task, run_dir: Path, *overrides: str) -> Path:
    """Run one training in its own process, unless it is complete already."""
    record = read_record(run_dir)
    if record and record["status"] == "complete":
        return run_dir
    run_dir.mkdir(parents=True, exist_ok=True)
    command = [
        *(sys.executable, "-m", "gtpo_verl.train", "setting=quickstart", "hardware=cpu"),
        f"actor_rollout_ref.model.path={task.model_path}",
        f"data.train_files={task.train_file}",
        f"data.val_files={task.val_file}",
        f"trainer.run_dir={run_dir}",
        *("trainer.val_before_train=False", "trainer.test_freq=-1", "trainer.save_freq=-1"),
        *overrides,
    ]
    with (run_dir / "train.log").open("w") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode
    if code:
        raise SystemExit(f"the training in {run_dir} failed: see {run_dir / 'train.log'}")
    return run_dir


def steps_of(run_dir: Path) -> list[dict[str, float]]:
    lines, _ = read_metrics_from(run_dir, 0)
    return [line["data"] for line in lines if line["step"] > 0]


def mean(values: Iterable[float]) -> float:
    return statistics.mean(list(values))


def row_figures(run_dir: Path) -> dict[str, float]:
    """The numbers of one row in which the techniques differ."""
    steps = steps_of(run_dir)
    batches = [torch.load(run_dir / "credit" / f"{number}.pt") for number in range(1, len(steps) + 1)]
    seq_mean, token_mean = [], []
    for batch in batches:
        advantages, mask = batch["advantages"].double(), batch["response_mask"]
        token_mean.append(-(advantages * mask).sum().item() / mask.sum().item())
        seq_mean.append(-((advantages * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean().item())
    losses = [step["actor/pg_loss"] for step in steps]
    return {
        "truncated share": mean(step["response_length/truncated_share"] for step in steps),
        "left out of the loss": mean(step.get("training/overlong_filtered_share", 0.0) for step in steps),
        "lowest score": min(step["critic/score/min"] for step in steps),
        "loss − token mean": max(abs(a - b) for a, b in zip(losses, token_mean, strict=True)),
        "loss − sequence mean": max(abs(a - b) for a, b in zip(losses, seq_mean, strict=True)),
        "groups without contrast": mean(step["credit/degenerate_share"] for step in steps),
        "clip fraction": mean(step["actor/pg_clipfrac"] for step in steps),
    }


def ladder(task: Task, runs: Path) -> dict[str, Any]:
    names = choices("algo.ladder")
    common = ("data.max_response_length=24", f"trainer.total_training_steps={STEPS}", "trainer.credit_dump_freq=1")
    several = (
        *("actor_rollout_ref.actor.ppo_mini_batch_size=6", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=48"),
        "actor_rollout_ref.actor.optim.lr=2e-3",  # ratios go far enough for the wider range to be seen
    )
    result: dict[str, Any] = {"rows": {}, "several updates a step": {}}
    for name in track(names, description="ladder"):
        result["rows"][name] = row_figures(train(task, runs / f"ladder-{name}", f"algo=ladder/{name}", *common))
    for name in track(OFF_POLICY, description="clip-higher"):
        run_dir = train(task, runs / f"several-{name}", f"algo=ladder/{name}", *common, *several)
        steps = steps_of(run_dir)
        result["several updates a step"][name] = {"clip fraction": mean(step["actor/pg_clipfrac"] for step in steps)}
    return result


def carry_over(task: Task, runs: Path) -> dict[str, Any]:
    reward = runs / "thirds.py"
    reward.write_text(REWARD)
    result: dict[str, Any] = {"steps": CARRY_OVER_STEPS}
    for age in track((0, 2), description="carry-over"):
        run_dir = train(
            task,
            runs / f"carry-over-{age}",
            *("algo=dapo", f"algorithm.filter_groups.carry_over.max_age={age}"),
            *("data.train_batch_size=12", "actor_rollout_ref.actor.ppo_mini_batch_size=12"),
            *(f"reward.custom_reward_function.path={reward}", "reward.custom_reward_function.name=thirds"),
            f"trainer.total_training_steps={CARRY_OVER_STEPS}",
        )
        steps = steps_of(run_dir)
        groups = [json.loads(line)["groups"] for line in (run_dir / "groups.jsonl").read_text().splitlines()]
        uids = [uid for step in groups for uid in step]
        result[f"max_age={age}"] = {
            "trained batches": len(steps),
            "trained groups": len(uids),
            "groups trained on twice": len(uids) - len(set(uids)),
            "generated groups": int(sum(step["training/filter_groups/generated_groups"] for step in steps)),
            "thrown away": int(
                sum(
                    step["training/filter_groups/discarded_surplus_groups"]
                    + step["training/filter_groups/expired_groups"]
                    for step in steps
                )
            ),
            "left at the end": int(steps[-1]["training/filter_groups/carried_over_groups"]),
            "yield": mean(
                step["training/filter_groups/yield"] for step in steps if "training/filter_groups/yield" in step
            ),
        }
    result["ratio"] = result["max_age=2"]["generated groups"] / result["max_age=0"]["generated groups"]
    return result


def table(rows: dict[str, dict[str, Any]]) -> str:
    names = list(next(iter(rows.values())))
    lines = ["| | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for row, figures in rows.items():
        cells = [f"{value:.3g}" if isinstance(value, float) else str(value) for value in figures.values()]
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=["ladder", "carry-over"], default=["ladder", "carry-over"])
    parser.add_argument("--runs", type=Path, default=Path("outputs/dapo-techniques"), help="where trainings are kept")
    options = parser.parse_args()
    runs = options.runs.resolve()
    runs.mkdir(parents=True, exist_ok=True)
    task = prepare_task(embedded_task("sums"), runs / "task")
    file = RESULTS / "dapo-techniques.json"
    result: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    try:
        if "ladder" in options.parts:
            result["ladder"] = ladder(task, runs)
        if "carry-over" in options.parts:
            result["carry-over"] = carry_over(task, runs)
    except KeyboardInterrupt:
        print("Stopped; the same command resumes.", file=sys.stderr)
        return 130
    result |= {"hardware": hardware(), "versions": run_versions()}
    file.write_text(json.dumps(result, indent=1) + "\n")
    parts = [f"# DAPO's techniques in real trainings\n\n{result['hardware']}."]
    if "ladder" in result:
        parts += [f"## Rows of Table 1, {STEPS} steps each", table(result["ladder"]["rows"])]
        parts += ["Four updates a step:", table(result["ladder"]["several updates a step"])]
    if "carry-over" in result:
        found = result["carry-over"]
        parts += [
            f"## Groups carried over, {found['steps']} steps",
            table({k: v for k, v in found.items() if "=" in k}),
        ]
        parts += [f"Groups generated with carry-over / without: {found['ratio']:.3f}"]
    (RESULTS / "dapo-techniques.md").write_text("\n\n".join(parts) + "\n")
    print("\n\n".join(parts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
