"""A logger that verl could not make is named before anything starts."""

from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from gtpo_verl.problems import errors_of
from gtpo_verl.rules.start import LOGGERS, loggers


def config(*names: str, **variables: str) -> DictConfig:
    ray_init = {"runtime_env": {"env_vars": variables}}
    return OmegaConf.create({"trainer": {"logger": list(names)}, "ray_kwargs": {"ray_init": ray_init}})


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home directory in which nobody has logged in anywhere."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for _, login in LOGGERS.values():
        for word in login:
            monkeypatch.delenv(word, raising=False)
    return tmp_path


def test_the_known_loggers_are_verls() -> None:
    from verl.utils.tracking import Tracking

    assert set(LOGGERS) == {*Tracking.supported_backend, "tracking"}


def test_one_that_does_not_exist_or_is_not_installed_is_refused() -> None:
    assert errors_of(loggers(config("console", "tensorboard", "file"))) == []
    (unknown, missing) = errors_of(loggers(config("wanb", "console", "mlflow")))
    assert "trainer.logger=wanb: verl has no such logger; did you mean wandb?" in unknown
    assert "trainer.logger=mlflow: the package mlflow is not installed" in missing


def test_where_nobody_is_logged_in_it_is_refused(nobody: Path) -> None:
    (message,) = errors_of(loggers(config("wandb")))
    assert "nobody is logged in: set WANDB_API_KEY" in message
    assert errors_of(loggers(config("wandb", WANDB_MODE="offline"))) == []  # of the run's own processes
    (nobody / ".netrc").write_text("machine api.wandb.ai login user password key\n")
    assert errors_of(loggers(config("wandb"))) == []
