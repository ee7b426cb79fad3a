"""The guide's rows in groups of responses (`algorithm.guide`): which they are, and what the trainer does with them.

Rows of a group that may go to the guide are its last sessions. They wait for the verdicts on the others, and are then
filled by the guide or by the policy. A row of the guide has a session number from `FIRST_SESSION` on: by its key it is
known everywhere, and no other column or tag says it.
"""

import asyncio
import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.protocol import DataProto
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.debug.metrics import calculate_debug_metrics

from gtpo_verl.algorithms.grpo_s import GRPO_S
from gtpo_verl.algorithms.losses import sequence_loss
from gtpo_verl.algorithms.mixed_policy import GUIDED_LOSSES, GuideConfig, guide_metrics, on_only_advantages
from gtpo_verl.data.traces import Trace
from gtpo_verl.integrations.estimators import group_ids
from gtpo_verl.integrations.losses import GUIDE_MASK, guided_ppo_loss, one_per_response
from gtpo_verl.integrations.standalone import guide_of
from gtpo_verl.integrations.transfer_queue import (
    fetch,
    fetch_rows,
    group_names,
    parse_key,
    put_rows,
    real_rows,
    uid_of,
)
from gtpo_verl.integrations.vllm.agent_loop import RolloutEntropyOutput
from gtpo_verl.runs.correctness import is_correct, verdict

FIRST_SESSION = 1_000_000  # of the guide's rows; those of the policy are numbered from 0


def is_guide(key: str) -> bool:
    """Whether a row is the guide's."""
    return parse_key(key).session >= FIRST_SESSION


def own_rows(keys: Sequence[str]) -> torch.Tensor:
    """(B, 1) bool: the rows that the policy generated, padding included."""
    return torch.tensor([[not is_guide(key)] for key in keys])


# -------------------------------------------------------------------- in the agent loops


class Reserve:
    """The sessions of a group that wait for the verdicts on the others.

    Args:
        config: of the guide.
        size: responses of the group.
        threshold: ``acc`` from which a response is correct.
    """

    def __init__(self, config: GuideConfig, size: int, threshold: float) -> None:
        self.drop_wrong = config.drop_wrong
        self._config = config
        self._first = size - config.reserved
        self._threshold = threshold
        self._open = self._first
        self._verdicts: list[bool] = []
        self._example: AgentLoopOutput | None = None
        self._judged = asyncio.Event()

    def holds(self, session: int) -> bool:
        """Whether this session waits."""
        return session >= self._first

    @contextmanager
    def awaited(self, session: int) -> Iterator[Callable[[Sequence[AgentLoopOutput]], None]]:
        """The response of a session, which those that wait wait for, if it is not one of them: a function that takes
        its scored outputs. Leaving without, as a failed response does, is no verdict.
        """

        def judge(outputs: Sequence[AgentLoopOutput]) -> None:
            if not self.holds(session):
                self._verdicts.append(self.is_correct(outputs[-1]))
                self._example = self._example or outputs[0]

        try:
            yield judge
        finally:
            if not self.holds(session):
                self._open -= 1
                if self._open == 0:
                    self._judged.set()

    def is_correct(self, output: AgentLoopOutput) -> bool:
        """The verdict on a scored response.

        Raises:
            UserError: it has none.
        """
        info = output.extra_fields.get("reward_extra_info", {})
        return is_correct(verdict(info, "on a response of a group with a guide"), self._threshold)

    async def turn(self, session: int) -> tuple[int, AgentLoopOutput] | None:
        """Once the others are judged, for a session that waits: which response of the guide it is, from 0, and one of
        the policy's own to the same prompt; None where the response is to be the policy's.
        """
        await self._judged.wait()
        number = session - self._first
        if self._example is None or number >= self._config.rows(self._verdicts):
            return None
        return number, self._example


def as_output(trace: Trace, example: AgentLoopOutput) -> AgentLoopOutput:
    """A response of the guide with the columns of an own response to the same prompt, so that both fit into a batch."""
    count = len(trace.ids)
    extra = versions_of(example)
    changes: dict[str, Any] = {
        "response_ids": trace.ids,
        "response_mask": [1] * count,
        "num_turns": 2,
        "metrics": AgentLoopMetrics(),
        "reward_score": None,
        "extra_fields": extra | {"turn_scores": [], "tool_rewards": []},
    }
    if example.response_logprobs is not None:
        changes["response_logprobs"] = trace.log_probs or [0.0] * count
    if isinstance(example, RolloutEntropyOutput):
        changes["rollout_entropies"] = torch.zeros(count)
        changes["rollout_versions"] = torch.full((count,), -1, dtype=torch.int32)
    return example.model_copy(update=changes)


def versions_of(example: AgentLoopOutput) -> dict[str, Any]:
    """The versions of the weights of an own response, for one of the guide: it has none, and verl's metrics need
    numbers.
    """
    names = ("global_steps", "min_global_steps", "max_global_steps")
    return {name: example.extra_fields.get(name) for name in names}


# -------------------------------------------------------------------- in the trainer


class GuideRows:
    """What the trainer does with the guide's rows of its batches."""

    def __init__(self, config: DictConfig) -> None:
        self.config = guide_of(config)
        self._run = config
        self._log_probs: dict[str, torch.Tensor] = {}  # the policy's, of the guide's rows of the current batch

    @property
    def on(self) -> bool:
        return self.config.mode != "off"

    def loss(self) -> Any:
        """What the actor's workers call in place of verl's ``ppo_loss``."""
        settings = copy.deepcopy(self._run.actor_rollout_ref.actor)
        settings.policy_loss.loss_mode = GUIDED_LOSSES[settings.policy_loss.loss_mode]
        actor = omega_conf_to_dataclass(settings)
        return partial(guided_ppo_loss, config=actor, clip=self.config.clip, shape_gamma=self.config.shape_gamma)

    def replace_denominators(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> None:
        """Write the denominators of the guide's rows to ``old_log_probs``, and correct what verl has just logged.

        ``rollout_log_probs`` becomes the same where there is one, so that verl's rollout correction, which divides one
        by the other, leaves these rows alone.
        """
        keys = [key for key in real_rows(batch) if is_guide(key)]
        self._log_probs = fetch_rows(batch, "old_log_probs", keys)
        if not keys:
            return
        has_rollout = self._run.actor_rollout_ref.rollout.calculate_log_probs
        if has_rollout:
            metrics.update(_agreement_of_own_rows(batch))
        if self.config.ratio == "phi":
            denominators = fetch_rows(batch, "rollout_log_probs", keys)
        elif self.config.ratio == "one":
            denominators = {key: torch.zeros_like(row) for key, row in self._log_probs.items()}
        else:
            denominators = self._log_probs
        put_rows(batch.partition_id, "old_log_probs", denominators)
        if has_rollout:
            put_rows(batch.partition_id, "rollout_log_probs", denominators)

    def mark(self, batch: KVBatchMeta) -> None:
        """Write the column that tells the loss which rows are the guide's."""
        rows = fetch_rows(batch, "response_mask")
        put_rows(
            batch.partition_id, GUIDE_MASK, {key: torch.full_like(row, is_guide(key)) for key, row in rows.items()}
        )
        if batch.fields is not None and GUIDE_MASK not in batch.fields:  # else all columns go to the workers
            batch.fields = [*batch.fields, GUIDE_MASK]

    def use_own_statistics(self, batch: KVBatchMeta) -> None:
        """Under ``adv_scope=on_only``, replace advantages that verl's estimator has computed over all rows of a
        group; the other estimators have seen to it.
        """
        if self.config.adv_scope == "union" or self._run.algorithm.adv_estimator != "grpo":
            return
        last: dict[str, str] = {}  # a session with several outputs counts once, by its last
        for key in real_rows(batch):
            session = key.rsplit("_", 1)[0]
            last[session] = max(last.get(session, key), key, key=lambda row: parse_key(row).output)
        keys = list(last.values())
        rewards = torch.tensor([row.sum().item() for row in fetch_rows(batch, "rm_scores", keys).values()])
        guide = ~own_rows(keys)[:, 0]
        by_std = self._run.algorithm.norm_adv_by_std_in_grpo
        found = on_only_advantages(rewards, group_ids(group_names(keys)), guide, by_std)
        advantages = dict(zip(last, found.tolist(), strict=True))
        masks = fetch_rows(batch, "response_mask", list(real_rows(batch)))
        rows = {key: advantages[key.rsplit("_", 1)[0]] * mask.float() for key, mask in masks.items()}
        for column in ("advantages", "returns"):
            put_rows(batch.partition_id, column, rows)

    def metrics(self, batch: KVBatchMeta, correct: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
        """Accuracy, share and ratios of the guide's rows.

        Args:
            batch: B rows with their advantages.
            correct: (B,) bool, the verdicts.
            mask: (B, T) bool; a padding row has no token.
        """
        real, not_guide = mask.any(1), own_rows(batch.keys)[:, 0]
        own, of_guide = real & not_guide, real & ~not_guide
        solved = {uid_of(key) for key, right in zip(batch.keys, (own & correct).tolist(), strict=True) if right}
        groups = {uid_of(key) for key in real_rows(batch)}
        found = {
            "own_accuracy": correct[own].float().mean().item(),
            "rows_share": (of_guide.sum() / real.sum()).item(),
            "rescued_groups": len(groups - solved),
        }
        if of_guide.any():
            found["guide_accuracy"] = correct[of_guide].float().mean().item()
            found |= self._ratios(batch, of_guide, mask)
        return {f"guide/{name}": value for name, value in found.items()}

    def _ratios(self, batch: KVBatchMeta, of_guide: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
        denominators, advantages, _ = fetch(batch, "old_log_probs", "advantages")
        policy = torch.zeros_like(denominators)
        for number, key in enumerate(batch.keys):
            if key in self._log_probs:
                policy[number, : len(self._log_probs[key])] = self._log_probs[key]
        actor, on_guide = self._run.actor_rollout_ref.actor, mask & of_guide[:, None]
        found = guide_metrics(policy, denominators, advantages, on_guide, actor.clip_ratio_low, actor.clip_ratio_high)
        loss = actor.policy_loss
        if loss.loss_mode == GRPO_S.loss:
            clip_ratios = loss.seq_clip_ratio_low, loss.seq_clip_ratio_high
            A = one_per_response(advantages, on_guide)
            _, of_sequences = sequence_loss(policy, denominators, A, on_guide, *clip_ratios, loss.seq_ratio)
            found["clipfrac"] = of_sequences["clipfrac"].item()
        return found


def _agreement_of_own_rows(batch: KVBatchMeta) -> dict[str, Any]:
    """verl's ``training/rollout_probs_diff_*`` of own rows: of the others, the rollout's log-probs are the guide's."""
    rollout, actor, responses, mask = fetch(batch, "rollout_log_probs", "old_log_probs", "responses")
    columns = {
        "rollout_log_probs": rollout,
        "old_log_probs": actor,
        "responses": responses,
        "response_mask": mask & own_rows(batch.keys),
    }
    found: dict[str, Any] = calculate_debug_metrics(DataProto(batch=TensorDict(columns, batch_size=len(batch.keys))))
    return found
