"""verl's V1 trainers with credit assignment by entropy.

verl's old-log-prob pass writes the policy's entropies to TransferQueue, and the rollout's arrive beside the tokens; the
advantage step fetches neither. The mixin fetches both, with the verifier's verdicts, and passes them to the estimator.
"""

import logging
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ray
import torch
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, get_trainer_cls
from verl.utils import tensordict_utils
from verl.utils.device import get_device_name
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient, LLMServerManager

from gtpo_verl.algorithms import algorithm_of, credit_metrics
from gtpo_verl.errors import StepGivenUpError, UserError
from gtpo_verl.files import append_json_line, write_atomically
from gtpo_verl.integrations.carry_over import restore_groups, save_groups
from gtpo_verl.integrations.context import CreditContext, credit_context, overlong
from gtpo_verl.integrations.cpu_platform import for_cpu
from gtpo_verl.integrations.credit_samples import contrasting_pair, credit_sample
from gtpo_verl.integrations.entropy_source import entropy_source
from gtpo_verl.integrations.estimators import group_ids
from gtpo_verl.integrations.guide import GuideRows, own_rows
from gtpo_verl.integrations.guide_server import CLIENT, GuideServerManager
from gtpo_verl.integrations.liveness import ended_actors
from gtpo_verl.integrations.metrics import ActorPass, agreement, legal_share, verifier_failures
from gtpo_verl.integrations.not_finite import NotFinite, NotFiniteError
from gtpo_verl.integrations.reward_loop import BoundedRewardLoopManager
from gtpo_verl.integrations.sampling import BudgetedReplayBuffer, BudgetSpentError
from gtpo_verl.integrations.standalone import guide_servers
from gtpo_verl.integrations.streams import SeedingClient, SeedingFullyAsyncClient, assign_streams
from gtpo_verl.integrations.temporarily import temporarily
from gtpo_verl.integrations.transfer_queue import (
    fetch,
    fetch_rows,
    group_names,
    lone_responses,
    prompt_keys,
    put_rows,
    real_rows,
    replaced_rows,
    reward_infos,
    uid_of,
)
from gtpo_verl.integrations.validation import dump_columns, limits, recorded, validation_metrics
from gtpo_verl.integrations.vllm.client import EntropyFullyAsyncClient
from gtpo_verl.integrations.vllm.health import dead_servers
from gtpo_verl.integrations.vllm.names import ENTROPIES, VERSIONS
from gtpo_verl.integrations.waiting import PhaseLimit, bound_wait
from gtpo_verl.runs.checkpoints import prune
from gtpo_verl.runs.correctness import is_correct, verdict
from gtpo_verl.runs.directory import (
    SAMPLES_FILE,
    STOP_FILE,
    MetricsRecorder,
    keep_step,
    link_model,
    record_groups,
    record_phase,
    restore_step,
)
from gtpo_verl.runs.guards import Guards, read_bounds

logger = logging.getLogger(__name__)

SERVER_CHECK_INTERVAL = 5.0  # seconds
SEED_STRIDE = 1_000_003  # between the seeds of two runs: no step of one draws what a step of the other does
# verl's estimators that subtract the mean of the group, and take it to be 0 for a lone response.
GROUP_MEAN_ESTIMATORS = ("grpo", "grpo_vectorized")


class CreditAssignmentMixin(PPOTrainer):
    """Goes before one of verl's trainers in the bases of a class; see :func:`trainer_class`."""

    _guide_servers: LLMServerManager | None = None

    def __init__(self, config: DictConfig) -> None:
        self.entropy_source = entropy_source(config)
        self.guide = GuideRows(config)
        self.actor_pass = ActorPass(config.algorithm.entropy.check_every)
        self.run_dir = Path(config.trainer.run_dir)
        self.recorder = MetricsRecorder(self.run_dir)
        self._in_training = False
        self._checkpointed: int | None = None  # the last step whose checkpoint is complete in default_local_dir
        self._not_logged: tuple[dict[str, Any], dict[str, int]] | None = None  # metrics and groups of the current step
        guards = config.guards
        self.not_finite = NotFinite(self.run_dir, guards.not_finite, guards.max_skipped_steps)
        bounds: Any = OmegaConf.to_container(guards.bounds)
        self.guards = Guards(read_bounds(bounds))
        self.phase_limit = PhaseLimit(guards.phase_timeout)
        self._skips_update = False  # the current batch has values that are not finite
        self._servers_asked = time.monotonic()
        self._pass_seconds: Counter[str] = Counter()  # of the current step
        self._drawn = (0, 0)  # a step, and the number of the next prompt in it
        super().__init__(config)

    # ---------------------------------------------------------------- set-up

    def _enter(self, phase: str) -> None:
        record_phase(self.run_dir, self.global_steps, phase)
        self.phase_limit.begin(f"step {self.global_steps}: {phase}")

    def _setup(self) -> None:
        record_phase(self.run_dir, 0, "starting")
        with temporarily(trainer_base, "RewardLoopManager", BoundedRewardLoopManager):
            super()._setup()
        if self.guide.on:
            self.actor_rollout_wg.set_loss_fn(self.guide.loss())
        served = guide_servers(self.config)
        if served is not None:
            self._guide_servers = GuideServerManager.create(config=served)

    def _build_replay_buffer(self) -> ReplayBuffer:
        buffer = self._budgeted(super()._build_replay_buffer())
        stopping = (self.run_dir / STOP_FILE).exists
        bound_wait(buffer, self.config.guards.stall_timeout, stopping, self.phase_limit.polled)
        return buffer

    def _budgeted(self, stock: ReplayBuffer) -> ReplayBuffer:
        if type(stock) is not ReplayBuffer:
            return stock  # asynchronous trainers and custom samplers keep their own
        filter_groups = self.config.algorithm.filter_groups
        return BudgetedReplayBuffer.like(
            stock,
            max_num_gen_batches=filter_groups.max_num_gen_batches,
            on_budget=filter_groups.on_budget,
            carry_over_max_age=filter_groups.carry_over.max_age,
            correct_threshold=self.config.algorithm.correct_threshold,
            mini_batch_size=self.config.actor_rollout_ref.actor.ppo_mini_batch_size,
            max_failed_share=self.config.guards.max_failed_share,
        )

    def _resolve_filter_groups_metric(self) -> str | None:
        if self.trainer_mode != "sync":
            return super()._resolve_filter_groups_metric()
        # verl would warn that it ignores the budget; our buffer does not ignore it
        with temporarily(self.config.algorithm.filter_groups, "max_num_gen_batches", 0):
            return super()._resolve_filter_groups_metric()

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
        client_class: type[LLMServerClient] = SeedingClient
        if isinstance(super().get_llm_client(), FullyAsyncLLMServerClient):
            # It joins the segments of an interrupted response and drops what it does not know, such as entropies.
            client_class = EntropyFullyAsyncClient if self.entropy_source.from_rollout else SeedingFullyAsyncClient
        manager = getattr(self, "standalone_server_manager", None) or self.llm_server_manager
        return manager.get_client(client_cls=client_class)

    def get_teacher_client(self) -> dict[str, LLMServerClient] | None:
        if self._guide_servers is None:
            return super().get_teacher_client()
        return {CLIENT: self._guide_servers.get_client(client_cls=SeedingClient)}  # verl hands it to the agent loops

    def on_sample_begin(self) -> None:
        self._enter("generating")
        super().on_sample_begin()

    def on_sample_end(self) -> None:
        self.check_servers()  # verl would train on what the other engines have left of the step
        super().on_sample_end()

    def on_train_begin(self) -> None:
        super().on_train_begin()
        self._in_training = True

    # ---------------------------------------------------------------- processes

    def check_processes(self) -> None:
        """Check that the engines, the agent loops, the reward workers and actor ranks are alive, and that no phase
        lasts too long.

        Raises:
            UserError: one is dead, or a phase does.
        """
        self.check_servers()
        dead = ended_actors({name: actor.__ray_ready__.remote() for name, actor in self._workers().items()})
        if dead:
            raise UserError(
                f"{'; '.join(f'{name}: {why}' for name, why in dead.items())}. It was killed, for lack of memory or by "
                f"hand, or its node is gone; the run's log may say more. {self._go_on()}"
            )
        self.phase_limit.check()

    def _workers(self) -> dict[str, Any]:
        """The Ray actors that there are by now, beside the engines and TransferQueue, by name."""
        kinds = {
            "reward worker": getattr(getattr(self, "reward_loop_manager", None), "reward_loop_workers", None),
            "agent loop worker": getattr(getattr(self, "agent_loop_manager", None), "agent_loop_workers", None),
            "actor rank": getattr(getattr(self, "actor_rollout_wg", None), "_workers", None),
        }
        return {f"{kind} {number}": actor for kind, all_ in kinds.items() for number, actor in enumerate(all_ or ())}

    def check_servers(self) -> None:
        """Check that the engine of every rollout server, and of every server of the guide, is alive.

        Raises:
            UserError: one is dead.
        """
        servers = [server for manager in self._rollout_server_managers() for server in manager.server_handles]
        dead = dead_servers(servers)
        if dead:
            raise UserError(
                f"vLLM died ({'; '.join(dead)}). See the engine's traceback in the run's log; if there is none, it was "
                f"probably killed for lack of memory. {self._go_on()}"
            )
        dead = dead_servers(self._guide_servers.server_handles if self._guide_servers else [])
        if dead:
            raise UserError(
                f"the guide's vLLM died ({'; '.join(dead)}; algorithm.guide.model={self.guide.config.model}). See "
                "the engine's traceback in the run's log; if there is none, it was probably killed for lack of "
                f"memory. {self._go_on()}"
            )

    def _go_on(self) -> str:
        return f"The same command with trainer.run_dir={self.run_dir} resumes from the last checkpoint."

    def _add_prompts_to_generate(self, num_prompts: int) -> int:
        # verl replaces failed prompts through this method, without end if the engine is dead.
        if time.monotonic() - self._servers_asked > SERVER_CHECK_INTERVAL:
            self.check_servers()
            self._servers_asked = time.monotonic()
        return super()._add_prompts_to_generate(num_prompts)

    def _next_train_batch(self, num_prompts: int | None = None) -> TensorDict:
        batch = super()._next_train_batch(num_prompts)
        names = self._prompt_names(len(batch))
        tensordict_utils.assign_non_tensor_stack(batch, "uid", names)
        assign_streams(batch, self.config, "train", names)
        return batch

    def _prompt_names(self, count: int) -> list[str]:
        """Names for the next prompts, in place of verl's random ones: the step and the prompt's number in it.

        The same in every run of the same seed, also where a step is repeated after a restart.
        """
        step, prefix = self.global_steps, f"{self.global_steps:06d}-"
        if step != self._drawn[0]:
            # Groups of this very step wait where its first attempt ended with a spent budget.
            taken = [int(key.removeprefix(prefix)) for key in prompt_keys("train") if key.startswith(prefix)]
            self._drawn = (step, max(taken, default=-1) + 1)
        first = self._drawn[1]
        self._drawn = (step, first + count)
        return [f"{prefix}{number:06d}" for number in range(first, first + count)]

    # ---------------------------------------------------------------- one step

    def prepare_step(self) -> dict:
        sampling = self._sampling()
        if sampling is None:
            return super().prepare_step()
        prompts = sampling.begin_step(self.global_steps, "train", self.config.data.train_batch_size)
        if prompts:
            self._add_prompts_to_generate(prompts)
        return {}

    def step(self, metrics: dict, timing_raw: dict) -> KVBatchMeta:
        self._pass_seconds.clear()
        try:
            batch = super().step(metrics, timing_raw)
            metrics.update(self._pass_seconds)  # sums; verl averages the metrics of a step's updates
            self._not_logged = metrics, _groups(batch)
            return batch
        except (BudgetSpentError, StepGivenUpError):
            if self.trainer_mode != "sync":
                raise
            self.on_sample_end()  # puts the engines to sleep: the actor needs their memory to save
            self._save_before_the_end()
            raise

    def _save_before_the_end(self) -> None:
        """Save the last trained step, with the groups that the step which could not be trained has generated."""
        self.global_steps -= 1  # nothing was trained in this step
        if self.global_steps == 0:
            return
        if self._checkpointed != self.global_steps:
            self._save_checkpoint()
            return
        # The weights are saved. The data has advanced since, and groups wait that the checkpoint does not have.
        position = self.train_dataloader.state_dict()
        write_atomically(self._checkpoint_dir() / "data.pt", lambda path: torch.save(position, path))
        self._save_groups()

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        self._enter("computing old log-probs")
        batch = self._old_log_prob(batch, metrics)
        if self.guide.on:
            self.guide.replace_denominators(batch, metrics)
        return batch

    def _old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        """verl's pass, or the rollout's log-probs, as ``algorithm.entropy.source`` says."""
        if not self.entropy_source.from_rollout:
            return super()._compute_old_log_prob(batch, metrics)
        if self.entropy_source.compares:
            return self._compared_old_log_prob(batch, metrics)
        if not self.actor_pass.is_due(self.global_steps):
            self._pass_seconds.update(self.actor_pass.skipped(_tokens(batch)))
            return super()._compute_old_log_prob(batch, metrics)
        with temporarily(self.config.algorithm.rollout_correction, "bypass_mode", False):
            batch = self._compared_old_log_prob(batch, metrics)
        # This step too trains on the rollout's log-probs: this overwrites the actor's with them.
        return super()._compute_old_log_prob(batch, metrics)

    def _compared_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        """Run the actor's pass, time it, and compare its entropies with the rollout's."""
        started = time.perf_counter()
        batch = super()._compute_old_log_prob(batch, metrics)
        self._pass_seconds.update(self.actor_pass.ran(time.perf_counter() - started, _tokens(batch)))
        actor, rollout, versions, mask = fetch(batch, "entropy", ENTROPIES, VERSIONS)
        # Weights are sent at the end of a step, with its number; old log-probs are always of those weights.
        metrics.update(
            agreement(rollout, actor, mask & own_rows(batch.keys), current=versions == self.global_steps - 1)
        )
        return batch

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        self._skips_update = self._check_inputs(batch)
        if self._skips_update:
            empty = {key: torch.zeros(len(row)) for key, row in fetch_rows(batch, "response_mask").items()}
            for column in ("advantages", "returns"):
                put_rows(batch.partition_id, column, empty)
            return batch
        infos = reward_infos(batch.partition_id, batch.keys)
        context = self._credit_context(batch, infos)
        with credit_context(context):
            batch = super()._compute_advantage(batch, metrics)
        if self.guide.on:
            self.guide.use_own_statistics(batch)
        metrics["training/lone_responses"] = self._zero_lone_responses(batch)
        advantages, mask = fetch(batch, "advantages")
        self._skips_update = self.not_finite.batch(self.global_steps, batch.keys, {"advantages": advantages}, mask)
        metrics.update(_credit_metrics(batch, context, advantages, mask))
        real = mask.any(-1).tolist()
        judged = [info for info, valid in zip(infos, real, strict=True) if valid]
        metrics.update(verifier_failures(judged) | legal_share(judged))
        metrics["training/accuracy"] = context.correct[mask.any(-1)].float().mean().item()
        if self.guide.on:
            metrics.update(self.guide.metrics(batch, context.correct, mask))
        self._dump_credit(batch, context, advantages, mask)
        self._keep_credit_samples(batch, context, advantages, mask)
        return batch

    def _check_inputs(self, batch: KVBatchMeta) -> bool:
        """Look for NaN and infinite values in what advantages are made of; returns whether to skip the update.

        Raises:
            NotFiniteError: there are some, and the run is to stop. The weights are those of the step before.
        """
        names = ["rm_scores", "old_log_probs", self.entropy_source.column]
        if self.config.actor_rollout_ref.rollout.calculate_log_probs:
            names.append("rollout_log_probs")
        *columns, mask = fetch(batch, *names)
        try:
            return self.not_finite.batch(
                self.global_steps,
                batch.keys,
                dict(zip(names, columns, strict=True)),
                mask,
                lambda: {"responses": fetch_rows(batch, "responses")},
            )
        except NotFiniteError:
            if self.trainer_mode == "sync":  # elsewhere, earlier updates of this step may have changed the weights
                self._save_before_the_end()
            raise

    def _credit_context(self, batch: KVBatchMeta, infos: list[dict[str, Any]]) -> CreditContext:
        """What the estimator needs and verl does not pass it."""
        entropy, _ = fetch(batch, self.entropy_source.column)
        method = algorithm_of(self.config)
        reads_log_probs = method is not None and "old_log_probs" in method.needs
        return CreditContext(
            self._verdicts(batch, infos),
            entropy,
            overlong(self.config),
            _scores(infos),
            old_log_probs=fetch(batch, "old_log_probs")[0] if reads_log_probs else None,
            seed=SEED_STRIDE * (self.config.get("seed") or 0) + self.global_steps,
            guide=~own_rows(batch.keys)[:, 0] if self.guide.on else None,
        )

    def _zero_lone_responses(self, batch: KVBatchMeta) -> int:
        """Set the advantage of the only response of a group to 0, as GTPO and GRPO-S do; returns how many there are.

        Failed rollouts leave such groups. verl's estimators compare a lone response with 0 instead of a mean, so its
        advantage would be its whole reward.
        """
        lone = lone_responses(batch)
        if lone and self.config.algorithm.adv_estimator in GROUP_MEAN_ESTIMATORS:
            for column in ("advantages", "returns"):
                rows = fetch_rows(batch, column, lone)
                put_rows(batch.partition_id, column, {key: torch.zeros_like(row) for key, row in rows.items()})
        return len(lone)

    def _dump_credit(
        self, batch: KVBatchMeta, context: CreditContext, advantages: torch.Tensor, mask: torch.Tensor
    ) -> None:
        """Write all that a batch's update depends on to ``credit/<step>.pt``, every ``trainer.credit_dump_freq`` steps.

        A step of several updates (``parameter_sync_step``) writes ``<step>-0.pt``, ``<step>-1.pt``, ...
        """
        every = self.config.trainer.credit_dump_freq
        if every <= 0 or self.global_steps % every:
            return
        kept = {"old_log_probs": "old_log_probs", "rewards": "rm_scores", "responses": "responses"}
        if self.entropy_source.from_rollout:
            kept |= {column: column for column in self.entropy_source.rollout_columns}
        if self.config.actor_rollout_ref.rollout.calculate_log_probs:
            kept["rollout_log_probs"] = "rollout_log_probs"
        *columns, _ = fetch(batch, *kept.values())
        name = f"{self.global_steps}" + (f"-{self.local_trigger_step}" if self.parameter_sync_step > 1 else "")
        directory = self.run_dir / "credit"
        directory.mkdir(exist_ok=True)
        torch.save(
            {
                "keys": list(batch.keys),
                "prompts": [row.clone() for row in fetch_rows(batch, "prompts").values()],
                "response_mask": mask,
                "correct": context.correct,
                "entropy": context.entropy,
                "advantages": advantages,
            }
            | dict(zip(kept, columns, strict=True)),
            directory / f"{name}.pt",
        )

    def _keep_credit_samples(
        self, batch: KVBatchMeta, context: CreditContext, advantages: torch.Tensor, mask: torch.Tensor
    ) -> None:
        """Append a correct and a wrong response of one prompt to ``credit_samples.jsonl``, in steps that validate."""
        every = self.config.trainer.test_freq
        if every <= 0 or (self.global_steps % every and self.global_steps != self.total_training_steps):
            return
        rows = contrasting_pair([uid_of(key) for key in batch.keys], context.correct, mask & own_rows(batch.keys))
        keys = [batch.keys[row] for row in rows]
        if not keys:
            return
        prompts, responses = (fetch_rows(batch, column, keys) for column in ("prompts", "responses"))
        samples = [
            credit_sample(
                self.tokenizer.decode,
                prompts[key],
                responses[key],
                bool(context.correct[row]),
                advantages[row],
                context.entropy[row],
                mask[row],
            )
            for row, key in zip(rows, keys, strict=True)
        ]
        append_json_line(self.run_dir / SAMPLES_FILE, {"step": self.global_steps, "samples": samples})

    def _verdicts(self, batch: KVBatchMeta, infos: list[dict[str, Any]]) -> torch.Tensor:
        """(B,) bool: `acc` of the verifier against `algorithm.correct_threshold`."""
        threshold = self.config.algorithm.correct_threshold
        return torch.tensor(
            [
                is_correct(verdict(info, f"on response {key}"), threshold)
                for key, info in zip(batch.keys, infos, strict=True)
            ]
        )

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        self._enter("updating the actor")
        metrics["training/skipped_updates"] = self.not_finite.skipped
        if self._skips_update:
            return batch
        if self.guide.on:
            self.guide.mark(batch)
        batch = self._update_actor_on_its_tokens(batch, metrics)
        self.not_finite.update(self.global_steps, metrics, lambda: self._contents(batch))
        metrics["training/skipped_updates"] = self.not_finite.skipped
        return batch

    def _contents(self, batch: KVBatchMeta) -> dict[str, Any]:
        """What is kept of a batch whose update went wrong."""
        columns = ("old_log_probs", "advantages")
        *values, mask = fetch(batch, *columns)
        return {"keys": batch.keys, "response_mask": mask, "responses": fetch_rows(batch, "responses")} | dict(
            zip(columns, values, strict=True)
        )

    def _update_actor_on_its_tokens(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        """verl's update, without truncated responses under ``algorithm.overlong_filtering``."""
        if not self.config.algorithm.overlong_filtering:
            return super()._update_actor(batch, metrics)
        limit = self.config.data.max_response_length
        masks = {key: mask for key, mask in fetch_rows(batch, "response_mask").items() if len(mask) >= limit}
        metrics["training/overlong_filtered_share"] = len(masks) / len(real_rows(batch))
        empty = {key: torch.zeros_like(mask) for key, mask in masks.items()}
        with replaced_rows(batch.partition_id, "response_mask", masks, inside=empty):  # metrics are of all responses
            return super()._update_actor(batch, metrics)

    # ---------------------------------------------------------------- what is kept of a run

    def _compute_metrics(
        self, batch: KVBatchMeta, metrics: dict, timing_raw: dict, global_steps: int, epoch: int
    ) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps=global_steps, epoch=epoch)
        limit = self.config.data.max_response_length
        real = real_rows(batch)
        truncated = [len(mask) >= limit for mask in fetch_rows(batch, "response_mask", list(real)).values()]
        metrics["response_length/truncated_share"] = sum(truncated) / len(truncated)
        self.recorder.write(global_steps, metrics)
        record_groups(self.run_dir, global_steps, _groups(batch))
        self._not_logged = None
        for warning in self.guards.check(global_steps, metrics):
            logger.warning("%s", warning)

    def _checkpoint_dir(self) -> Path:
        return Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"

    def _save_checkpoint(self) -> None:
        self._enter("saving a checkpoint")
        trainer = self.config.trainer
        keep = 1 if trainer.get("remove_previous_ckpt_in_save") else trainer.get("max_actor_ckpt_to_keep")
        # before verl's part, which ends by naming the checkpoint the latest
        self._save_groups()
        if self._not_logged is not None:
            keep_step(self._checkpoint_dir(), self.global_steps, *self._not_logged)
        with ExitStack() as stack:
            # verl removes the old checkpoint before the new one is complete, and forgets those of earlier attempts
            for key in ("max_actor_ckpt_to_keep", "max_critic_ckpt_to_keep", "remove_previous_ckpt_in_save"):
                if trainer.get(key) is not None:
                    stack.enter_context(temporarily(trainer, key, None))
            super()._save_checkpoint()
        prune(Path(trainer.default_local_dir), keep)
        link_model(self.run_dir)  # now, because the run may be killed
        self._checkpointed = self.global_steps

    def _save_groups(self) -> None:
        sampling = self._sampling()
        if sampling is not None:
            save_groups(self._checkpoint_dir(), "train", sampling.last_step)

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        if self.global_steps == 0:
            return
        trainer = self.config.trainer
        folder = Path(trainer.resume_from_path) if trainer.resume_mode == "resume_path" else self._checkpoint_dir()
        if folder.resolve() == self._checkpoint_dir().resolve() and not trainer.del_local_ckpt_after_load:
            self._checkpointed = self.global_steps
        if restore_step(self.run_dir, folder):
            logger.warning(
                "Step %d had not been logged when the run ended: restored from %s.", self.global_steps, folder
            )
        sampling = self._sampling()
        if sampling is None:
            return
        groups, sampling.last_step = restore_groups(folder, "train", with_entropies=self.entropy_source.from_rollout)
        if groups:
            logger.info("Restored %d groups carried over from %s.", groups, folder)

    def _dump_generations(
        self, inputs: Any, outputs: Any, gts: Any, scores: Any, reward_extra_infos_dict: dict[str, Any], dump_path: str
    ) -> None:
        columns = reward_extra_infos_dict
        if dump_path == self.config.trainer.validation_data_dir:  # training rollouts have a directory of their own
            columns = columns | dump_columns(self._validated, columns["uid"])
        super()._dump_generations(inputs, outputs, gts, scores, columns, dump_path)

    def _validate(self) -> dict[str, float]:
        self._enter("validating")
        with recorded(self.replay_buffer, self.agent_loop_manager, self.config) as self._validated:
            metrics = super()._validate()
        self.check_servers()  # verl would take the responses of the other engines for all
        if not self._in_training:  # metrics of later validations are recorded with their step
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
        stopping = (self.run_dir / STOP_FILE).exists()
        if stopping and self._checkpointed != self.global_steps:
            self._save_checkpoint()  # first: sending the weights wakes the engines, and saving needs their memory
        self._enter("sending weights to the engines")
        super().on_step_end()
        if not stopping:
            return
        logger.warning(
            "Stopping after step %d on request; its checkpoint is in %s.",
            self.global_steps,
            self.config.trainer.default_local_dir,
        )
        self.total_training_steps = self.global_steps


def _groups(batch: KVBatchMeta) -> dict[str, int]:
    """{uid: the step in which its responses were generated} of the groups of a batch."""
    return {uid_of(key): tag["global_steps"] for key, tag in real_rows(batch).items()}


def _tokens(batch: KVBatchMeta) -> int:
    """Tokens of prompts and responses in a batch."""
    return sum(tag["seq_len"] for tag in batch.tags)


def _credit_metrics(
    batch: KVBatchMeta, context: CreditContext, advantages: torch.Tensor, mask: torch.Tensor
) -> dict[str, float]:
    """The metrics ``credit/*`` of a batch.

    Args:
        batch: B rows.
        context: of the estimator; its metrics are empty for an estimator of verl's.
        advantages: (B, T), those that the run trains on.
        mask: (B, T) bool.
    """
    group = group_ids(group_names(batch.keys))
    found = credit_metrics(advantages, mask, group, context.correct, context.entropy)
    found |= context.metrics  # an estimator's own take precedence, such as sign flips before preserve_sign
    found["entropy_all"] = context.entropy[mask].mean().item()
    return {f"credit/{name}": value for name, value in found.items()}


def _scores(infos: list[dict[str, Any]]) -> torch.Tensor | None:
    """(B,) the verifier's scores, without the overlong penalty that verl's reward manager adds; None where it has
    none.
    """
    if any("score" not in info for info in infos):
        return None
    return torch.tensor([float(info["score"]) for info in infos])


def trainer_class(trainer_mode: str) -> type[CreditAssignmentMixin]:
    """verl's trainer of this mode, with credit assignment.

    It is not registered under another name: verl compares the name of the mode with literals in several places.
    """
    stock = get_trainer_cls(trainer_mode)
    if trainer_mode == "separate_async":
        # verl 0.9.1 passes `flush=` to logger.info there when hybrid_engine=false, and the job ends with a TypeError.
        logging.getLogger(stock.__module__).setLevel(logging.WARNING)
    return type(f"CreditAssignment{stock.__name__}", (CreditAssignmentMixin, stock), {"__module__": __name__})
