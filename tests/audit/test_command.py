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
    config = OmegaConf.create({"trainer": {"device": "cpu"}, "actor_rollout_ref": {"model": {"path": "model"}}})
    sizes: Any = {"embed.weight": (1000, 1_000_000), "layers.0.weight": (1000, 1000)}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # this machine's memory, whatever it has
    monkeypatch.setattr(audit, "model_directory", lambda path: path)
    monkeypatch.setattr(audit, "tensor_shapes", lambda directory: sizes)
    monkeypatch.setattr(audit, "machine_memory", lambda: (24.0 * GIB, 20.0 * GIB))
    two = methods(["dapo", "gtpo"])
    with pytest.raises(UserError, match=r"3 credits .* take 96 GiB, and the device has 24: name fewer --methods"):
        audit._check_memory(config, two, "")
    audit._check_memory(config, two, "layers")  # the weights alone take 3.7 GiB
    monkeypatch.setattr(audit, "machine_memory", lambda: (97.0 * GIB, 20.0 * GIB))
    audit._check_memory(config, two, "")


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
