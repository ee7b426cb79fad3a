"""verl's V1 trainers in a run of ``gtpo-verl train``: credit assignment, and what a run needs around it; their methods
hand over to the modules of `integrations.step`.
"""

import logging
from pathlib import Path
from typing import Any

import ray
import transfer_queue as tq
from omegaconf import DictConfig
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync
from verl.trainer.ppo.v1.trainer_base import get_trainer_cls
from verl.utils.device import get_device_name
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient, LLMServerManager

from gtpo_verl.errors import StepGivenUpError
from gtpo_verl.integrations.agent_loops import last_failure
from gtpo_verl.integrations.cpu_platform import for_cpu
from gtpo_verl.integrations.credit_trainer import CreditTrainer
from gtpo_verl.integrations.guide import CLIENT, GuideServerManager
from gtpo_verl.integrations.reward_loop import BoundedRewardLoopManager
from gtpo_verl.integrations.sampling import BoundedFailures, BudgetedReplayBuffer, BudgetSpentError
from gtpo_verl.integrations.standalone import guide_servers
from gtpo_verl.integrations.step.checkpoints import Checkpoints
from gtpo_verl.integrations.step.health import BoundedWait, Health
from gtpo_verl.integrations.step.not_finite import NotFinite, NotFiniteError
from gtpo_verl.integrations.step.records import Records
from gtpo_verl.integrations.step.samples import CreditFiles
from gtpo_verl.integrations.streams import PromptNames, SeedingClient, SeedingFullyAsyncClient
from gtpo_verl.integrations.temporarily import temporarily
from gtpo_verl.integrations.transfer_queue import TRAIN, listed, put_zeros, uid_of
from gtpo_verl.integrations.validation import ValidatingTrainer
from gtpo_verl.runs.directory import record_metrics, record_phase

logger = logging.getLogger(__name__)


class RunTrainer(ValidatingTrainer, CreditTrainer):
    """Goes before one of verl's trainers in the bases of a class; see :func:`trainer_class`."""

    guide_servers: LLMServerManager | None = None

    def __init__(self, config: DictConfig) -> None:
        self.health = Health(config, self)
        self.records = Records(config)
        self.prompts = PromptNames(config)
        self.not_finite = NotFinite(config)
        self._skips_update = False  # the current batch has values that are not finite
        self._in_training = False
        super().__init__(config)
        self.checkpoints = Checkpoints(config, self.records)
        self.credit_files = CreditFiles(config, self.parameter_sync_step)

    # ---------------------------------------------------------------- set-up

    def _setup(self) -> None:
        record_phase(Path(self.config.trainer.run_dir), 0, "starting")
        with temporarily(trainer_base, "RewardLoopManager", BoundedRewardLoopManager):
            super()._setup()
        if self.guide.on:
            self.actor_rollout_wg.set_loss_fn(self.guide.loss())
        served = guide_servers(self.config)
        if served is not None:
            self.guide_servers = GuideServerManager.create(config=served)

    def _build_replay_buffer(self) -> ReplayBuffer:
        buffer = super()._build_replay_buffer()
        if type(buffer) is ReplayBuffer:  # asynchronous trainers and custom samplers keep their own
            buffer = BudgetedReplayBuffer(buffer, self.config)
            buffer.why = self._why_failed
        elif isinstance(buffer, ReplayBufferAsync):
            BoundedFailures(buffer, self.config, self._why_failed)
        BoundedWait(buffer, self.health, self.config.guards.stall_timeout)
        return buffer

    def _sampling(self) -> BudgetedReplayBuffer | None:
        """The replay buffer where dynamic sampling is ours and switched on."""
        buffer = self.replay_buffer
        if not isinstance(buffer, BudgetedReplayBuffer) or buffer.filter_groups_metric is None:
            return None
        return buffer

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        if get_device_name() != "cpu":
            return
        workers: dict[Any, Any] = self.role_worker_mapping  # verl keeps Ray actor classes in it
        for role, actor_class in workers.items():
            workers[role] = ray.remote(for_cpu(actor_class.__ray_actor_class__))

    def _client_class(self, stock: type[LLMServerClient]) -> type[LLMServerClient]:
        with_seeds = {LLMServerClient: SeedingClient, FullyAsyncLLMServerClient: SeedingFullyAsyncClient}
        client_class = super()._client_class(stock)
        return with_seeds.get(client_class, client_class)

    def get_teacher_client(self) -> dict[str, LLMServerClient] | None:
        if self.guide_servers is None:
            return super().get_teacher_client()
        return {CLIENT: self.guide_servers.get_client(client_cls=SeedingClient)}  # verl hands it to the agent loops

    def on_sample_end(self) -> None:
        self.health.check_servers()  # verl would train on what the other engines have left of the step
        super().on_sample_end()

    def on_train_begin(self) -> None:
        super().on_train_begin()
        self._in_training = True

    def _why_failed(self) -> str:
        self.health.check_servers()  # all requests to a dead engine fail
        return last_failure(self.agent_loop_manager)

    # ---------------------------------------------------------------- generation

    def on_sample_begin(self) -> None:
        self.health.begin(self.global_steps, "generating")
        super().on_sample_begin()

    def prepare_step(self) -> dict:
        sampling = self._sampling()
        if sampling is None:
            return super().prepare_step()
        prompts = sampling.begin_step(self.global_steps, self.config.data.train_batch_size)
        if prompts:
            self._add_prompts_to_generate(prompts)
        return {}

    def _next_train_batch(self, num_prompts: int | None = None) -> TensorDict:
        batch = super()._next_train_batch(num_prompts)
        self.prompts.assign(batch, self.global_steps)
        return batch

    # ---------------------------------------------------------------- one step

    def step(self, metrics: dict, timing_raw: dict) -> KVBatchMeta:
        position = self.train_dataloader.state_dict() if self.trainer_mode == "sync" else {}
        try:
            batch = super().step(metrics, timing_raw)
        except (BudgetSpentError, StepGivenUpError) as error:
            if self.trainer_mode != "sync":
                raise
            self.on_sample_end()  # puts the engines to sleep: the actor needs their memory to save
            if isinstance(error, StepGivenUpError):
                self._give_step_up(position)
            else:
                self._save_step_before()
            raise
        metrics["training/skipped_updates"] = self.not_finite.skipped
        self.records.trained(metrics, batch)
        return batch

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        self.health.begin(self.global_steps, "computing old log-probs")
        batch = super()._compute_old_log_prob(batch, metrics)
        if self.guide.on:
            self.guide.replace_denominators(self.update, metrics)
        return batch

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        names = ["rm_scores", "old_log_probs", self.credit.entropy_column]
        if self.config.actor_rollout_ref.rollout.calculate_log_probs:
            names.append("rollout_log_probs")
        try:
            self._skips_update = self.not_finite.batch(self.global_steps, self.update, names)
        except NotFiniteError:
            if self.trainer_mode == "sync":  # elsewhere, earlier updates of this step may have changed the weights
                self._save_step_before()
            raise
        if self._skips_update:
            put_zeros(batch, "advantages", "returns")  # verl logs them
            return batch
        batch = super()._compute_advantage(batch, metrics)
        self._skips_update = self.not_finite.batch(self.global_steps, self.update, ["advantages"])
        last = self.global_steps == self.total_training_steps
        self.credit_files.keep(self.update, self.global_steps, self.local_trigger_step, self.tokenizer, last=last)
        return batch

    def _update_critic(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        return batch if self._skips_update else super()._update_critic(batch, metrics)

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        self.health.begin(self.global_steps, "updating the actor")
        if self._skips_update:
            return batch
        if self.guide.on:
            self.guide.mark(batch)
        batch = super()._update_actor(batch, metrics)
        self.not_finite.update(self.global_steps, self.update, metrics)
        return batch

    def on_step_end(self) -> None:
        stopping = self.health.stopping()
        if stopping and self.checkpoints.saved != self.global_steps:
            self._save_checkpoint()  # first: sending the weights wakes the engines, and saving needs their memory
        self.health.begin(self.global_steps, "sending weights to the engines")
        super().on_step_end()
        if stopping:
            folder = self.config.trainer.default_local_dir
            logger.warning("Stopping after step %d on request; its checkpoint is in %s.", self.global_steps, folder)
            self.total_training_steps = self.global_steps

    # ---------------------------------------------------------------- what is kept of a run

    def _compute_metrics(
        self, batch: KVBatchMeta, metrics: dict, timing_raw: dict, global_steps: int, epoch: int
    ) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps=global_steps, epoch=epoch)
        self.records.log(global_steps, metrics, batch)

    def _save_checkpoint(self, newest: int | None = None) -> None:
        self.health.begin(self.global_steps, "saving a checkpoint")
        self.checkpoints.save(self.global_steps, self._sampling(), super()._save_checkpoint, newest)

    def _save_step_before(self) -> None:
        """Save the last trained step, with the groups that the step which could not be trained has generated."""
        self.global_steps -= 1  # nothing was trained in this step
        if self.global_steps == 0:
            return
        if self.checkpoints.saved != self.global_steps:
            self._save_checkpoint()
            return
        # The weights are saved. The data has advanced since, and groups wait that the checkpoint does not have.
        position = self.train_dataloader.state_dict()
        self.checkpoints.save_later_prompts(self.global_steps, self._sampling(), position)

    def _give_step_up(self, position: dict[str, Any]) -> None:
        """Save the last trained step as it was before this one, which had this position in the data: some of its groups
        have not ended, so a restart generates it again.
        """
        self.global_steps -= 1
        if self.global_steps == 0 or self.checkpoints.saved == self.global_steps:
            return
        self._save_checkpoint(newest=self.global_steps)
        self.checkpoints.save_position(self.global_steps, position)

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        if self.trainer_mode != "sync":
            # verl saves a step's rows before it clears them, and nothing clears those of a checkpoint
            rows = listed(TRAIN)
            if trained := [key for key in rows if uid_of(key) not in rows]:
                tq.kv_clear(keys=trained, partition_id=TRAIN)
        if self.global_steps > 0:
            self.checkpoints.restore(self.global_steps, self._sampling())

    def _validate(self) -> dict[str, float]:
        self.health.begin(self.global_steps, "validating")
        metrics = super()._validate()
        self.health.check_servers()  # verl would take the responses of the other engines for all
        if not self._in_training:
            record_metrics(Path(self.config.trainer.run_dir), self.global_steps, metrics)
        return metrics


def trainer_class(trainer_mode: str) -> type[RunTrainer]:
    """verl's trainer of this mode, in a run.

    It is not registered under another name: verl compares the name of the mode with literals in several places.
    """
    stock = get_trainer_cls(trainer_mode)
    if trainer_mode == "separate_async":
        # verl 0.9.1 passes `flush=` to logger.info there when hybrid_engine=false, and the job ends with a TypeError.
        logging.getLogger(stock.__module__).setLevel(logging.WARNING)
    return type(f"CreditAssignment{stock.__name__}", (RunTrainer, stock), {"__module__": __name__})
