"""What the command refuses before it samples anything, and where it finds a user's own presets."""

from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from gtpo_verl.audit.methods import methods
from gtpo_verl.commands import audit
from gtpo_verl.config import with_config_dir
from gtpo_verl.errors import UserError
from gtpo_verl.evaluation.subject import override
from gtpo_verl.planning.memory import GIB


def test_gradients_that_the_device_cannot_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = OmegaConf.create({"trainer": {"device": "cpu"}, "actor_rollout_ref": {"model": {"path": "not-here"}}})
    sizes: Any = {"embed.weight": (1000, 1_000_000), "layers.0.weight": (1000, 1000)}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # this machine's memory, whatever it has
    monkeypatch.setattr(audit, "model_directory", lambda path: path)
    monkeypatch.setattr(audit, "tensor_shapes", lambda directory: sizes)
    monkeypatch.setattr(audit, "machine_memory", lambda: (24.0 * GIB, 20.0 * GIB))
    two = methods(["dapo", "gtpo"])
    with pytest.raises(UserError, match=r"3 credits take 94 GiB, and the device has 24: name fewer --methods"):
        audit._check_memory(config, two, "", 8)
    audit._check_memory(config, two, "layers", 8)  # the weights alone take 3.7 GiB
    monkeypatch.setattr(audit, "machine_memory", lambda: (97.0 * GIB, 20.0 * GIB))
    audit._check_memory(config, two, "", 8)


def test_a_response_that_is_too_long_for_the_device_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of Qwen2.5-0.5B with two methods: 40 GiB of gradients, and 41 for 256 + 2,048 tokens; 9 for 256 + 512."""
    config = OmegaConf.create(
        {
            "actor_rollout_ref": {"model": {"path": "Qwen/Qwen2.5-0.5B"}},
            "data": {"max_prompt_length": 256, "max_response_length": 2048},
        }
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(audit, "model_directory", lambda path: path)
    monkeypatch.setattr(audit, "tensor_shapes", lambda directory: {"embed.weight": (494, 1_000_000)})
    monkeypatch.setattr(audit, "machine_memory", lambda: (80.0 * GIB, 70.0 * GIB))
    two = methods(["dapo", "gtpo"])
    audit._check_memory(config, two, "", 8)
    assert (
        "warning: where responses reach their limit, a prompt of 256 tokens with a response of 2,048 takes about 41 GiB"
        in capsys.readouterr().out
    )
    audit._check_memory(config, two, "", 8, (256, 512))
    assert capsys.readouterr().out == ""
    with pytest.raises(UserError, match=r"a response of 2,048 takes about 41 GiB, beside 47 .* lower data"):
        audit._check_memory(config, two, "", 8, (256, 2048))
    audit._check_memory(config, two, "layers", 8, (256, 2048))


def test_a_preset_of_the_users_own_is_scored(tmp_path: Path) -> None:
    (tmp_path / "algo").mkdir()
    text = "# @package _global_\ndefaults: [/algo/gtpo, _self_]\nalgorithm: {gtpo: {alpha2: 0.3}}\n"
    (tmp_path / "algo" / "mine.yaml").write_text(text)
    overrides = with_config_dir(["algorithm.gtpo.gamma=0.6"], tmp_path)
    _, mine = methods(["mine"], overrides)
    assert (mine.name, mine.settings.alpha2, mine.settings.gamma) == ("mine", 0.3, 0.6)
    config = OmegaConf.create({"algorithm": {"gtpo": {"gamma": 0.75}}})  # of a run, composed long ago
    assert override(config, overrides).algorithm.gtpo.gamma == 0.6
    with pytest.raises(UserError, match=r"hydra.job.name: the run has no such key"):
        override(config, ["hydra.job.name=mine"])
