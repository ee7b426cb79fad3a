"""verl's V1 trainers with credit assignment by entropy: what verl computes and drops on the way, brought to the estimator.

verl's old-log-prob pass already writes the policy's entropies to TransferQueue, and the rollout's arrive beside the tokens; the
advantage step fetches neither. The mixin fetches both, with the verifier's verdicts, around verl's own method.
"""

import logging
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue as tq
from omegaconf import DictConfig
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, get_trainer_cls
from verl.utils.device import get_device_name
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient

from gtpo_verl.algorithms import credit_metrics
from gtpo_verl.errors import UserError
from gtpo_verl.integrations.carry_over import remove_outdated, restore_groups, save_groups
from gtpo_verl.integrations.context import CreditContext, Overlong, credit_context
from gtpo_verl.integrations.cpu_platform import for_cpu
from gtpo_verl.integrations.estimators import group_ids
from gtpo_verl.integrations.metrics import ActorPass, agreement, verifier_failures
from gtpo_verl.integrations.sampling import BudgetedReplayBuffer, BudgetSpentError
from gtpo_verl.integrations.validation import limits, recorded, validation_metrics
from gtpo_verl.integrations.vllm.client import EntropyFullyAsyncClient
from gtpo_verl.integrations.vllm.health import dead_servers
from gtpo_verl.integrations.vllm.wiring import ENTROPIES as ROLLOUT_ENTROPIES
from gtpo_verl.integrations.vllm.wiring import VERSIONS as ROLLOUT_VERSIONS
from gtpo_verl.runs.directory import STOP_FILE, MetricsRecorder, record_groups

logger = logging.getLogger(__name__)

SERVER_CHECK_INTERVAL = 5.0  # seconds


class CreditAssignmentMixin(PPOTrainer):
    """Goes before one of verl's trainers in the bases of a class; see :func:`trainer_class`."""

    def __init__(self, config: DictConfig) -> None:
        self.entropy_source: str = config.algorithm.entropy.source
        self.actor_pass = ActorPass(config.algorithm.entropy.check_every)
        self.run_dir = Path(config.trainer.run_dir)
        self.recorder = MetricsRecorder(self.run_dir)
        self._in_training = False
        self._servers_asked = time.monotonic()
        self._pass_seconds: Counter[str] = Counter()  # of the present step
        super().__init__(config)

    # ---------------------------------------------------------------- set-up

    def _build_replay_buffer(self) -> ReplayBuffer:
        stock = super()._build_replay_buffer()
        if type(stock) is not ReplayBuffer:
            return stock  # asynchronous trainers and custom samplers keep their own
        filter_groups = self.config.algorithm.filter_groups
        return BudgetedReplayBuffer.like(
            stock,
            max_num_gen_batches=filter_groups.max_num_gen_batches,
            on_budget=filter_groups.on_budget,
            carry_over_max_age=filter_groups.carry_over.max_age,
            correct_threshold=self.config.algorithm.correct_threshold,
        )

    def _resolve_filter_groups_metric(self) -> str | None:
        settings = self.config.algorithm.filter_groups
        if self.trainer_mode != "sync":
            return super()._resolve_filter_groups_metric()
        budget = settings.max_num_gen_batches
        settings.max_num_gen_batches = 0  # verl would warn that it ignores it; the buffer made of its own does not
        metric = super()._resolve_filter_groups_metric()
        settings.max_num_gen_batches = budget
        return metric

    def _sampling(self) -> BudgetedReplayBuffer | None:
        """The replay buffer where dynamic sampling is ours and switched on."""
        buffer = self.replay_buffer
        return buffer if isinstance(buffer, BudgetedReplayBuffer) and buffer.filters else None

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        if get_device_name() != "cpu":
            return
        workers: dict[Any, Any] = self.role_worker_mapping  # verl keeps Ray actor classes in it
        for role, actor_class in workers.items():
            workers[role] = ray.remote(for_cpu(actor_class.__ray_actor_class__))

    def get_llm_client(self) -> LLMServerClient:
        client = super().get_llm_client()
        if self.entropy_source == "actor" or not isinstance(client, FullyAsyncLLMServerClient):
            return client
        # verl's asynchronous client joins the segments of an interrupted response and drops what it does not know.
        manager = getattr(self, "standalone_server_manager", None) or self.llm_server_manager
        return manager.get_client(client_cls=EntropyFullyAsyncClient)

    def on_train_begin(self) -> None:
        super().on_train_begin()
        self._in_training = True

    # ---------------------------------------------------------------- servers

    def check_servers(self) -> None:
        """Make sure that every rollout server has its engine.

        Raises:
            UserError: one has not.
        """
        servers = [server for manager in self._rollout_server_managers() for server in manager.server_handles]
        dead = dead_servers(servers)
        if dead:
            raise UserError(
                f"vLLM died ({'; '.join(dead)}). Its last words are further up in this log; where there are none, the kernel may have "
                f"killed it for memory. The same command with trainer.run_dir={self.run_dir} goes on from the last checkpoint."
            )

    def _add_prompts_to_generate(self, num_prompts: int) -> int:
        # The way by which prompts take the place of failed ones, over and over if need be.
        if time.monotonic() - self._servers_asked > SERVER_CHECK_INTERVAL:
            self.check_servers()
            self._servers_asked = time.monotonic()
        return super()._add_prompts_to_generate(num_prompts)

    # ---------------------------------------------------------------- one step

    def prepare_step(self) -> dict:
        sampling = self._sampling()
        if sampling is None:
            return super().prepare_step()
        prompts = sampling.first_round(self.global_steps, "train", self.config.data.train_batch_size)
        if prompts:
            self._add_prompts_to_generate(prompts)
        return {}

    def step(self, metrics: dict, timing_raw: dict) -> KVBatchMeta:
        self._pass_seconds.clear()
        try:
            batch = super().step(metrics, timing_raw)
            metrics.update(self._pass_seconds)  # verl averages them where a step has several updates; they add up
            return batch
        except BudgetSpentError:
            self.on_sample_end()  # puts the engines to sleep: the actor needs their memory to save
            self.global_steps -= 1  # nothing was trained in this step
            if self.global_steps > 0 and not self._checkpoint_dir().is_dir():
                self._save_checkpoint()
            raise

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        if self.entropy_source == "actor":
            return super()._compute_old_log_prob(batch, metrics)
        tokens = sum(tag["seq_len"] for tag in batch.tags)
        started = time.perf_counter()
        if self.entropy_source == "both":
            batch = super()._compute_old_log_prob(batch, metrics)
            self._pass_seconds.update(self.actor_pass.ran(time.perf_counter() - started, tokens))
            metrics.update(self._agreement(batch))
            return batch
        if not self.actor_pass.is_due(self.global_steps):
            self._pass_seconds.update(self.actor_pass.spared(tokens))
            return super()._compute_old_log_prob(batch, metrics)
        correction = self.config.algorithm.rollout_correction
        correction.bypass_mode = False
        batch = super()._compute_old_log_prob(batch, metrics)
        correction.bypass_mode = True
        self._pass_seconds.update(self.actor_pass.ran(time.perf_counter() - started, tokens))
        metrics.update(self._agreement(batch))
        # As in every other step, training goes on with the rollout's log-probs: this puts them in place of the actor's.
        return super()._compute_old_log_prob(batch, metrics)

    def _agreement(self, batch: KVBatchMeta) -> dict[str, float]:
        actor, rollout, versions, mask = self._fetch(batch, "entropy", ROLLOUT_ENTROPIES, ROLLOUT_VERSIONS)
        # Weights are sent at the end of a step, with its number; old log-probs are of those weights in every trainer mode.
        return agreement(rollout, actor, mask, current=versions == self.global_steps - 1)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        entropy, mask = self._fetch(batch, ROLLOUT_ENTROPIES if self.entropy_source == "rollout" else "entropy")
        infos = self._reward_infos(batch)
        context = CreditContext(self._verdicts(batch, infos), entropy, overlong(self.config), _scores(infos))
        with credit_context(context):
            batch = super()._compute_advantage(batch, metrics)

        advantages, mask = self._fetch(batch, "advantages")
        group = group_ids(np.array([key.rsplit("_", 2)[0] for key in batch.keys], dtype=object))
        trained_on = credit_metrics(advantages, mask, group, context.correct, entropy)
        context.metrics.update(
            trained_on | context.metrics
        )  # an estimator's own, such as sign flips before preserve_sign, win
        context.metrics["entropy_all"] = entropy[mask].mean().item()
        metrics.update({f"credit/{name}": value for name, value in context.metrics.items()})
        real = mask.any(-1).tolist()
        metrics.update(verifier_failures([info for info, valid in zip(infos, real, strict=True) if valid]))
        metrics["training/accuracy"] = context.correct[mask.any(-1)].float().mean().item()
        self._dump_credit(batch, context, advantages, mask)
        return batch

    def _dump_credit(
        self, batch: KVBatchMeta, context: CreditContext, advantages: torch.Tensor, mask: torch.Tensor
    ) -> None:
        """Keep a batch in ``credit/<step>.pt`` every ``trainer.credit_dump_freq`` steps: all that its update depends on.

        A step of several updates (``parameter_sync_step``) leaves ``<step>-0.pt``, ``<step>-1.pt``, ...
        """
        every = self.config.trainer.credit_dump_freq
        if every <= 0 or self.global_steps % every:
            return
        kept = {"old_log_probs": "old_log_probs", "rewards": "rm_scores", "responses": "responses"}
        if self.entropy_source != "actor":
            kept |= {"rollout_entropies": ROLLOUT_ENTROPIES, "rollout_versions": ROLLOUT_VERSIONS}
            kept["rollout_log_probs"] = "rollout_log_probs"
        *columns, _ = self._fetch(batch, *kept.values())
        prompts = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["prompts"])
        name = f"{self.global_steps}" + (f"-{self.local_trigger_step}" if self.parameter_sync_step > 1 else "")
        directory = self.run_dir / "credit"
        directory.mkdir(exist_ok=True)
        torch.save(
            {
                "keys": list(batch.keys),
                "prompts": [row.clone() for row in prompts["prompts"].unbind()],
                "response_mask": mask,
                "correct": context.correct,
                "entropy": context.entropy,
                "advantages": advantages,
            }
            | dict(zip(kept, columns, strict=True)),
            directory / f"{name}.pt",
        )

    def _fetch(self, batch: KVBatchMeta, *columns: str) -> tuple[torch.Tensor, ...]:
        """Columns of the batch and, last, the response mask: each (B, T), right-padded with zeros, rows in the batch's order."""
        data = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=[*columns, "response_mask"]
        )
        for column in columns:
            if column not in data:
                raise UserError(_MISSING[column])
        mask = data["response_mask"].to_padded_tensor(0).bool()
        # A row that verl adds to fill the batch keeps the response of the row it copies, under a mask of one zero.
        return *(data[column].to_padded_tensor(0)[:, : mask.shape[1]] for column in columns), mask

    def _reward_infos(self, batch: KVBatchMeta) -> list[dict[str, Any]]:
        """What the reward function returned, a dict a row, in the batch's order."""
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["extra_fields"])
        return [getattr(extra, "data", extra).get("reward_extra_info", {}) for extra in data["extra_fields"]]

    def _verdicts(self, batch: KVBatchMeta, infos: list[dict[str, Any]]) -> torch.Tensor:
        """(B,) bool: `acc` of the verifier against `algorithm.correct_threshold`."""
        threshold = self.config.algorithm.correct_threshold
        verdicts = []
        for key, info in zip(batch.keys, infos, strict=True):
            if "acc" not in info:
                raise UserError(
                    f"response {key} has no verdict: the reward function must return a dict with `acc` (1 for a correct answer) beside "
                    "`score`; reward.custom_reward_function names the function."
                )
            verdicts.append(float(info["acc"]) >= threshold)
        return torch.tensor(verdicts)

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        if not self.config.algorithm.overlong_filtering:
            return super()._update_actor(batch, metrics)
        masks = self._truncated_masks(batch)
        responses = sum(not tag.get("is_padding", False) for tag in batch.tags)
        metrics["training/overlong_filtered_share"] = len(masks) / responses
        self._put_masks(batch, {key: torch.zeros_like(mask) for key, mask in masks.items()})
        batch = super()._update_actor(batch, metrics)
        self._put_masks(batch, masks)  # the step's figures are of all responses
        return batch

    def _truncated_masks(self, batch: KVBatchMeta) -> dict[str, torch.Tensor]:
        """{key: (T_i,) mask} of the responses that reached the limit, ragged as TransferQueue keeps them."""
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["response_mask"])
        masks = data["response_mask"].unbind()
        limit = self.config.data.max_response_length
        return {key: mask for key, mask in zip(batch.keys, masks, strict=True) if len(mask) >= limit}

    def _put_masks(self, batch: KVBatchMeta, masks: dict[str, torch.Tensor]) -> None:
        if not masks:
            return
        column = torch.nested.as_nested_tensor(list(masks.values()), layout=torch.jagged)
        fields = TensorDict({"response_mask": column}, batch_size=len(masks))
        tq.kv_batch_put(keys=list(masks), partition_id=batch.partition_id, fields=fields)

    # ---------------------------------------------------------------- what is kept of a run

    def _compute_metrics(
        self, batch: KVBatchMeta, metrics: dict, timing_raw: dict, global_steps: int, epoch: int
    ) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps=global_steps, epoch=epoch)
        limit = self.config.data.max_response_length
        real = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]
        data = tq.kv_batch_get(keys=real, partition_id=batch.partition_id, select_fields=["response_mask"])
        lengths = data["response_mask"].offsets().diff()
        metrics["response_length/truncated_share"] = (lengths >= limit).float().mean().item()
        self.recorder.write(global_steps, metrics)
        trained = {
            key.rsplit("_", 2)[0]: tag["global_steps"]
            for key, tag in zip(batch.keys, batch.tags, strict=True)
            if not tag.get("is_padding", False)
        }
        record_groups(self.run_dir, global_steps, trained)

    def _checkpoint_dir(self) -> Path:
        return Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"

    def _save_checkpoint(self) -> None:
        sampling = self._sampling()
        if sampling is not None:  # before verl's part, which ends by naming the checkpoint the latest
            save_groups(self._checkpoint_dir(), "train", sampling.last_step)
        super()._save_checkpoint()
        remove_outdated(self._checkpoint_dir())

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        sampling = self._sampling()
        if sampling is None or self.global_steps == 0:
            return
        trainer = self.config.trainer
        folder = Path(trainer.resume_from_path) if trainer.resume_mode == "resume_path" else self._checkpoint_dir()
        groups, sampling.last_step = restore_groups(folder, "train", with_entropies=self.entropy_source != "actor")
        if groups:
            logger.info("%d groups carried over are back from %s.", groups, folder)

    def _validate(self) -> dict[str, float]:
        with recorded(self.replay_buffer, self.agent_loop_manager) as self._validated:
            metrics = super()._validate()
        if not self._in_training:  # later ones are recorded with their step
            self.recorder.write(self.global_steps, metrics)
        return metrics

    def _val_metrics_update(
        self,
        data_sources: Any,
        sample_uids: Any,
        reward_extra_infos_dict: Any,
        sample_turns: Any,
        expected_acc_counts: dict[tuple[str, str], int] | None = None,
    ) -> dict[str, float]:
        metrics = super()._val_metrics_update(
            data_sources, sample_uids, reward_extra_infos_dict, sample_turns, expected_acc_counts
        )
        return metrics | validation_metrics(self._validated, expected_acc_counts or {}, **limits(self.config))

    def on_step_end(self) -> None:
        super().on_step_end()
        if not (self.run_dir / STOP_FILE).exists():
            return
        saved = self.config.trainer.save_freq > 0 and self.global_steps % self.config.trainer.save_freq == 0
        if not saved:
            self._save_checkpoint()
        logger.warning(
            "Stopping after step %d, as asked; its checkpoint is in %s.",
            self.global_steps,
            self.config.trainer.default_local_dir,
        )
        self.total_training_steps = self.global_steps


_MISSING = {
    "entropy": (
        "the actor's entropies are not there: verl's bypass mode skips the pass that computes them. "
        "Set algorithm.entropy.source=rollout, or algorithm.rollout_correction.bypass_mode=false."
    ),
    ROLLOUT_ENTROPIES: (
        "the rollout returned no entropies: its server or agent loop is not gtpo_verl's. "
        "`gtpo-verl doctor` says what is missing; algorithm.entropy.source=actor does without."
    ),
}


def overlong(config: DictConfig) -> Overlong | None:
    """The run's soft overlong penalty, kept in one place, the reward manager's; None where it is switched off."""
    settings = config.reward.reward_kwargs.overlong_buffer_cfg
    if not settings.enable:
        return None
    return Overlong(config.reward.reward_kwargs.max_resp_len, settings.len, settings.penalty_factor)


def _scores(infos: list[dict[str, Any]]) -> torch.Tensor | None:
    """(B,) the verifier's scores, without the overlong penalty that verl's reward manager adds; None where it returns none."""
    if any("score" not in info for info in infos):
        return None
    return torch.tensor([float(info["score"]) for info in infos])


def trainer_class(trainer_mode: str) -> type[PPOTrainer]:
    """verl's trainer of this mode, with credit assignment.

    It is not registered under a name of its own: verl compares the name of the mode with literals in several places.
    """
    stock = get_trainer_cls(trainer_mode)
    if trainer_mode == "separate_async":
        # verl 0.9.1 passes `flush=` to logger.info there when hybrid_engine=false, and the job ends with a TypeError.
        logging.getLogger(stock.__module__).setLevel(logging.WARNING)
    return type(f"CreditAssignment{stock.__name__}", (CreditAssignmentMixin, stock), {"__module__": __name__})
