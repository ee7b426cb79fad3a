"""Logs that TensorBoard and Weights & Biases themselves wrote, as verl's loggers make them write."""

import time
from pathlib import Path

import pytest

from gtpo_verl.errors import UserError
from gtpo_verl.runs.loggers import read_logger
from gtpo_verl.runs.reader import read_run

pytestmark = pytest.mark.slow  # both packages take seconds to import


def test_tensorboards_event_files(tmp_path: Path):
    from torch.utils.tensorboard import SummaryWriter

    directory = tmp_path / "tensorboard"
    for steps in ((1, 2, 3), (3, 4)):  # a resume from step 2 writes another file
        writer = SummaryWriter(str(directory))
        for step in steps:
            writer.add_scalar("val-core/math/acc/mean@4", 0.1 * step + 0.01 * len(steps), step)
            writer.add_scalar("credit/entropy_all", float("nan") if step == 4 else 1.0, step)
        writer.close()
    run = read_run(directory)
    (training,) = run.trainings
    assert (run.name, training.method, training.config) == ("tensorboard", None, {})
    assert training.sources == ["math"]
    steps, values = training.series("val-core/math/acc/mean@4")
    assert steps.tolist() == [1, 2, 3, 4]
    assert values.tolist() == pytest.approx([0.13, 0.23, 0.32, 0.42])
    assert training.series("credit/entropy_all")[0].tolist() == [1, 2, 3]


def metrics_of(path: Path) -> dict[int, dict[str, float]]:
    logged = read_logger(path)
    assert logged is not None
    return logged[0]


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An offline run of Weights & Biases, long enough for several blocks of its file."""
    wandb = pytest.importorskip("wandb")
    root = tmp_path_factory.mktemp("wandb")
    config = {
        "algorithm": {"adv_estimator": "gtpo"},
        "actor_rollout_ref": {"actor": {"policy_loss": {"loss_mode": "gtpo"}, "loss_agg_mode": "token-mean"}},
        "seed": 3,
    }
    run = wandb.init(project="p", name="n", config=config, mode="offline", dir=str(root))
    for step in range(300):
        run.log({"val-core/math/acc/mean@4": step / 300, "note": "text", "x" * 200: 1.0}, step=step)
    run.finish()
    (file,) = root.glob("wandb/offline-run-*/*.wandb")
    deadline = time.monotonic() + 60
    while max(metrics_of(file)) < 299 and time.monotonic() < deadline:
        time.sleep(0.2)  # wandb's service writes the end of the file after finish() has returned
    return root / "wandb"


def test_an_offline_run_of_weights_and_biases(offline: Path):
    (directory,) = offline.glob("offline-run-*")
    (file,) = directory.glob("*.wandb")
    assert file.stat().st_size > 2 * 32_768
    for place in (offline, directory, file):
        (training,) = read_run(place).trainings
        assert (training.method.name, training.seed) == ("gtpo", "3")
        steps, values = training.series("val-core/math/acc/mean@4")
        assert steps.tolist() == list(range(300))
        assert values.tolist() == pytest.approx([step / 300 for step in range(300)])
        assert "note" not in training.keys


def test_a_torn_file_is_read_up_to_the_tear(offline: Path, tmp_path: Path):
    (file,) = offline.glob("offline-run-*/*.wandb")
    content = file.read_bytes()
    torn = tmp_path / "run-torn.wandb"
    torn.write_bytes(content[: len(content) // 2])
    assert 100 < max(metrics_of(torn)) < 200
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    torn.write_bytes(flipped)
    assert 100 < max(metrics_of(torn)) < 200


def test_what_is_no_log_is_not_read_and_what_is_empty_is_refused(tmp_path: Path):
    assert read_logger(tmp_path) is None
    (tmp_path / "run-a.wandb").write_bytes(b"something else")
    with pytest.raises(UserError, match="is not a file of Weights & Biases"):
        read_logger(tmp_path)
    (tmp_path / "run-b.wandb").touch()
    with pytest.raises(UserError, match="holds 2 runs of Weights & Biases: name the directory of one"):
        read_logger(tmp_path)
