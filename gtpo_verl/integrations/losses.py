"""Policy losses `grpo_s`, `ce_gppo`, `aspo`, `dcpo_clip` and `mixed` in verl's registry.

verl calls them for every micro-batch with the sizes of the global batch in `config.global_batch_info`, with which its
`agg_loss` makes the sum over micro-batches and the mean over data-parallel ranks the loss of the whole batch.
"""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss
from verl.workers.config import ActorConfig, PolicyLossConfig

from gtpo_verl.algorithms import losses as surrogates
from gtpo_verl.algorithms.config import NotNegative, ZeroToOne, check
from gtpo_verl.algorithms.grpo_s import GRPO_S
from gtpo_verl.errors import UserError
from gtpo_verl.integrations.temporarily import bound

KEY = "actor_rollout_ref.actor.policy_loss"
GUIDE_MASK = "guide_mask"  # TransferQueue's column, next to response_mask: 1 on the tokens of the guide's rows
Losses = tuple[torch.Tensor, surrogates.Metrics]

_guided: ContextVar[dict[str, Any] | None] = ContextVar("gtpo_verl_guided", default=None)


@dataclass
class GTPOPolicyLossConfig(PolicyLossConfig):
    """verl's policy loss settings and those of `grpo_s` and `ce_gppo`; selected by
    `actor_rollout_ref.actor.policy_loss._target_`.

    seq_clip_ratio_low, seq_clip_ratio_high: clip range of the sequence ratio, closer to 1 than a token's.
    seq_ratio: `arithmetic` (GRPO-S) or `geometric` (GSPO's ratio).
    beta1, beta2: of `ce_gppo`, the gradient that clipped tokens of negative and of positive advantage keep.
    """

    seq_clip_ratio_low: float = 0.2
    seq_clip_ratio_high: float = 0.28
    seq_ratio: str = "arithmetic"
    beta1: float = 0.75
    beta2: float = 1.0

    def __post_init__(self) -> None:
        if self.seq_ratio not in ("arithmetic", "geometric"):
            raise UserError(f"{KEY}.seq_ratio must be arithmetic or geometric, got {self.seq_ratio!r}")
        kinds = dict.fromkeys(("seq_clip_ratio_high", "beta1", "beta2"), NotNegative) | {
            "seq_clip_ratio_low": ZeroToOne
        }
        try:
            for name, kind in kinds.items():
                check(f"{KEY}.{name}", getattr(self, name), kind)
        except ValueError as error:
            raise UserError(str(error)) from error


def guided_ppo_loss(
    config: ActorConfig,
    model_output: dict[str, Any],
    data: TensorDict,
    dp_group: Any = None,
    *,
    clip: str,
    shape_gamma: float | None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """verl's `ppo_loss`, in which the policy losses `mixed` and `grpo_s` know the guide's rows of a micro-batch.

    The trainer gives it to the actor's workers, with `clip` and `shape_gamma` of `algorithm.guide`; `data` has the
    column `guide_mask`, (T_i,) a row.
    """
    from verl.workers.utils.losses import ppo_loss  # with pandas and datasets, for which no other process waits

    rows = data[GUIDE_MASK].to_padded_tensor(0).bool().any(1)
    with bound(_guided, {"guide": rows, "clip": clip, "shape_gamma": shape_gamma}):
        return ppo_loss(config, model_output, data, dp_group)


def _of_guide(log_prob: torch.Tensor) -> dict[str, Any]:
    """What `guided_ppo_loss` says of this micro-batch, for `mixed_loss`; without it, all rows are the policy's own."""
    found = _guided.get() or {"guide": torch.zeros(len(log_prob), dtype=torch.bool)}
    return found | {"guide": found["guide"].to(log_prob.device)}


def _grpo_s(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str,
    config: DictConfig | ActorConfig,
) -> Losses:
    """The per-sequence clipped surrogate; raises UserError for settings and advantages that are not of sequences."""
    if loss_agg_mode != GRPO_S.aggregation:
        raise UserError(
            "policy loss grpo_s is a mean over sequences: set "
            f"actor_rollout_ref.actor.loss_agg_mode={GRPO_S.aggregation}, not {loss_agg_mode}"
        )
    settings = config.policy_loss
    if not isinstance(settings, GTPOPolicyLossConfig):
        raise UserError(
            "policy loss grpo_s needs its own settings: set actor_rollout_ref.actor.policy_loss._target_="
            "gtpo_verl.integrations.losses.GTPOPolicyLossConfig"
        )
    losses, metrics = surrogates.mixed_loss(
        log_prob,
        old_log_prob,
        one_per_response(advantages, response_mask),
        response_mask,
        clip_ratio_low=settings.seq_clip_ratio_low,
        clip_ratio_high=settings.seq_clip_ratio_high,
        ratio=settings.seq_ratio,
        **_of_guide(log_prob),
    )
    # The mean over the tokens of a response gives its loss back, and agg_loss leaves empty responses out.
    return losses.unsqueeze(1).expand_as(log_prob), metrics


def one_per_response(advantages: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """(B,) the advantage of each response, taken from its first valid token."""
    mask = response_mask != 0
    first = mask.to(torch.int8).argmax(dim=1, keepdim=True)
    values = advantages.gather(1, first)
    if bool(((advantages != values) & mask).any()):
        raise UserError(
            "policy loss grpo_s got advantages that differ inside a response: set algorithm.adv_estimator to grpo_s or "
            "grpo, or actor_rollout_ref.actor.policy_loss.loss_mode=vanilla for token-level advantages"
        )
    return values.squeeze(1)


def _of_tokens(
    loss: Callable[..., Losses],
    *tensors: torch.Tensor,
    loss_agg_mode: str,
    config: DictConfig | ActorConfig,
    settings: Sequence[str] = (),
) -> Losses:
    """A per-token loss of `algorithms.losses` with the actor's clip ratios, and these settings of `policy_loss`."""
    clips = {key: config[key] for key in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")}
    return loss(*tensors, **clips, **{key: config.policy_loss[key] for key in settings})


def _mixed(log_prob: torch.Tensor, *others: Any, **clips: Any) -> Losses:
    loss: Callable[..., Losses] = surrogates.mixed_loss
    return loss(log_prob, *others, **_of_guide(log_prob), **clips)


def _register(name: str, loss: Callable[..., Losses]) -> None:
    """Register a loss whose tensors are (micro-batch, T). What verl calls returns the share of the micro-batch in the
    loss of the global batch, and `actor/...` metrics.
    """

    @register_policy_loss(name)
    def policy_loss(
        old_log_prob: torch.Tensor,
        log_prob: torch.Tensor,
        advantages: torch.Tensor,
        response_mask: torch.Tensor,
        loss_agg_mode: str = "token-mean",
        config: DictConfig | ActorConfig | None = None,
        rollout_is_weights: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        assert config is not None
        losses, metrics = loss(
            log_prob, old_log_prob, advantages, response_mask, loss_agg_mode=loss_agg_mode, config=config
        )
        if rollout_is_weights is not None:
            losses = losses * rollout_is_weights
        mean = agg_loss(
            loss_mat=losses, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info
        )
        return mean, _named(metrics)


def _named(metrics: surrogates.Metrics) -> dict[str, float]:
    """verl's names where verl has the metric."""
    named = {f"pg_{name}" if name.startswith("clipfrac") else name: value for name, value in metrics.items()}
    return {f"actor/{name}": value.item() for name, value in named.items()}


_register(GRPO_S.loss, _grpo_s)
_register("ce_gppo", partial(_of_tokens, surrogates.ce_gppo_loss, settings=("beta1", "beta2")))
_register("aspo", partial(_of_tokens, surrogates.aspo_loss))
_register("dcpo_clip", partial(_of_tokens, surrogates.dcpo_clip_loss))
_register("mixed", partial(_of_tokens, _mixed))
