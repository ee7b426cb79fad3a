"""Replays a step that a run recorded, on one rank and on two, without Ray: ``python replay_batch.py RUN_DIR STEP
OUT.pt``.

verl's own workers do the work, in processes joined by gloo: the pass before the update, then, from its entropies and
log-probs, the advantages on rank 0, as the trainer computes them, then updates over the whole batch: in the first all
ratios are 1.
"""

import copy
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from omegaconf import DictConfig, OmegaConf

from gtpo_verl.integrations.launch import export_environment
from gtpo_verl.integrations.weights import fit_to_model


def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def columns(recorded: dict[str, Any], rows: range) -> Any:
    """Rows of the recorded batch as verl's workers get them from TransferQueue."""
    from tensordict import TensorDict

    prompts = [recorded["prompts"][row] for row in rows]
    lengths = [
        max(int(recorded["response_mask"][row].sum()), 1) for row in rows
    ]  # a filler row keeps one token, masked
    responses = [recorded["responses"][row, :length].long() for row, length in zip(rows, lengths, strict=True)]
    masks = [recorded["response_mask"][row, :length].long() for row, length in zip(rows, lengths, strict=True)]
    inputs = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    return TensorDict(
        {
            "prompts": jagged(prompts),
            "responses": jagged(responses),
            "response_mask": jagged(masks),
            "loss_mask": jagged(masks),
            "input_ids": jagged(inputs),
            "position_ids": jagged([torch.arange(len(row)) for row in inputs]),
        },
        batch_size=[len(rows)],
    )


def advantages(config: DictConfig, recorded: dict[str, Any], entropy: torch.Tensor) -> torch.Tensor:
    """(B, T): verl's registered estimator on the replayed entropies (B, T), with the recorded verdicts."""
    import numpy as np
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    from gtpo_verl.algorithms import Batch
    from gtpo_verl.integrations.context import CreditContext, credit_context, overlong
    from gtpo_verl.integrations.estimators import group_ids

    names = np.array([key.rsplit("_", 2)[0] for key in recorded["keys"]], dtype=object)
    batch = Batch(recorded["response_mask"], group_ids(names), recorded["correct"], entropy=entropy.double())
    context = CreditContext(batch, overlong(config))
    with credit_context(context):
        values, _ = get_adv_estimator_fn(config.algorithm.adv_estimator)(
            token_level_rewards=recorded["rewards"],
            response_mask=recorded["response_mask"],
            config=config.algorithm,
            index=names,
        )
    return values


def gathered(part: torch.Tensor, width: int) -> torch.Tensor:
    """(B, T) from the jagged rows of all ranks, padded with zeros."""
    padded = torch.nested.to_padded_tensor(part, 0.0, output_size=(part.shape[0], width)).contiguous()
    parts = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, padded)
    return torch.cat(parts)


def run_rank(rank: int, ranks: int, config: DictConfig, recorded: dict[str, Any], out: Path, updates: int = 2) -> None:
    """One rank's part of a replay; rank 0 saves entropies, old log-probs, advantages and, for each update, metrics to
    ``out``.
    """
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        **meeting_in(Path(f"{out}.ranks").absolute()),
    }
    from verl.utils import tensordict_utils as tu
    from verl.workers.engine_workers import ActorRolloutRefWorker
    from verl.workers.utils.padding import response_from_nested

    from gtpo_verl.integrations.cpu_platform import for_cpu

    worker = for_cpu(ActorRolloutRefWorker)(config=copy.deepcopy(config.actor_rollout_ref), role="actor")
    worker.init_model()
    count, width = recorded["response_mask"].shape
    rows = range(count)[rank * count // ranks : (rank + 1) * count // ranks]
    temperature = config.actor_rollout_ref.rollout.temperature

    data = columns(recorded, rows)
    tu.assign_non_tensor(data, calculate_entropy=True, compute_loss=False, temperature=temperature)
    output = worker.compute_log_prob(data)
    entropy, old = (
        gathered(response_from_nested(output[name], data["response_mask"]), width) for name in ("entropy", "log_probs")
    )
    entropy, old = entropy * recorded["response_mask"], old * recorded["response_mask"]
    values = advantages(config, recorded, entropy)

    data = columns(recorded, rows)
    lengths = data["responses"].offsets().diff().tolist()
    for name, column in (("old_log_probs", old), ("advantages", values)):
        data[name] = jagged([column[row, :length].float() for row, length in zip(rows, lengths, strict=True)])
    tu.assign_non_tensor(
        data,
        calculate_entropy=False,
        distillation_use_topk=False,
        distillation_only=False,
        global_batch_size=count,
        mini_batch_size=count,
        epochs=updates,
        seed=0,
        dataloader_kwargs={"shuffle": False},
        temperature=temperature,
    )
    metrics = tu.get(worker.update_actor(data), "metrics")
    if rank == 0:
        numbers = {name: [float(value) for value in values] for name, values in metrics.items() if name in KEPT}
        torch.save({"entropy": entropy, "old_log_probs": old, "advantages": values, "metrics": numbers}, out)
    dist.barrier()
    dist.destroy_process_group()


KEPT = ("loss", "grad_norm", "actor/pg_loss", "actor/pg_clipfrac", "actor/ppo_kl")


def meeting_in(file: Path) -> dict[str, str]:
    """The environment of verl's workers that meet in a new file: a free port may be taken before they open it."""
    return {"DIST_INIT_METHOD": f"file://{file}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def main(run_dir: Path, step: str, out: Path) -> None:
    config = OmegaConf.load(run_dir / "config.yaml")
    assert isinstance(config, DictConfig)
    export_environment(config)
    fit_to_model(config)
    recorded = torch.load(run_dir / "credit" / f"{step}.pt")
    import verl.workers.engine_workers  # noqa: F401  (before the fork, so that it is paid for once)

    results = {}
    for ranks in (1, 2):
        part = out.with_suffix(f".{ranks}")
        mp.start_processes(run_rank, (ranks, config, recorded, part), nprocs=ranks, start_method="fork")
        results[ranks] = torch.load(part)
    torch.save(results, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
