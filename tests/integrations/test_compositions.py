"""Settings, backends, hardware, layouts, verifiers and algorithms make configurations that verl accepts.

`make test` takes every pair of them, `make test-exhaustive` all of the first three with every algorithm.
"""

from pathlib import Path

import pytest
from omegaconf import DictConfig
from pairwise import pairwise

from gtpo_verl.algorithms import algorithms
from gtpo_verl.config import choices, compose_config, set_value
from gtpo_verl.errors import UserError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory for verl to look into: the published models are not here."""
    from gtpo_verl.tasks import model as tiny

    directory = tmp_path_factory.mktemp("model")
    tokenizer = tiny.build_tokenizer()
    tiny.save(tiny.build_model(len(tokenizer), seed=0), tokenizer, directory)
    return directory


def convert(config: DictConfig) -> None:
    """What verl's trainer and workers do with a configuration before they build anything."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    # so their sections are never converted: no algorithm has a critic, and no KL term asks for a reference policy
    assert not need_critic(config)
    assert not need_reference_policy(config)
    validate_config(config, use_reference_policy=False, use_critic=False)
    section = config.actor_rollout_ref
    for part in (section.actor, section.rollout, section.model, section.rollout.checkpoint_engine):
        omega_conf_to_dataclass(part)


ARMS = ("dapo", "gtpo", "grpo_s")
# A layout of its setting, none, and one that every backend has; tests/test_config.py has those that are refused.
LAYOUTS = (None, "~layout", "layout={backend}_paper_dapo_32b")
PAIRS = pairwise(
    {
        "algo": ARMS,
        "setting": choices("setting"),
        "backend": choices("backend"),
        "layout": LAYOUTS,
        "verifier": choices("verifier"),
        "hardware": choices("hardware"),
    }
)
# tests/test_config.py proves that an algorithm touches its own keys alone: the others need not meet every setting.
# test_family.py composes and converts those of the family.
FAMILY = [name for name in algorithms() if name not in (*ARMS, "grpo")]
OTHERS = [{"algo": algo} for algo in choices("algo") if algo not in (*ARMS, *FAMILY)]


def overrides_of(point: dict[str, str | None]) -> list[str]:
    layout = point.get("layout")
    chosen = [f"{group}={name}" for group, name in point.items() if group != "layout"]
    return [*chosen, layout.format(**point)] if layout else chosen


def check(overrides: list[str], tiny_model: Path) -> None:
    """Compose and convert; or, for Megatron without a GPU, be refused."""
    from gtpo_verl.rules import stages

    config = compose_config(overrides)
    set_value(config, "actor_rollout_ref.model.path", str(tiny_model))
    if {"backend=megatron", "hardware=cpu"} <= set(overrides):
        with pytest.raises(UserError, match="strategy=megatron needs GPUs"):
            stages.check(config)
        return
    convert(config)


MORE = [pytest.param(point, marks=pytest.mark.exhaustive) for point in PAIRS[10:]]


@pytest.mark.parametrize("point", [*PAIRS[:10], *MORE, *OTHERS], ids=lambda point: " ".join(overrides_of(point)))
def test_every_pair_of_choices_is_valid_for_verl(point: dict[str, str | None], tiny_model: Path) -> None:
    check(overrides_of(point), tiny_model)


@pytest.mark.exhaustive
@pytest.mark.parametrize("hardware", choices("hardware"))
@pytest.mark.parametrize("backend", choices("backend"))
@pytest.mark.parametrize("setting", choices("setting"))
@pytest.mark.parametrize("algo", choices("algo"))
def test_every_choice_is_valid_for_verl(algo: str, setting: str, backend: str, hardware: str, tiny_model: Path) -> None:
    check([f"algo={algo}", f"setting={setting}", f"backend={backend}", f"hardware={hardware}"], tiny_model)
