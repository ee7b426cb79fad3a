"""The policy losses as verl calls them: from its registry, per micro-batch, with the sizes of the global batch."""

import subprocess
import sys

import pytest
import torch
from actor_config import actor
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import ActorConfig, PolicyLossConfig

import gtpo_verl.integrations.losses as losses_module
from gtpo_verl.algorithms import algorithm
from gtpo_verl.algorithms.losses import token_loss
from gtpo_verl.config import compose_config
from gtpo_verl.errors import UserError
from gtpo_verl.integrations.launch import verls_own
from gtpo_verl.integrations.losses import GTPOPolicyLossConfig

FEWER = settings(max_examples=30, deadline=None)
TOKEN_LOSSES = ("ce_gppo", "aspo", "dcpo_clip", "mixed")
AGG_MODES = dict.fromkeys(("vanilla", *TOKEN_LOSSES), "token-mean")
AGG_MODES |= dict.fromkeys(("grpo_s", "gspo"), algorithm("grpo_s").aggregation)


def batch(seed: int, rows: int = 8, columns: int = 12, distance: float = 0.4):
    """What verl passes: zeros in the padding; the advantages are those of a sequence-level estimator. One row is
    empty.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, columns + 1, (rows,), generator=generator)
    lengths[-1] = 0
    mask = torch.arange(columns) < lengths[:, None]
    old = -torch.rand(rows, columns, generator=generator, dtype=torch.float64) * mask
    new = old + distance * torch.randn(rows, columns, generator=generator, dtype=torch.float64) * mask
    advantages = torch.randn(rows, 1, generator=generator, dtype=torch.float64) * mask
    return new.requires_grad_(), old, advantages, mask


def run(name: str, config: ActorConfig, new, old, advantages, mask, **kwargs):
    return get_policy_loss_fn(name)(
        old_log_prob=old,
        log_prob=new,
        advantages=advantages,
        response_mask=mask,
        loss_agg_mode=AGG_MODES[name],
        config=config,
        **kwargs,
    )


@pytest.mark.parametrize("name", ["grpo_s", *TOKEN_LOSSES])
@FEWER
@given(st.data())
def test_any_split_into_micro_batches_and_ranks_gives_the_same_loss_and_gradient(name, data):
    new, old, advantages, mask = batch(data.draw(st.integers(0, 2**31)))
    whole = actor()
    sizes = {"batch_num_tokens": int(mask.sum()), "global_batch_size": len(mask), "loss_scale_factor": None}
    whole.global_batch_info.update(sizes | {"dp_size": 1})
    expected, _ = run(name, whole, new, old, advantages, mask)
    expected.backward()
    gradient = new.grad.clone()
    new.grad = None

    order = torch.tensor(data.draw(st.permutations(range(len(mask)))))
    ranks = data.draw(st.sampled_from([1, 2, 4]))
    part = actor()
    part.global_batch_info.update(sizes | {"dp_size": ranks})
    total = torch.zeros((), dtype=torch.float64)
    for rank in order.chunk(ranks):
        for rows in rank.split(data.draw(st.integers(1, len(rank)))):
            # A micro-batch is trimmed to its own longest response.
            width = max(1, int(mask[rows].sum(1).max()))
            piece, _ = run(
                name, part, new[rows, :width], old[rows, :width], advantages[rows, :width], mask[rows, :width]
            )
            total = total + piece / ranks  # verl averages gradients over ranks
    total.backward()
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(new.grad, gradient)


@FEWER
@given(st.integers(0, 2**31), st.sampled_from(["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]))
def test_the_loss_of_tokens_is_verls_own(seed, mode):
    """The one that GTPO trains with is verl's; the losses here are built on `token_loss`."""
    new, old, advantages, mask = batch(seed)
    config = actor()
    losses, metrics = token_loss(new, old, advantages, mask, 0.2, 0.28, 10.0)
    ours = agg_loss(loss_mat=losses, loss_mask=mask, loss_agg_mode=mode, **config.global_batch_info)
    theirs, their_metrics = get_policy_loss_fn("vanilla")(old, new, advantages, mask, mode, config)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(loss, new)[0] for loss in (ours, theirs)))
    named = losses_module._named(metrics)
    assert {name: named[name] for name in their_metrics} == pytest.approx(their_metrics)


@FEWER
@given(st.integers(0, 2**31))
def test_geometric_grpo_s_is_gspo_at_the_same_clip_range(seed):
    new, old, advantages, mask = batch(seed)
    config = actor(GTPOPolicyLossConfig(seq_ratio="geometric", seq_clip_ratio_low=0.1, seq_clip_ratio_high=0.15))
    ours, _ = run("grpo_s", config, new, old, advantages, mask)
    theirs, _ = run("gspo", actor(clip_ratio_low=0.1, clip_ratio_high=0.15), new, old, advantages, mask)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(loss, new)[0] for loss in (ours, theirs)))


def test_grpo_s_has_a_clip_range_of_its_own():
    new, old, advantages, mask = batch(0)
    tight = GTPOPolicyLossConfig(seq_clip_ratio_low=0.0, seq_clip_ratio_high=0.0)
    loss, metrics = run("grpo_s", actor(tight), new, old, advantages, mask)
    same, _ = run("grpo_s", actor(tight, clip_ratio_low=0.5, clip_ratio_high=0.5), new, old, advantages, mask)
    wide, _ = run("grpo_s", actor(), new, old, advantages, mask)
    assert metrics["actor/pg_clipfrac"] > 0
    torch.testing.assert_close(loss, same)
    assert loss != wide


def test_the_dual_clip_can_be_switched_off():
    new, old = torch.full((1, 1), 20.0).log(), torch.zeros(1, 1)
    advantages, mask = torch.full((1, 1), -1.0), torch.ones(1, 1, dtype=torch.bool)
    for name, off in (("vanilla", 1e9), ("mixed", None)):
        assert run(name, actor(), new, old, advantages, mask)[0].item() == pytest.approx(10)
        assert run(name, actor(clip_ratio_c=off), new, old, advantages, mask)[0].item() == pytest.approx(20)


def test_rollout_weights_scale_the_terms():
    new, old, advantages, mask = batch(1)
    for name in ("mixed", "grpo_s"):
        plain, _ = run(name, actor(), new, old, advantages, mask)
        scaled, _ = run(name, actor(), new, old, advantages, mask, rollout_is_weights=torch.full_like(old, 0.5))
        torch.testing.assert_close(scaled, 0.5 * plain)


def test_metrics_have_verls_names_and_are_numbers():
    names = {"pg_clipfrac", "pg_clipfrac_low", "pg_clipfrac_high", "ppo_kl", "ratio_mean", "ratio_spread"}
    for name, extra in (("mixed", {"pg_clipfrac_lower"}), ("grpo_s", set())):
        _, metrics = run(name, actor(), *batch(2))
        assert metrics.keys() == {f"actor/{metric}" for metric in names | extra}
        assert all(isinstance(value, float) for value in metrics.values())


def test_the_ratio_of_a_micro_batch_without_own_tokens_is_1():
    """verl averages over micro-batches."""
    new, old, advantages, mask = batch(2)
    _, metrics = run("mixed", actor(), new, old, advantages, torch.zeros_like(mask))
    assert (metrics["actor/ratio_mean"], metrics["actor/ratio_spread"]) == (1, 0)


def test_the_betas_of_ce_gppo_come_from_its_settings():
    """With both 0 it has the gradient of the clipped loss."""
    gradients = []
    for name, policy_loss in (
        ("vanilla", None),
        ("ce_gppo", GTPOPolicyLossConfig(beta1=0.0, beta2=0.0)),
        ("ce_gppo", None),
    ):
        new, *rest = batch(3, distance=0.8)
        run(name, actor(policy_loss), new, *rest)[0].backward()
        gradients.append(new.grad)
    torch.testing.assert_close(gradients[1], gradients[0])
    assert (gradients[2] - gradients[0]).abs().max() > 1e-4


def test_grpo_s_refuses_another_aggregation():
    new, old, advantages, mask = batch(3)
    with pytest.raises(
        UserError, match=r"set actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean, not token-mean"
    ):
        get_policy_loss_fn("grpo_s")(old, new, advantages, mask, "token-mean", actor())


def test_grpo_s_refuses_settings_it_would_ignore():
    with pytest.raises(UserError, match=r"policy_loss._target_=gtpo_verl.integrations.losses.GTPOPolicyLossConfig"):
        run("grpo_s", actor(PolicyLossConfig(loss_mode="grpo_s")), *batch(3))


def test_grpo_s_refuses_token_level_advantages():
    new, old, advantages, mask = batch(3)
    with pytest.raises(UserError, match="advantages that differ inside a response"):
        run("grpo_s", actor(), new, old, advantages * torch.rand(mask.shape), mask)


def test_settings_arrive_through_verls_config():
    node = OmegaConf.create(
        {
            "_target_": "gtpo_verl.integrations.losses.GTPOPolicyLossConfig",
            "loss_mode": "grpo_s",
            "seq_ratio": "geometric",
            "seq_clip_ratio_high": 0.01,
        }
    )
    config = omega_conf_to_dataclass(node)
    assert isinstance(config, GTPOPolicyLossConfig)
    assert (config.loss_mode, config.seq_ratio, config.seq_clip_ratio_low, config.seq_clip_ratio_high) == (
        "grpo_s",
        "geometric",
        0.2,
        0.01,
    )
    assert config.get("seq_clip_ratio_high") == 0.01


@pytest.mark.parametrize(
    "changes",
    [{"seq_ratio": "harmonic"}, {"seq_clip_ratio_low": 1.5}, {"seq_clip_ratio_high": -0.1}, {"beta1": float("nan")}],
)
def test_impossible_settings(changes):
    with pytest.raises(UserError, match=f"policy_loss.{next(iter(changes))}"):
        GTPOPolicyLossConfig(**changes)


def test_hydra_does_not_hide_what_is_impossible():
    config = compose_config(
        ["setting=quickstart", "hardware=cpu", "actor_rollout_ref.actor.policy_loss.seq_ratio=harmonic"]
    )
    config.actor_rollout_ref.model.path = "model"
    (problem,) = verls_own(config)
    assert "refuses this configuration: actor_rollout_ref.actor.policy_loss.seq_ratio must be" in problem.message


@pytest.mark.slow
def test_the_module_can_be_imported_again():
    program = (
        "import importlib, gtpo_verl.integrations.losses as m;"
        "from verl.trainer.ppo.core_algos import get_policy_loss_fn as get;"
        "before = get('grpo_s'); importlib.reload(m);"
        "assert get('grpo_s') is not before and get('grpo_s').__module__ == m.__name__"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
    assert get_policy_loss_fn("grpo_s").__module__ == losses_module.__name__
