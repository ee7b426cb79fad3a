"""What the trainer does with the guide's rows of its batches (`algorithm.guide`)."""

import copy
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.protocol import DataProto
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.debug.metrics import calculate_debug_metrics

from gtpo_verl.algorithms.grpo_s import GRPO_S
from gtpo_verl.algorithms.losses import sequence_loss
from gtpo_verl.algorithms.mixed_policy import GUIDED_LOSSES, guide_metrics, on_only_advantages
from gtpo_verl.integrations.guide import is_guide
from gtpo_verl.integrations.losses import GUIDE_MASK, guided_ppo_loss, one_per_response
from gtpo_verl.integrations.standalone import guide_of
from gtpo_verl.integrations.step.columns import Step
from gtpo_verl.integrations.transfer_queue import put_rows


class GuideRows:
    """The guide's rows of a run's batches; ``on``: whether the run has a guide."""

    def __init__(self, config: DictConfig) -> None:
        self.config = guide_of(config)
        self.on = self.config.mode != "off"
        self._run = config
        self._log_probs: dict[int, torch.Tensor] = {}  # the policy's, of the guide's rows of the current batch

    def loss(self) -> Any:
        """What the actor's workers call in place of verl's ``ppo_loss``."""
        settings = copy.deepcopy(self._run.actor_rollout_ref.actor)
        settings.policy_loss.loss_mode = GUIDED_LOSSES[settings.policy_loss.loss_mode]
        actor = omega_conf_to_dataclass(settings)
        return partial(guided_ppo_loss, config=actor, clip=self.config.clip, shape_gamma=self.config.shape_gamma)

    def replace_denominators(self, step: Step, metrics: dict[str, Any]) -> None:
        """Write the denominators of the guide's rows to ``old_log_probs``, and correct what verl has just logged.

        ``rollout_log_probs`` becomes the same where there is one, so that verl's rollout correction, which divides one
        by the other, leaves these rows alone.
        """
        numbers = step.of_guide.nonzero()[:, 0].tolist()
        self._log_probs = {}
        if not numbers:
            return
        policy = step.rows(step.fetch("old_log_probs")[0])
        self._log_probs = {number: policy[number] for number in numbers}
        columns = ["old_log_probs"]
        if self._run.actor_rollout_ref.rollout.calculate_log_probs:
            columns.append("rollout_log_probs")
            metrics.update(_agreement_of_own_rows(step))
        denominators = self._log_probs
        if self.config.ratio == "phi":
            of_rollout = step.rows(step.fetch("rollout_log_probs")[0])
            denominators = {number: of_rollout[number] for number in numbers}
        elif self.config.ratio == "one":
            denominators = {number: torch.zeros_like(row) for number, row in self._log_probs.items()}
        for column in columns:
            step.put(column, denominators)

    def mark(self, batch: KVBatchMeta) -> None:
        """Write the column that tells the loss which rows are the guide's, those of padding included."""
        lengths = zip(batch.keys, (tag["response_len"] for tag in batch.tags), strict=True)
        rows = {key: torch.full((length,), int(is_guide(key))) for key, length in lengths}
        put_rows(batch.partition_id, GUIDE_MASK, rows)
        if batch.fields is not None and GUIDE_MASK not in batch.fields:  # else all columns go to the workers
            batch.fields = [*batch.fields, GUIDE_MASK]

    def use_own_statistics(self, step: Step) -> None:
        """Under ``adv_scope=on_only``, replace advantages that verl's estimator has computed over all rows of a
        group; the other estimators have seen to it.
        """
        if self.config.adv_scope == "union" or self._run.algorithm.adv_estimator != "grpo":
            return
        sums = [row.sum() for row in step.rows(step.fetch("rm_scores")[0])]
        last, session = step.last_output.unique(return_inverse=True)  # a session with several outputs counts once
        by_std = self._run.algorithm.norm_adv_by_std_in_grpo
        found = on_only_advantages(torch.stack(sums)[last], step.group[last], step.of_guide[last], by_std)
        rows = step.rows(step.of_tokens(found[session]) * step.mask)
        for column in ("advantages", "returns"):
            step.put(column, dict(enumerate(rows)))

    def metrics(self, step: Step) -> dict[str, float]:
        """Accuracy, share and ratios of the guide's rows of a batch with its advantages."""
        of_guide, correct = step.of_guide, step.correct
        solved = step.group[correct & ~of_guide].unique()
        found = {
            "own_accuracy": correct[~of_guide].float().mean().item(),
            "rows_share": of_guide.float().mean().item(),
            "rescued_groups": len(step.group.unique()) - len(solved),
        }
        if of_guide.any():
            found["guide_accuracy"] = correct[of_guide].float().mean().item()
            found |= self._ratios(step)
        return {f"guide/{name}": value for name, value in found.items()}

    def _ratios(self, step: Step) -> dict[str, float]:
        numbers, pad = list(self._log_probs), torch.nn.utils.rnn.pad_sequence
        policy = pad([self._log_probs[number] for number in numbers], batch_first=True)
        denominators, advantages, mask = (
            pad([step.rows(column)[number] for number in numbers], batch_first=True)
            for column in (*step.fetch("old_log_probs", "advantages"), step.mask)
        )
        actor = self._run.actor_rollout_ref.actor
        found = guide_metrics(policy, denominators, advantages, mask, actor.clip_ratio_low, actor.clip_ratio_high)
        loss = actor.policy_loss
        if loss.loss_mode == GRPO_S.loss:
            clip_ratios = loss.seq_clip_ratio_low, loss.seq_clip_ratio_high
            A = one_per_response(advantages, mask)
            _, of_sequences = sequence_loss(policy, denominators, A, mask, *clip_ratios, loss.seq_ratio)
            found["clipfrac"] = of_sequences["clipfrac"].item()
        return found


def _agreement_of_own_rows(step: Step) -> dict[str, Any]:
    """verl's ``training/rollout_probs_diff_*`` of own rows: of the others, the rollout's log-probs are the guide's."""
    names = ("rollout_log_probs", "old_log_probs", "responses")
    columns = dict(zip(names, map(step.padded, step.fetch(*names)), strict=True))
    columns["response_mask"] = step.padded(step.own_mask)
    batch = TensorDict(columns, batch_size=len(step.batch.keys))
    found: dict[str, Any] = calculate_debug_metrics(DataProto(batch=batch))
    return found
