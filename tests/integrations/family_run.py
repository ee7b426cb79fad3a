"""Every registered method through verl's advantage step and an update of verl's FSDP actor, in one process, without
Ray and vLLM: ``python tests/integrations/family_run.py OUT.pt``.

Model and batch are drawn from seeds, as for the golden run; here one group has no contrast. For each method: the pass
before the update, advantages, and one update at ratios of 1; for the first method of each loss also the log-probs after
it and another update. Methods with a guide are updated once more, with every third row the guide's.
"""

import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
from golden_run import RESPONSES, config_of, recorded_batch
from replay_batch import columns, gathered, jagged, meeting_in

from gtpo_verl.algorithms import Batch, algorithms, soft_overlong_penalty
from gtpo_verl.integrations.launch import export_environment
from gtpo_verl.tasks import model as tiny

PRESETS = Path(__file__).parents[2] / "configs" / "algo"
SEED = 5
METRICS = ("actor/pg_loss", "grad_norm", "actor/pg_clipfrac")


def batch_with_a_group_of_one_verdict(vocabulary: int) -> dict[str, Any]:
    batch = recorded_batch(vocabulary)
    batch["correct"][-RESPONSES:] = False
    batch["rewards"][-RESPONSES:] = -batch["rewards"][-RESPONSES:].abs()
    return batch


def with_preset(dapo: DictConfig, name: str, model: Path) -> DictConfig:
    """The run with another method: its preset over DAPO's, which is what a composition gives (tests/test_config.py)."""
    preset = OmegaConf.load(PRESETS / f"{name}.yaml")
    if "defaults" in preset:
        return config_of(name, model)
    OmegaConf.set_struct(dapo, False)
    merged = OmegaConf.merge(dapo, preset)
    assert isinstance(merged, DictConfig)
    return merged


class Actor:
    """verl's worker of the actor and the batch that it is updated on."""

    def __init__(self, config: DictConfig, batch: dict[str, Any]) -> None:
        from verl.workers.engine_workers import ActorRolloutRefWorker

        from gtpo_verl.integrations.cpu_platform import for_cpu

        self.worker = for_cpu(ActorRolloutRefWorker)(config=config.actor_rollout_ref, role="actor")
        self.worker.init_model()
        self.batch = batch
        self.rows = range(len(batch["keys"]))
        self.temperature = config.actor_rollout_ref.rollout.temperature

    def use_loss_of(self, config: DictConfig) -> None:
        from verl.utils.config import omega_conf_to_dataclass
        from verl.workers.utils.losses import ppo_loss

        self.worker.set_loss_fn(partial(ppo_loss, config=omega_conf_to_dataclass(config.actor_rollout_ref.actor)))

    def measured(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Entropies and log-probs (B, T) of the current weights."""
        from verl.utils import tensordict_utils as tu
        from verl.workers.utils.padding import response_from_nested

        data = columns(self.batch, self.rows)
        tu.assign_non_tensor(data, calculate_entropy=True, compute_loss=False, temperature=self.temperature)
        output = self.worker.compute_log_prob(data)
        mask = self.batch["response_mask"]
        entropy, log_probs = (
            gathered(response_from_nested(output[name], data["response_mask"]), mask.shape[1]) * mask
            for name in ("entropy", "log_probs")
        )
        return entropy, log_probs

    def update(
        self, advantages: torch.Tensor, old_log_probs: torch.Tensor, guide: torch.Tensor | None = None
    ) -> dict[str, float]:
        """guide: (B, T), 1 on the tokens of the guide's rows."""
        from verl.utils import tensordict_utils as tu

        from gtpo_verl.integrations.losses import GUIDE_MASK

        data = columns(self.batch, self.rows)
        lengths = data["responses"].offsets().diff().tolist()
        given = {"old_log_probs": old_log_probs, "advantages": advantages}
        for name, column in (given if guide is None else given | {GUIDE_MASK: guide}).items():
            data[name] = jagged([column[row, :length].float() for row, length in zip(self.rows, lengths, strict=True)])
        tu.assign_non_tensor(
            data,
            calculate_entropy=False,
            distillation_use_topk=False,
            distillation_only=False,
            global_batch_size=len(self.rows),
            mini_batch_size=len(self.rows),
            epochs=1,
            seed=0,
            dataloader_kwargs={"shuffle": False},
            temperature=self.temperature,
        )
        found = tu.get(self.worker.update_actor(data), "metrics")
        return {name: float(np.mean(found[name])) for name in METRICS if name in found}


def advantages_of(
    config: DictConfig, batch: dict[str, Any], entropy: torch.Tensor, old_log_probs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages (B, T) by the advantage step of verl's V1 trainer, and the length penalty (B,) in its rewards."""
    from tensordict import TensorDict
    from verl import DataProto
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    from gtpo_verl.integrations.context import CreditContext, Overlong, credit_context
    from gtpo_verl.integrations.estimators import group_ids

    mask = batch["response_mask"]
    overlong = Overlong(max_length=32, cache_length=12)
    penalty = soft_overlong_penalty(mask.sum(1), overlong.max_length, overlong.cache_length).float()
    scores = batch["rewards"].sum(1)
    rewards = torch.where(batch["rewards"] != 0, batch["rewards"] + penalty[:, None], 0.0)
    data = DataProto(
        batch=TensorDict({"token_level_rewards": rewards, "response_mask": mask.long()}, batch_size=len(mask)),
        non_tensor_batch={"uid": np.array([key.rsplit("_", 2)[0] for key in batch["keys"]], dtype=object)},
    )
    inputs = Batch(
        mask,
        group_ids(data.non_tensor_batch["uid"]),
        batch["correct"],
        entropy=entropy,
        rewards=scores,
        old_log_probs=old_log_probs,
        seed=SEED,
    )
    with credit_context(CreditContext(inputs, overlong)):
        data = compute_advantage_for_multi_trajectories(
            data,
            batch_keys=batch["keys"],
            adv_estimator=config.algorithm.adv_estimator,
            norm_adv_by_std_in_grpo=config.algorithm.norm_adv_by_std_in_grpo,
            config=config.algorithm,
        )
    return data.batch["advantages"].clone(), penalty


def update_with_guide(actor: Actor, config: DictConfig, advantages: torch.Tensor) -> dict[str, Any]:
    """An update with the loss that the trainer gives to the workers, after which they have verl's own again."""
    from gtpo_verl.integrations.step.guide import GuideRows

    guide = GuideRows(config)
    _, policy = actor.measured()
    of_guide = (torch.arange(len(policy)) % 3 == 2)[:, None].expand_as(policy)
    denominators = torch.where(of_guide, 0.0 if guide.config.ratio == "one" else policy - 0.3, policy)
    actor.worker.set_loss_fn(guide.loss())
    update = actor.update(advantages, denominators, of_guide)
    return {"log_probs": policy, "denominators": denominators, "guide": of_guide, "update": update}


def main(out: Path) -> None:
    torch.manual_seed(0)  # clip_cov draws
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        tokenizer = tiny.build_tokenizer()
        policy = tiny.build_model(len(tokenizer), seed=0)
        with torch.no_grad():
            policy.lm_head.weight.mul_(3)  # entropies that differ from token to token
        tiny.save(policy, tokenizer, model)
        batch = batch_with_a_group_of_one_verdict(len(tokenizer))
        dapo = config_of("dapo", model)
        export_environment(dapo)
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        os.environ |= {**meeting_in(model / "ranks"), "OMP_NUM_THREADS": "1"}
        actor = Actor(dapo, batch)
        methods = {}
        losses: set[str] = set()
        for name, entry in algorithms().items():
            config = with_preset(dapo, name, model)
            actor.use_loss_of(config)
            entropy, old = actor.measured()
            advantages, penalty = advantages_of(config, batch, entropy, old)
            updates = [actor.update(advantages, old)]
            new = None
            if entry.loss not in losses:
                losses.add(entry.loss)
                _, new = actor.measured()
                updates.append(actor.update(advantages, old))
            methods[name] = {
                "entropy": entropy,
                "old_log_probs": old,
                "log_probs": new,
                "penalty": penalty,
                "advantages": advantages,
                "updates": updates,
                "guided": update_with_guide(actor, config, advantages) if entry.loss == "mixed" else None,
                "clip": [config.actor_rollout_ref.actor[f"clip_ratio_{end}"] for end in ("low", "high", "c")],
            }
        dist.destroy_process_group()
    torch.save({"batch": batch, "methods": methods, "limit": dapo.data.max_response_length}, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
