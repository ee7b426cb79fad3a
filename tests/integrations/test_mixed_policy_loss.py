"""The loss of mixed-policy DAPO through verl's own `ppo_loss`, as its engines call it: nested columns, micro-batches
and ranks.
"""

import math
from functools import partial
from typing import Any

import pytest
import torch
from actor_config import actor
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.config import ActorConfig
from verl.workers.utils.losses import ppo_loss

from gtpo_verl.integrations.losses import GUIDE_MASK, GTPOPolicyLossConfig, guided_ppo_loss

ROWS, PROMPT = 12, 3


def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


class Batch:
    """Responses of 1 to 9 tokens, every third the guide's, in float64."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(1, 10, (ROWS,), generator=generator).tolist()

        def column(scale: float, offset: float = 0.0) -> list[torch.Tensor]:
            return [
                offset + scale * torch.randn(length, generator=generator, dtype=torch.float64)
                for length in self.lengths
            ]

        self.old = [-row.abs() for row in column(1.0)]
        self.phi = [-row.abs() for row in column(1.0)]
        self.new = [(old + step).clamp(max=0).requires_grad_() for old, step in zip(self.old, column(0.5), strict=True)]
        self.advantages = [row[:1].expand(len(row)) for row in column(1.0)]
        self.guide = [number % 3 == 2 for number in range(ROWS)]

    def denominators(self, ratio: str) -> list[torch.Tensor]:
        """`old_log_probs` as the trainer leaves them."""
        of_guide = {"phi": self.phi, "one": [torch.zeros_like(row) for row in self.old], "old": self.old}[ratio]
        return [phi if guide else old for old, phi, guide in zip(self.old, of_guide, self.guide, strict=True)]

    def data(self, rows: list[int], ratio: str, ranks: int) -> tuple[dict[str, Any], TensorDict]:
        """What an engine gives to the loss for a micro-batch of these rows."""
        old = self.denominators(ratio)
        columns = {
            "prompts": jagged([torch.ones(PROMPT, dtype=torch.long) for _ in rows]),
            "responses": jagged([torch.ones(self.lengths[row], dtype=torch.long) for row in rows]),
            "response_mask": jagged([torch.ones(self.lengths[row], dtype=torch.long) for row in rows]),
            "old_log_probs": jagged([old[row] for row in rows]),
            "advantages": jagged([self.advantages[row] for row in rows]),
            GUIDE_MASK: jagged([torch.full((self.lengths[row],), int(self.guide[row])) for row in rows]),
        }
        data = TensorDict(columns, batch_size=len(rows))
        tu.assign_non_tensor(
            data, dp_size=ranks, batch_num_tokens=sum(self.lengths), global_batch_size=ROWS, loss_scale_factor=None
        )
        # the model's output begins one token early and has the prompt's
        pad = torch.zeros(PROMPT - 1, dtype=torch.float64)
        end = torch.zeros(1, dtype=torch.float64)
        outputs = jagged([torch.cat([pad, self.new[row], end]) for row in rows])
        return {"log_probs": outputs}, data

    def run(self, loss: Any, ratio: str, ranks: int = 1, size: int = ROWS) -> tuple[float, list[torch.Tensor]]:
        """The loss of the batch and its gradient, in micro-batches of this size, dealt to so many ranks."""
        for row in self.new:
            row.grad = None
        total = 0.0
        for rank in range(ranks):
            mine = list(range(rank, ROWS, ranks))
            for first in range(0, len(mine), size):
                output, data = self.data(mine[first : first + size], ratio, ranks)
                value, _ = loss(model_output=output, data=data)
                (value / ranks).backward()  # verl averages gradients over ranks
                total += value.item() / ranks
        return total, [row.grad.clone() for row in self.new if row.grad is not None]


def config(loss_mode: str, **changes: Any) -> ActorConfig:
    return actor(GTPOPolicyLossConfig(loss_mode=loss_mode), **changes)


def mixed(clip: str = "dapo", gamma: float | None = None, **changes: Any) -> Any:
    return partial(guided_ppo_loss, config("mixed", **changes), clip=clip, shape_gamma=gamma)


def vanilla() -> Any:
    return partial(ppo_loss, config("vanilla"))


SPLITS = [(1, ROWS), (1, 5), (1, 1), (2, 4), (2, 1)]


@pytest.mark.parametrize(("ranks", "size"), SPLITS)
def test_verls_vanilla_loss_with_other_denominators_is_the_mixed_objective(ranks: int, size: int) -> None:
    for seed in range(3):
        batch = Batch(seed)
        expected, gradient = batch.run(vanilla(), "phi")
        for loss in (mixed(), vanilla()):
            found, its_gradient = batch.run(loss, "phi", ranks, size)
            assert found == pytest.approx(expected, abs=1e-12, rel=0)
            for ours, theirs in zip(its_gradient, gradient, strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)


def objective(batch: Batch, ratio: str, clip: str, gamma: float | None) -> float:
    """1/Z of both sums, by a loop over tokens."""
    total = 0.0
    for row, guide in enumerate(batch.guide):
        for t in range(batch.lengths[row]):
            A = batch.advantages[row][t].item()
            log_phi = {"phi": batch.phi[row][t].item(), "one": 0.0, "old": batch.old[row][t].item()}[ratio]
            w = math.exp(batch.new[row][t].item() - (log_phi if guide else batch.old[row][t].item()))
            if guide and clip == "none":
                total += A * (w if gamma is None else w / (w + gamma))
                continue
            term = min(w * A, min(max(w, 0.8), 1.28) * A)
            total += max(term, 10 * A) if A < 0 else term
    return total / sum(batch.lengths)


OBJECTIVES = [
    ("phi", "dapo", None),
    ("phi", "none", None),
    ("phi", "none", 0.1),
    ("one", "none", None),
    ("one", "none", 0.1),
    ("old", "dapo", None),
    ("old", "none", None),
]


@pytest.mark.parametrize(("ranks", "size"), [(1, ROWS), (2, 4)])
@pytest.mark.parametrize(("ratio", "clip", "gamma"), OBJECTIVES)
def test_every_objective_against_the_loop(ratio: str, clip: str, gamma: float | None, ranks: int, size: int) -> None:
    batch = Batch(7)
    found, _ = batch.run(mixed(clip, gamma), ratio, ranks, size)
    assert found == pytest.approx(-objective(batch, ratio, clip, gamma), abs=1e-12, rel=0)


def test_the_objectives_differ() -> None:
    batch = Batch(7)
    assert len({round(objective(batch, *settings), 6) for settings in OBJECTIVES}) == len(OBJECTIVES)


def test_without_a_guide_it_is_verls_vanilla_loss_bit_for_bit() -> None:
    """With `guide.mode=off` the workers keep verl's own `ppo_loss`, and no column says which rows are the guide's."""
    batch = Batch(1)
    expected, gradient = batch.run(vanilla(), "old", size=5)
    for loss in (partial(ppo_loss, config("mixed")), mixed()):
        batch.guide = [False] * ROWS
        found, its_gradient = batch.run(loss, "old", size=5)
        assert found == expected
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(its_gradient, gradient, strict=True))


@pytest.mark.parametrize(("ranks", "size"), [(1, ROWS), (2, 4)])
@pytest.mark.parametrize(("ratio", "clip", "gamma"), [("phi", "dapo", None), ("one", "none", 0.1)])
def test_grpo_s_has_a_ratio_to_the_guide_for_each_of_its_responses(
    ratio: str, clip: str, gamma: float | None, ranks: int, size: int
) -> None:
    batch = Batch(4)
    loss = partial(guided_ppo_loss, config("grpo_s", loss_agg_mode="seq-mean-token-mean"), clip=clip, shape_gamma=gamma)
    found, _ = batch.run(loss, ratio, ranks, size)
    total = 0.0
    for row, guide in enumerate(batch.guide):
        A = batch.advantages[row][0].item()
        w = (batch.new[row] - batch.denominators(ratio)[row]).exp().mean().item()
        free = guide and clip == "none"
        total += A * w / (w + 0.1) if free else min(w * A, min(max(w, 0.8), 1.28) * A)
    assert found == pytest.approx(-total / ROWS, abs=1e-12, rel=0)


def test_one_loss_does_not_know_the_guide_of_another() -> None:
    batch = Batch(2)
    batch.run(mixed("none", 0.1), "one")
    loss = partial(ppo_loss, config("mixed"))
    assert batch.run(loss, "phi")[0] == batch.run(vanilla(), "phi")[0]


def test_the_open_clip_of_luffy_binds_nowhere() -> None:
    """On own rows the loss is -w A, on guide rows that of the shaping."""
    batch = Batch(3)
    found, _ = batch.run(mixed("none", 0.1, clip_ratio_low=1.0, clip_ratio_high=1e9, clip_ratio_c=1e9), "one")
    total = 0.0
    for row, guide in enumerate(batch.guide):
        w = (batch.new[row] - (0 if guide else batch.old[row])).exp()
        total += (batch.advantages[row] * (w / (w + 0.1) if guide else w)).sum().item()
    assert found == pytest.approx(-total / sum(batch.lengths), abs=1e-12, rel=0)
