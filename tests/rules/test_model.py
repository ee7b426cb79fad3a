"""The bucket of a weight sync holds the largest tensor of the model, or the run is refused before it starts."""

import json
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from model_files import write_model
from omegaconf import DictConfig

from gtpo_verl.integrations.weights import fit_to_model
from gtpo_verl.planning.memory import GIB
from gtpo_verl.planning.plan import make_plan
from gtpo_verl.problems import evaluate
from gtpo_verl.rules import model as model_rules
from gtpo_verl.rules import plan as plan_rules
from gtpo_verl.rules.model import BUCKET, model, trained_model

Run = Callable[..., DictConfig]
SMOLLM2_135M = {"vocab_size": 49152, "hidden_size": 576}


def with_tensors(directory: Path, **shapes: list[int]) -> Path:
    """A model whose safetensors file has tensors of these shapes: as large as they say, and of no content."""
    write_model(directory)
    end, entries = 0, {}
    for name, shape in shapes.items():
        size = 2 * shape[0] * shape[1]  # bfloat16
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    header = json.dumps(entries).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)
    return directory


def bucket(config: DictConfig) -> int | None:
    found: int | None = config.actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes
    return found


def test_a_bucket_that_cannot_hold_the_embedding_is_refused_without_a_gpu(run: Run, tmp_path: Path) -> None:
    """SmolLM2-135M: 49,152 × 576 numbers are 108 MiB in float32, in which a CPU trains, whatever the file's type."""
    path = with_tensors(tmp_path, lm_head=[8, 576], embed=[49152, 576])
    given = {"actor_rollout_ref.model.path": str(path), BUCKET: 64}
    (problem,) = evaluate([trained_model], run("setting=quickstart", "hardware=cpu", given))
    assert problem.message.startswith(f"{BUCKET}=64: the largest tensor of the model, embed, takes 108 MiB")
    assert evaluate([trained_model], run("setting=quickstart", "hardware=cpu", given | {BUCKET: 108})) == []
    assert evaluate([trained_model], run("setting=quickstart", given)) == [], "on one GPU it is sent alone"


@pytest.mark.parametrize(("tensors", "needed"), [({"embed": [49152, 576]}, 108), ({"embed": [300, 64]}, 64)])
def test_the_bucket_of_a_cpu_follows_the_model(
    run: Run, tmp_path: Path, tensors: dict[str, list[int]], needed: int
) -> None:
    config = run("setting=quickstart", "hardware=cpu")
    config.actor_rollout_ref.model.path = str(with_tensors(tmp_path, **tensors))
    assert bucket(config) is None
    assert evaluate([trained_model], config) == []
    fit_to_model(config)
    assert bucket(config) == needed


def test_without_safetensors_the_embedding_of_the_configuration_counts(run: Run, tmp_path: Path) -> None:
    config = run("setting=quickstart", "hardware=cpu")
    config.actor_rollout_ref.model.path = str(write_model(tmp_path))
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2_135M))
    fit_to_model(config)
    assert bucket(config) == 108
    config = run("setting=quickstart", "hardware=cpu", {"actor_rollout_ref.model.path": "organisation/not-here"})
    fit_to_model(config)
    assert bucket(config) == 2048, "verl's, where the model is not known here"


def test_a_run_that_the_machine_cannot_hold_is_warned_of(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_rules, "joined_cluster", lambda config: None)
    config = run("hardware=cpu", {"actor_rollout_ref.model.path": "Qwen/Qwen2.5-0.5B"})
    monkeypatch.setattr(model_rules, "machine_memory", lambda: (80 * GIB, 70 * GIB))
    assert list(model_rules.memory(config)) == []
    monkeypatch.setattr(model_rules, "machine_memory", lambda: (24 * GIB, 20 * GIB))
    (problem,) = model_rules.memory(config)
    assert problem.severity == "warning"
    assert "most of it for activations" in problem.message
    assert problem.message.endswith("24: lower actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu.")
    by_tokens = run(
        "hardware=cpu",
        {"actor_rollout_ref.model.path": "Qwen/Qwen2.5-0.5B", "actor_rollout_ref.actor.use_dynamic_bsz": True},
    )
    (other,) = model_rules.memory(by_tokens)
    assert other.message.endswith("24: lower actor_rollout_ref.actor.ppo_max_token_len_per_gpu.")
    (found,) = [each for each in evaluate([plan_rules.memory], config, make_plan(config)) if "GiB" in each.message]
    assert found == problem
    monkeypatch.setattr(model_rules, "machine_memory", lambda: (80 * GIB, 9 * GIB))
    (problem,) = model_rules.memory(config)
    assert problem.severity == "warning"
    assert "other processes leave 9 of this machine's 80 free: start it after them." in problem.message
    assert not [each for each in evaluate([plan_rules.memory], config, make_plan(config)) if "free" in each.message]
    on_gpus = run("setting=small_gpu")
    assert list(model_rules.memory(on_gpus)) == []


@pytest.mark.parametrize(("rows", "packed"), [(49152, True), (300, False)])
def test_threads_and_padding_follow_the_model(run: Run, tmp_path: Path, rows: int, packed: bool) -> None:
    """A thread for every core and no padding, but for a model too small for either."""
    config = run("setting=quickstart", "hardware=cpu")
    config.actor_rollout_ref.model.path = str(with_tensors(tmp_path, embed=[rows, 576]))
    fit_to_model(config)
    threads = config.ray_kwargs.ray_init.runtime_env.env_vars.OMP_NUM_THREADS
    assert config.actor_rollout_ref.model.use_remove_padding is packed
    assert threads == (str(psutil.cpu_count(logical=False) or 1) if packed else "1")
    given = {
        "actor_rollout_ref.model.path": str(tmp_path),
        "actor_rollout_ref.model.use_remove_padding": not packed,
        "ray_kwargs.ray_init.runtime_env.env_vars.OMP_NUM_THREADS": "7",
    }
    config = run("setting=quickstart", "hardware=cpu", given)
    fit_to_model(config)
    assert config.actor_rollout_ref.model.use_remove_padding is not packed
    assert str(config.ray_kwargs.ray_init.runtime_env.env_vars.OMP_NUM_THREADS) == "7"


def test_a_model_larger_than_the_memory_is_refused_without_a_gpu(run: Run, tmp_path: Path) -> None:
    parameters = psutil.virtual_memory().total // 20 + 1024
    path = with_tensors(tmp_path, embed=[parameters // 1024 + 1, 1024])
    given = {"actor_rollout_ref.model.path": str(path)}
    (problem,) = evaluate([trained_model], run("setting=quickstart", "hardware=cpu", given))
    assert "GiB in float32, and this machine has" in problem.message
    assert evaluate([trained_model], run("setting=quickstart", given)) == []
    assert evaluate([model], run("setting=quickstart", "hardware=cpu", given)) == [], "to evaluate"
