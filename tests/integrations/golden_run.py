"""Three updates of a tiny model by verl's own FSDP actor, for every algorithm: losses and gradient norms, always the
same.

``python tests/integrations/golden_run.py OUT.json [packed]``; packed: without padding and with shared prompts, as a run
with a larger model. Model, prompts, responses and verdicts are drawn from seeds;
nothing is sampled, and Ray and vLLM have no part in it. Entropies and log-probs, advantages and updates are computed as
in a training (tests/e2e/replay_batch.py). ``golden_run.json`` beside this file is what it wrote; after a change that is
meant to change the numbers:

    .venv/bin/python tests/integrations/golden_run.py tests/integrations/golden_run.json
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # sums in one order

import torch
import torch.multiprocessing as mp
from omegaconf import DictConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
from replay_batch import run_rank

from gtpo_verl.config import compose_config, prepare
from gtpo_verl.integrations.launch import export_environment
from gtpo_verl.integrations.weights import fit_to_model
from gtpo_verl.tasks import model as tiny

ALGORITHMS = ("dapo", "gtpo", "grpo_s")
UPDATES = 3
PROMPTS, RESPONSES, LENGTH = 4, 6, 32


def recorded_batch(vocabulary: int) -> dict[str, Any]:
    """A batch as ``trainer.credit_dump_freq`` records it: groups of mixed verdicts, lengths from 1 to the limit."""
    draw = torch.Generator().manual_seed(2)
    rows = PROMPTS * RESPONSES
    lengths = torch.randint(1, LENGTH + 1, (rows,), generator=draw)
    lengths[0], lengths[1] = LENGTH, LENGTH - 2  # punished as overlong
    correct = torch.rand(rows, generator=draw) < 0.5
    correct[::RESPONSES], correct[1::RESPONSES] = True, False  # no group of one verdict
    prompts = [torch.randint(2, vocabulary, (5,), generator=draw) for _ in range(PROMPTS)]
    mask = torch.arange(LENGTH) < lengths[:, None]
    rewards = torch.zeros(rows, LENGTH)
    rewards[torch.arange(rows), lengths - 1] = 2.0 * correct - 1
    return {
        "keys": [f"{row // RESPONSES}_{row % RESPONSES}_0" for row in range(rows)],
        "prompts": [prompts[row // RESPONSES] for row in range(rows)],
        "responses": torch.randint(2, vocabulary, (rows, LENGTH), generator=draw) * mask,
        "response_mask": mask,
        "correct": correct,
        "rewards": rewards,
    }


def config_of(algorithm: str, model: Path, packed: bool = False) -> DictConfig:
    overrides = [
        *(f"algo={algorithm}", "setting=quickstart", "hardware=cpu", f"actor_rollout_ref.model.path={model}"),
        *(f"trainer.run_dir={model}", f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={RESPONSES}"),
        f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={RESPONSES}",
        # large enough that some of the second and third update is clipped, and not all of it
        "actor_rollout_ref.actor.optim.lr=0.0002",
    ]
    if packed:
        overrides += [
            *("actor_rollout_ref.model.use_remove_padding=true", "actor_rollout_ref.actor.use_dynamic_bsz=true"),
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=200",  # three micro-batches, the groups of two cut
            "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true",
            "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=200",
        ]
    config = compose_config(overrides)
    prepare(config, overrides)
    fit_to_model(config)
    return config


def main(out: Path, packed: bool) -> None:
    results = {}
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        tokenizer = tiny.build_tokenizer()
        policy = tiny.build_model(len(tokenizer), seed=0)
        with torch.no_grad():
            policy.lm_head.weight.mul_(3)  # entropies that differ from token to token
        tiny.save(policy, tokenizer, model)
        batch = recorded_batch(len(tokenizer))
        configs = {algorithm: config_of(algorithm, model, packed) for algorithm in ALGORITHMS}
        export_environment(configs["dapo"])
        os.environ["OMP_NUM_THREADS"] = "1"
        import verl.workers.engine_workers  # noqa: F401  (before the fork, so that it is paid for once)

        for algorithm, config in configs.items():
            part = Path(directory) / f"{algorithm}.pt"
            arguments = (1, config, batch, part, UPDATES)
            mp.start_processes(run_rank, arguments, nprocs=1, start_method="fork")
            found = torch.load(part)
            results[algorithm] = {
                "entropy": [found["entropy"][batch["response_mask"]].mean().item(), found["entropy"].norm().item()],
                "advantage_norm": found["advantages"].norm().item(),
                **{name: found["metrics"][name] for name in ("actor/pg_loss", "grad_norm", "actor/pg_clipfrac")},
            }
    out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), "packed" in sys.argv[2:])
