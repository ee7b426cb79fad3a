"""Parameter counts are those of the published models, to the last parameter."""

import json
from pathlib import Path

import pytest
from model_files import write_model
from omegaconf import OmegaConf

from gtpo_verl.errors import UserError
from gtpo_verl.planning.shapes import MODELS, load_shape
from gtpo_verl.rules.model import model

PARAMETERS = {  # as published with the weights
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen2.5-72B": 72_706_203_648,
    "Qwen2.5-Math-1.5B": 1_543_714_304,
    "Qwen2.5-Math-7B": 7_615_616_512,
    "SmolLM2-135M": 134_515_008,
}


def test_every_shape_that_ships_has_a_published_count() -> None:
    assert MODELS.keys() == PARAMETERS.keys()


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_exact(name: str) -> None:
    shape = load_shape(f"Qwen/{name}")
    assert shape.parameters == PARAMETERS[name]
    final_norm = shape.hidden
    assert shape.embedding + shape.head + shape.layers * shape.block + final_norm == shape.parameters


def test_a_tied_embedding_is_the_head_and_is_multiplied_with() -> None:
    tied, untied = load_shape("Qwen/Qwen2.5-1.5B"), load_shape("Qwen/Qwen2.5-7B")
    assert (tied.head, tied.matmul_parameters) == (0, tied.parameters)
    assert untied.head == untied.embedding == 152064 * 3584
    assert untied.matmul_parameters == untied.parameters - untied.embedding


def test_key_value_bytes_are_shared_by_ranks_until_heads_run_out() -> None:
    shape = load_shape("Qwen/Qwen2.5-7B")  # 28 layers, 4 key-value heads of 128
    assert shape.key_value_bytes(1) == 2 * 28 * 4 * 128 * 2
    assert shape.key_value_bytes(4) == shape.key_value_bytes(8) == 2 * 28 * 1 * 128 * 2


def test_instruct_models_have_their_own_positions() -> None:
    assert load_shape("Qwen/Qwen2.5-7B").positions == 131072
    assert load_shape("Qwen/Qwen2.5-7B-Instruct").positions == 32768
    assert load_shape("Qwen/Qwen2.5-Math-7B").positions == 4096
    assert load_shape("HuggingFaceTB/SmolLM2-135M-Instruct").positions == 8192


def test_a_directory_wins_and_needs_no_weights(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "vocab_size": 100,
    }
    config |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = load_shape(str(tmp_path))
    layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64
    assert shape.block == layer
    assert shape.parameters == 2 * layer + 2 * 100 * 64 + 64
    assert shape.head_size == 16


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "no_such_model"}, "cannot build a decoder"),
        ({"model_type": "qwen2_moe", "num_experts": 4, "hidden_size": 64, "num_hidden_layers": 2}, "dense decoder"),
    ],
)
def test_what_is_no_dense_decoder_is_refused(config: dict[str, object], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        load_shape(str(tmp_path))


@pytest.mark.parametrize("path", [None, "/no/such/directory", "Qwen/Qwen2.5-8B"])
def test_an_unknown_model_is_answered_with_the_known_ones(path: str | None) -> None:
    with pytest.raises(UserError, match=r"Qwen2\.5-32B") as caught:
        load_shape(path)
    assert "\n" not in str(caught.value)


PUBLISHED = {  # configurations as published, without what a plan does not read, and numbers of parameters
    "Qwen/Qwen3-0.6B": (
        {"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
        | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
        | {"tie_word_embeddings": True, "max_position_embeddings": 40960},
        596_049_920,
    ),
    "meta-llama/Llama-3.2-1B": (
        {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256}
        | {"tie_word_embeddings": True, "max_position_embeddings": 131072},
        1_235_814_400,
    ),
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache on this machine, with the configurations of `PUBLISHED` alone."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name, (config, _) in PUBLISHED.items():
        model = tmp_path / f"models--{name.replace('/', '--')}"
        (model / "refs").mkdir(parents=True)
        (model / "refs" / "main").write_text("c0ffee")
        (model / "snapshots" / "c0ffee").mkdir(parents=True)
        (model / "snapshots" / "c0ffee" / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.usefixtures("cache")
def test_any_dense_model_in_the_hubs_cache_is_known(name: str) -> None:
    assert load_shape(name).parameters == PUBLISHED[name][1]


def test_a_model_in_the_cache_is_whole_or_the_hub_is_asked(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(url: str, timeout: float) -> None:
        raise OSError("no route")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", silent)
    config = OmegaConf.create(
        {"actor_rollout_ref": {"model": {"path": "Qwen/Qwen3-0.6B"}, "rollout": {"checkpoint_engine": {}}}}
        | {"trainer": {"device": "cuda"}}
    )
    config.actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes = None
    (problem,) = model(config)
    assert "in the hub's cache, " in problem.message
    assert "and the hub could not be asked" in problem.message
    write_model(cache / "models--Qwen--Qwen3-0.6B" / "snapshots" / "c0ffee")
    assert list(model(config)) == []
