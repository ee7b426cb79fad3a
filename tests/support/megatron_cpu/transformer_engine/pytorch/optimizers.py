"""Adam and SGD. The counter of steps is the group's, and Megatron's checkpoints build on that.

Without Transformer Engine Megatron-Core falls back to torch's Adam, with which it cannot resume: torch counts the steps
of every parameter, a fresh process has no state to read them from (distrib_optimizer.py:641), and all parameters get
one counter, which torch then advances once for each of them (:822).
"""

from collections.abc import Iterable
from typing import Any

import torch

FusedSGD = torch.optim.SGD


class FusedAdam(torch.optim.Optimizer):
    """Adam, or AdamW under ``adam_w_mode``, with bias correction."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        adam_w_mode: bool,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
        gradient = parameter.grad
        assert gradient is not None
        if self.adam_w_mode:
            parameter.mul_(1 - lr * decay)
        else:
            gradient = gradient + decay * parameter
        state = self.state[parameter]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        scale = (square / (1 - beta2 ** group["step"])).sqrt_().add_(group["eps"])
        parameter.addcdiv_(mean, scale, value=-lr / (1 - beta1 ** group["step"]))
