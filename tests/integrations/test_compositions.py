"""Every setting, backend, hardware and algorithm makes a configuration that verl accepts."""

from pathlib import Path

import pytest
import yaml
from omegaconf import DictConfig

from gtpo_verl.config import choices, compose_config, set_value
from gtpo_verl.errors import UserError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory for verl to look into: the published models are not here."""
    from gtpo_verl.tasks.sums import model as tiny

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


@pytest.fixture
def quick_yaml(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra reads verl's files again for every composition: with PyYAML's C parser that is no longer most of the time."""
    monkeypatch.setattr(yaml, "SafeLoader", yaml.CSafeLoader)


@pytest.mark.usefixtures("quick_yaml")
@pytest.mark.parametrize("hardware", choices("hardware"))
@pytest.mark.parametrize("backend", choices("backend"))
@pytest.mark.parametrize("setting", choices("setting"))
def test_every_setting_backend_and_hardware_is_valid_for_verl(
    setting: str, backend: str, hardware: str, tiny_model: Path
) -> None:
    from gtpo_verl import preflight

    # the three arms alone on a CPU: tests/test_config.py proves that an algorithm touches its own keys alone
    algorithms = choices("algo") if hardware == "gpu" else ("dapo", "gtpo", "grpo_s")
    refused = backend == "megatron" and hardware == "cpu"
    for algorithm in ("gtpo",) if refused else algorithms:
        chosen = [f"setting={setting}", f"backend={backend}", f"hardware={hardware}", f"algo={algorithm}"]
        config = compose_config(chosen)
        set_value(config, "actor_rollout_ref.model.path", str(tiny_model))
        if setting == "quickstart":
            config.trainer.n_gpus_per_node = 1  # verl's 8 are more than its 192 responses are meant for
        if refused:
            with pytest.raises(UserError, match="backend=megatron needs GPUs"):
                preflight.check(config)
            continue
        convert(config)
