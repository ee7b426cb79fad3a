"""Groups generated per group trained on: verl's replay buffer, ours, and ours with carry-over, on the same prompts.

The buffers are the real ones. TransferQueue and the engines are simulated by a dictionary and a clock: a prompt takes
a log-normal time (median 1, σ 0.6, the spread of response lengths) independent of load, and has signal with a fixed
probability. The times show how often a step waits for another round of generation, in units of a median response; they
say nothing about a loaded engine.

    python benchmarks/bench_dynamic_sampling.py

Takes about a minute and writes `dynamic-sampling.json` and `.md` into benchmarks/results.
"""

import itertools
import json
import logging
import random
from pathlib import Path
from typing import Any

import transfer_queue as tq
from omegaconf import OmegaConf
from rich.progress import track
from verl.trainer.ppo.v1 import replay_buffer
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from gtpo_verl.integrations.sampling import BudgetedReplayBuffer

RESULTS = Path(__file__).parent / "results"
STEPS, RUNS = 40, 2
BATCHES, YIELDS, WINDOWS = (24, 64), (0.3, 0.5, 0.8), (1, 2, 4)
ARMS = ("verl", "ours", "carry-over")
POLL = 0.1  # in median responses


class Queue:
    """The calls of TransferQueue that a replay buffer makes, in memory."""

    def __init__(self) -> None:
        self.tags: dict[str, dict[str, Any]] = {}
        self.verdicts: dict[str, float] = {}

    def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, Any]]:
        return {"train": {key: dict(tag) for key, tag in self.tags.items()}}

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> dict[str, list[Any]]:
        return {"extra_fields": [{"reward_extra_info": {"acc": self.verdicts[key]}} for key in keys]}

    def kv_clear(self, keys: list[str], partition_id: str) -> None:
        for key in keys:
            self.tags.pop(key, None)
            self.verdicts.pop(key, None)


class Engines:
    """Answers prompts in simulated time; the stream of verdicts is the same for every arm."""

    def __init__(self, queue: Queue, share: float, seed: int) -> None:
        self.queue = queue
        self.share = share
        self.times, self.data = random.Random(seed), random.Random(seed + 1000)
        self.running: list[tuple[float, str, tuple[float, float]]] = []
        self.clock, self.step, self.submitted = 0.0, 0, 0

    def submit(self, count: int) -> int:
        for _ in range(count):
            uid, self.submitted = f"prompt{self.submitted}", self.submitted + 1
            uniform = float(self.data.random() < 0.5)
            verdicts = (1.0, 0.0) if self.data.random() < self.share else (uniform, uniform)
            self.queue.tags[uid] = {"is_prompt": True, "status": "running", "global_steps": self.step}
            self.running.append((self.clock + self.times.lognormvariate(0, 0.6), uid, verdicts))
        return count

    def wait(self, partition_id: str, last_debug_time: float) -> float:
        self.clock += POLL
        for ended in [item for item in self.running if item[0] <= self.clock]:
            self.running.remove(ended)
            _, uid, verdicts = ended
            for session, verdict in enumerate(verdicts):
                self.queue.tags[f"{uid}_{session}_0"] = {"global_steps": self.step}
                self.queue.verdicts[f"{uid}_{session}_0"] = verdict
            self.queue.tags[uid]["status"] = "finished"
        return last_debug_time


def simulate(arm: str, batch_size: int, share: float, window: int, seed: int) -> dict[str, float]:
    """Run ``STEPS`` steps of one arm; returns groups generated and trained on, time, and the share of groups carried
    over."""
    queue = Queue()
    for name in ("kv_list", "kv_batch_get", "kv_clear"):
        setattr(tq, name, getattr(queue, name))
    engines = Engines(queue, share, seed)
    buffer = ReplayBuffer(
        trainer_mode="sync",
        trainer_config=OmegaConf.create({}),
        max_off_policy_threshold=None,
        max_off_policy_strategy="drop",
        sampler_kwargs=OmegaConf.create({}),
        refill_fn=engines.submit,
        filter_groups_metric="acc",
        train_batch_size=batch_size,
        gen_batch_size=1,
        max_inflight_gen_batches=window,
    )
    if arm != "verl":
        carry_over = {"max_age": int(arm == "carry-over")}
        limits = {"max_num_gen_batches": 0, "on_budget": "train_smaller", "carry_over": carry_over}
        config = {
            "algorithm": {"filter_groups": limits, "correct_threshold": 1.0},
            "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": batch_size}, "rollout": {"n": 2}},
            "guards": {"max_failed_share": 1.0},
        }
        buffer = BudgetedReplayBuffer(buffer, OmegaConf.create(config))
    buffer._wait_for_next_poll = engines.wait  # type: ignore[method-assign]
    trained: set[str] = set()
    carried = 0.0
    for step in range(1, STEPS + 1):
        engines.step = step
        ours = isinstance(buffer, BudgetedReplayBuffer)
        engines.submit(buffer.begin_step(step, batch_size) if ours else batch_size)
        batch, metrics = buffer.sample(global_steps=step, partition_id="train", batch_size=batch_size)
        uids = {key.split("_")[0] for key in batch.keys}
        assert trained.isdisjoint(uids)
        assert len(uids) == batch_size
        trained |= uids
        carried += metrics.get("training/filter_groups/carried_share", 0.0)
        queue.kv_clear(batch.keys, "train")
    return {
        "generated": engines.submitted,
        "trained": len(trained),
        "time": engines.clock / STEPS,
        "carried_share": carried / STEPS,
    }


def main() -> None:
    logging.disable(logging.WARNING)
    replay_buffer.logger.setLevel(logging.ERROR)
    rows = []
    cells = list(itertools.product(BATCHES, YIELDS, WINDOWS))
    for batch_size, share, window in track(cells, description="sampling"):
        row: dict[str, Any] = {"batch": batch_size, "yield": share, "window": window}
        for arm in ARMS:
            runs = [simulate(arm, batch_size, share, window, seed) for seed in range(RUNS)]
            row[arm] = {
                "generated_per_trained": sum(run["generated"] for run in runs) / sum(run["trained"] for run in runs),
                "time_per_step": sum(run["time"] for run in runs) / RUNS,
                "carried_share": sum(run["carried_share"] for run in runs) / RUNS,
            }
        rows.append(row)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "dynamic-sampling.json").write_text(json.dumps({"steps": STEPS, "runs": RUNS, "rows": rows}, indent=2))
    lines = [
        (
            "| batch | yield | window | least possible | verl | ours | with carry-over | carried share "
            "| time of a step: verl | ours | with carry-over |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        generated = " | ".join(f"{row[arm]['generated_per_trained']:.2f}" for arm in ARMS)
        times = " | ".join(f"{row[arm]['time_per_step']:.1f}" for arm in ARMS)
        lines.append(
            f"| {row['batch']} | {row['yield']} | {row['window']} | {1 / row['yield']:.2f} | {generated} | "
            f"{row['carry-over']['carried_share']:.2f} | {times} |"
        )
    table = "\n".join(lines)
    (RESULTS / "dynamic-sampling.md").write_text(
        f"Groups generated for each group trained on; {STEPS} steps, {RUNS} streams of prompts, simulated engines "
        f"(`benchmarks/bench_dynamic_sampling.py`). Time in median responses.\n\n{table}\n"
    )
    print(table)


if __name__ == "__main__":
    main()
