"""What the command refuses before it samples anything."""

from typing import Any

import pytest
from omegaconf import OmegaConf

from gtpo_verl.audit.methods import methods
from gtpo_verl.commands import audit
from gtpo_verl.errors import UserError
from gtpo_verl.planning.memory import GIB


def test_gradients_that_the_device_cannot_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = OmegaConf.create({"trainer": {"device": "cpu"}, "actor_rollout_ref": {"model": {"path": "model"}}})
    sizes: Any = {"embed.weight": (1000, 1_000_000), "layers.0.weight": (1000, 1000)}
    monkeypatch.setattr(audit, "model_directory", lambda path: path)
    monkeypatch.setattr(audit, "tensor_shapes", lambda directory: sizes)
    monkeypatch.setattr(audit, "machine_memory", lambda: (24.0 * GIB, 20.0 * GIB))
    two = methods(["dapo", "gtpo"])
    with pytest.raises(UserError, match=r"3 credits take 37 GiB, and the device has 24: name fewer --methods"):
        audit._check_memory(config, two, "")
    audit._check_memory(config, two, "layers")  # the weights alone take 3.7 GiB
    monkeypatch.setattr(audit, "machine_memory", lambda: (40.0 * GIB, 20.0 * GIB))
    audit._check_memory(config, two, "")
