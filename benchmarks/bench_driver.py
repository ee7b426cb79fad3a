"""The driver's part of a step, ours against verl's own, on a real TransferQueue: ``bench_driver.py [--algo NAME...]``.

A batch is written to TransferQueue as agent loops and the actor's pass leave it, and the trainer of `gtpo-verl train`
does what it does with one on the driver: old log-probs, advantages, checks and metrics. Time inside verl's own methods
is verl's, but for our estimator in them; the rest is ours. The actor's pass stands in and counts for neither.

The default is a quarter of a step of the paper's size; ``--responses 8192 --tokens 50`` is the whole, in some 40 GB.
"""

import argparse
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from gtpo_verl.config import compose_config, prepare
from gtpo_verl.integrations.temporarily import temporarily
from gtpo_verl.integrations.trainer import trainer_class

GROUP, PROMPT = 16, 64  # responses of a prompt, tokens of a prompt
OF_VERL = ("_compute_old_log_prob", "_compute_advantage", "_compute_metrics")


def make_trainer(run_dir: Path, algo: str, length: int) -> Any:
    overrides = ["setting=quickstart", "hardware=cpu", f"algo={algo}", f"data.max_response_length={length}"]
    overrides += [f"trainer.run_dir={run_dir}", "trainer.test_freq=-1"]
    config = compose_config(overrides)
    for key in ("actor_rollout_ref.model.path", "data.train_files", "data.val_files"):
        OmegaConf.update(config, key, str(run_dir))
    prepare(config, overrides)
    OmegaConf.resolve(config)
    trainer: Any = trainer_class("sync")(config=config)
    trainer.global_steps, trainer.total_training_steps = 1, 10
    trainer.resource_pool_manager, trainer.tokenizer = SimpleNamespace(get_n_gpus=lambda: 1), None
    return trainer


def jagged(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def draw_lengths(responses: int, tokens: int, length: int, draw: torch.Generator) -> torch.Tensor:
    """Lengths with this sum, most of them far below the limit, and a few at it."""
    lengths = torch.empty(responses).exponential_(generator=draw)
    for _ in range(20):
        lengths = (lengths * (tokens / lengths.sum())).clamp(1, length)
    lengths[0] = length
    return lengths.long()


def put_batch(lengths: torch.Tensor, draw: torch.Generator) -> tuple[KVBatchMeta, TensorDict]:
    """Write a batch; returns it, and what an actor's pass over it writes."""
    count, tokens = len(lengths), int(lengths.sum())
    keys = [f"{row // GROUP:06d}_{row % GROUP}_0" for row in range(count)]
    correct = (torch.rand(count, generator=draw) < 0.4).tolist()

    def column(scale: float) -> torch.Tensor:
        return jagged(scale * torch.rand(tokens, generator=draw), lengths)

    rewards = torch.zeros(tokens)
    rewards[lengths.cumsum(0) - 1] = torch.tensor([2.0 * right - 1 for right in correct])
    ids = torch.ones(tokens, dtype=torch.int64)
    infos = [{"reward_extra_info": {"acc": float(right), "score": 2.0 * right - 1}} for right in correct]
    fields = {
        "uid": NonTensorStack(*[key.split("_")[0] for key in keys]),
        "prompts": jagged(torch.ones(count * PROMPT, dtype=torch.int64), torch.full((count,), PROMPT)),
        "responses": jagged(ids, lengths),
        "response_mask": jagged(ids, lengths),
        "rm_scores": jagged(rewards, lengths),
        "rollout_log_probs": column(-1.0),
        "rollout_entropies": column(2.0),
        "rollout_versions": jagged(torch.zeros(tokens, dtype=torch.int32), lengths),
        "num_turns": NonTensorStack(*[2] * count),
        "extra_fields": NonTensorStack(*infos),
    }
    tags = [
        {
            "global_steps": 1,
            "min_global_steps": 0,
            "max_global_steps": 0,
            "response_len": size,
            "seq_len": PROMPT + size,
        }
        for size in lengths.tolist()
    ]
    tq.kv_batch_put(keys=keys, partition_id="train", fields=TensorDict(fields, batch_size=count), tags=tags)
    whole = lengths + PROMPT
    size = int(whole.sum())
    actor = {
        "log_probs": jagged(-torch.rand(size, generator=draw), whole),
        "entropy": jagged(2 * torch.rand(size, generator=draw), whole),
    }
    return KVBatchMeta(partition_id="train", keys=keys, tags=tags), TensorDict(actor, batch_size=count)


class Clock:
    """Seconds of the innermost of the functions that it times, by the name given to them."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._open: list[str] = []
        self._since = time.perf_counter()

    def _charge(self) -> None:
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now

    @contextmanager
    def charged_to(self, name: str) -> Iterator[None]:
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def times(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.charged_to(name):
                return function(*args, **kwargs)

        return timed


def step(trainer: Any, lengths: torch.Tensor, seed: int) -> Counter[str]:
    """Do the driver's part of a step once; returns the seconds of ``ours``, of ``verl``, and of the ``actor``."""
    batch, actor = put_batch(lengths, torch.Generator().manual_seed(seed))
    clock = Clock()

    def actor_pass(batch: KVBatchMeta) -> KVBatchMeta:
        tq.kv_batch_put(keys=batch.keys, partition_id="train", fields=actor)
        return batch

    trainer.actor_rollout_wg = SimpleNamespace(compute_log_prob=clock.times(actor_pass, "actor"))
    stock = {name: getattr(PPOTrainer, name) for name in OF_VERL}
    find = core_algos.get_adv_estimator_fn
    metrics: dict[str, Any] = {}
    try:
        for name, method in stock.items():
            setattr(PPOTrainer, name, clock.times(method, "verl"))
        with (
            temporarily(core_algos, "get_adv_estimator_fn", lambda name: clock.times(find(name), "ours")),
            clock.charged_to("ours"),
        ):
            batch = trainer._compute_old_log_prob(batch, metrics)
            batch = trainer._compute_advantage(batch, metrics)
            trainer._compute_metrics(batch, metrics, {"step": 1.0, "gen": 1.0}, global_steps=1, epoch=0)
    finally:
        for name, method in stock.items():
            setattr(PPOTrainer, name, method)
        tq.kv_clear(keys=batch.keys, partition_id="train")
    assert metrics["credit/responses"] == len(lengths)
    return clock.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algo", nargs="+", default=["dapo", "gtpo"], help="presets")
    parser.add_argument("--responses", type=int, default=2048)
    parser.add_argument("--length", type=int, default=20480, help="tokens of the longest response")
    parser.add_argument("--tokens", type=float, default=12.0, help="millions of tokens in all")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    queue = compose_config(["hardware=cpu"]).transfer_queue
    queue.enable = True
    tq.init(queue)
    lengths = draw_lengths(
        options.responses, int(options.tokens * 1e6), options.length, torch.Generator().manual_seed(0)
    )
    print(
        f"{options.responses} x {int(lengths.max())}, {int(lengths.sum()):,} tokens, {torch.get_num_threads()} threads"
    )
    with tempfile.TemporaryDirectory() as directory:
        for algo in options.algo:
            trainer = make_trainer(Path(directory) / algo, algo, options.length)
            runs = [step(trainer, lengths, seed) for seed in range(options.repeat)]
            ours, verl = ([run[name] for run in runs] for name in ("ours", "verl"))
            ratio = statistics.median(mine / theirs for mine, theirs in zip(ours, verl, strict=True))
            print(
                f"{algo}: ours {statistics.median(ours):.1f} s, verl's {statistics.median(verl):.1f} s, "
                f"ratio {ratio:.2f} (median of {options.repeat})"
            )
    tq.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
