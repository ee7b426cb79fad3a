"""The shards of a checkpoint become a model when somebody asks for it."""

import shutil
from pathlib import Path

import pytest
from checkpoint_writer import write_fsdp

from gtpo_verl.cli import main


def test_what_cannot_be_exported_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path)]) == 2
    assert (
        f"{tmp_path} has no finished checkpoint: a training saves one every trainer.save_freq steps"
        in capsys.readouterr().err
    )
    assert main(["export", str(tmp_path / "nowhere")]) == 2
    assert "nowhere: no such directory; name a run's" in capsys.readouterr().err
    folder = write_fsdp(tmp_path / "checkpoints", 4)
    (folder / "actor" / "model_world_size_1_rank_0.pt").unlink()
    assert main(["export", str(tmp_path)]) == 2
    assert "model_world_size_1_rank_0.pt is missing" in capsys.readouterr().err
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("")
    assert main(["export", str(tmp_path)]) == 2
    assert "is empty: name a checkpoint of" in capsys.readouterr().err


@pytest.mark.slow
def test_the_weights_are_those_of_the_shards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own; in the precision of the run's rollouts, or as verl's where no run is known."""
    import torch
    from transformers import AutoModelForCausalLM

    from gtpo_verl.tasks.model import build_model, build_tokenizer

    folder = write_fsdp(tmp_path / "checkpoints", 4)
    model = build_model(len(build_tokenizer()), seed=0)
    torch.save(model.state_dict(), folder / "actor" / "model_world_size_1_rank_0.pt")
    model.config.architectures = ["Qwen2ForCausalLM"]
    model.config.save_pretrained(folder / "actor" / "huggingface")
    build_tokenizer().save_pretrained(folder / "actor" / "huggingface")
    exact = model.state_dict()
    other = folder / "actor" / "huggingface" / "model-00001-of-00002.safetensors"
    for dtype in (torch.bfloat16, torch.float32):
        other.touch()  # of an export in more pieces
        assert main(["export", str(tmp_path)]) == 0
        assert not other.exists()
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")  # in the type that its config.json names
        assert loaded.dtype == dtype
        for name, weight in loaded.state_dict().items():
            torch.testing.assert_close(weight, exact[name].to(dtype), atol=0, rtol=0)
        (tmp_path / "config.yaml").write_text("actor_rollout_ref: {rollout: {dtype: float32}}")

    # Killed between its two last steps, an export has lost nothing.
    (folder / "actor" / "huggingface").rename(folder / "actor" / ".former")
    assert main(["export", str(tmp_path)]) == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").dtype == torch.float32
    assert (folder / "actor" / "huggingface" / "tokenizer_config.json").is_file()

    later = write_fsdp(tmp_path / "checkpoints", 5)
    shutil.copytree(folder / "actor" / "huggingface", later / "actor" / "huggingface", dirs_exist_ok=True)
    capsys.readouterr()
    monkeypatch.chdir(folder.parent)
    assert main(["export", folder.name]) == 0
    printed = capsys.readouterr().out
    assert "float32" in printed, "the type of the run, which is not the working directory"
    assert "Linked" not in printed, "the link leads to a later step"


@pytest.mark.slow
def test_a_damaged_shard_is_said_in_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from gtpo_verl.tasks.model import build_model, build_tokenizer

    folder = write_fsdp(tmp_path / "checkpoints", 4)
    shard = folder / "actor" / "model_world_size_1_rank_0.pt"
    content = bytearray(shard.read_bytes())
    content[:100] = bytes(100)
    shard.write_bytes(content)
    model = build_model(len(build_tokenizer()), seed=0)
    model.config.architectures = ["Qwen2ForCausalLM"]
    model.config.save_pretrained(folder / "actor" / "huggingface")
    assert main(["export", str(tmp_path)]) == 2
    error = capfd.readouterr().err
    assert error.count("error: ") == 1
    assert "Traceback" not in error
    assert f"{folder}: its shards cannot be merged (" in error
    assert "Traceback" in (folder / "actor" / "export.log").read_text()
