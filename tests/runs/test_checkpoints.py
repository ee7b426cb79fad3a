"""A training goes on from the newest complete checkpoint, and never silently from the first step."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_writer import write_fsdp, write_megatron

from gtpo_verl.errors import UserError
from gtpo_verl.runs.checkpoints import (
    TRACKER,
    Layout,
    check_folder,
    checkpoints,
    fault,
    find_start,
    link_checkpoints,
    link_model,
    newest,
    prune,
    repair_tracker,
    tracked_step,
)

FSDP = Layout("fsdp2", 1)
MEGATRON = Layout("megatron", 8)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Complete checkpoints of steps 4, 8 and 12."""
    for step in (4, 8, 12):
        write_fsdp(tmp_path, step)
    return tmp_path


def cut(file: Path, share: float = 0.5) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])


def test_the_tracker_is_followed(saved: Path) -> None:
    assert find_start(saved, FSDP).folder == saved / "global_step_12"
    assert find_start(saved, FSDP).message == ""
    (saved / TRACKER).write_text("8")  # a newer one beside it may be half-written
    assert find_start(saved, FSDP).folder == saved / "global_step_8"


@pytest.mark.parametrize("stray", ["global_step_3_backup", "global_step_999", "global_step_", "global_step_-1"])
def test_stray_folders_are_never_the_newest_checkpoint(saved: Path, stray: str) -> None:
    """A copy by hand, or one that was cut off."""
    run_dir = saved.with_name(f"{saved.name}-run")
    run_dir.mkdir()
    saved.rename(run_dir / "checkpoints")
    saved = run_dir / "checkpoints"
    for name in ("global_step_12", stray):
        (saved / name / "actor" / "huggingface").mkdir(parents=True)
        (saved / name / "actor" / "huggingface" / "model.safetensors").touch()
    assert newest(saved) == find_start(saved, FSDP).folder == saved / "global_step_12"
    assert link_model(run_dir) == run_dir / "model"
    assert (run_dir / "model").resolve() == (saved / "global_step_12" / "actor" / "huggingface").resolve()
    assert prune(saved, 2) == [4]
    assert (saved / stray).is_dir()
    (run_dir / "model").unlink()
    (run_dir / "model").mkdir()  # the run was copied with its links followed
    assert link_model(run_dir) is None
    (run_dir / "model").rmdir()
    (saved / TRACKER).write_text("")
    assert link_model(run_dir) is None, "which one is meant is not known"


def test_checkpoints_in_another_place_are_found_in_the_run(saved: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    link_checkpoints(run_dir, run_dir / "checkpoints")
    assert not list(run_dir.iterdir()), "where they are by default"
    for _ in range(2):
        link_checkpoints(run_dir, saved)
        assert newest(run_dir / "checkpoints") == run_dir / "checkpoints" / newest(saved).name  # type: ignore[union-attr]
    (run_dir / "checkpoints").unlink()
    (run_dir / "checkpoints").mkdir()
    with pytest.raises(UserError, match=r"the run has checkpoints in .*run/checkpoints; move them there"):
        link_checkpoints(run_dir, saved)


def test_without_checkpoints_a_training_starts_silently(tmp_path: Path) -> None:
    assert find_start(tmp_path / "checkpoints", FSDP).folder is None
    assert find_start(tmp_path, FSDP).message == ""


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing folder": (lambda run: shutil.rmtree(run / "global_step_12"), "global_step_12: there is no such folder"),
    "empty tracker": (lambda run: (run / TRACKER).write_text(""), "is empty"),
    "torn tracker": (lambda run: (run / TRACKER).write_bytes(b"\0\0"), "instead of a step"),
    "cut weights": (
        lambda run: cut(run / "global_step_12/actor/model_world_size_1_rank_0.pt", 0.99),
        "actor/model_world_size_1_rank_0.pt was cut off",
    ),
    "cut optimizer": (
        lambda run: cut(run / "global_step_12/actor/optim_world_size_1_rank_0.pt"),
        "optim.* was cut off",
    ),
    "empty position": (lambda run: (run / "global_step_12/data.pt").write_bytes(b""), "data.pt is empty"),
    "no position": (lambda run: (run / "global_step_12/data.pt").unlink(), "data.pt is missing"),
    "a rank missing": (
        lambda run: (run / "global_step_12/actor/extra_state_world_size_1_rank_0.pt").unlink(),
        "extra_state_world_size_1_rank_0.pt is missing",
    ),
    "unfinished": (lambda run: (run / "global_step_12/actor/fsdp_config.json").unlink(), "not written to the end"),
    "torn json": (lambda run: cut(run / "global_step_12/actor/fsdp_config.json"), "not written to the end"),
    "queue": (lambda run: (run / "global_step_12/transfer_queue.tmp").mkdir(), "transfer_queue/ was not written"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_the_newest_complete_one_is_taken_and_what_is_wrong_is_said(saved: Path, name: str) -> None:
    damage, said = DAMAGE[name]
    damage(saved)
    start = find_start(saved, FSDP)
    expected = 12 if "tracker" in name else 8
    assert start.folder == saved / f"global_step_{expected}"
    assert re.search(said, start.message), start.message
    assert f"Resuming from global_step_{expected}; complete: global_step_4, global_step_8" in start.message
    assert "\n" not in start.message
    repair_tracker(start.folder)
    assert find_start(saved, FSDP) == type(start)(start.folder)


def test_a_tracker_that_names_a_missing_folder_never_jumps_forward(saved: Path) -> None:
    """The newer ones were never named: their training was abandoned."""
    (saved / TRACKER).write_text("10")
    assert find_start(saved, FSDP).folder == saved / "global_step_8"


def test_a_start_that_would_lose_training_is_refused(saved: Path) -> None:
    for step in (4, 8, 12):
        (saved / f"global_step_{step}" / "data.pt").unlink()
    with pytest.raises(UserError, match=r"no checkpoint is complete \(global_step_4: data.pt is missing; .*remove"):
        find_start(saved, FSDP)
    for step in (4, 8, 12):
        shutil.rmtree(saved / f"global_step_{step}")
    with pytest.raises(UserError, match=r"no checkpoint is complete \(there is none\)"):
        find_start(saved, FSDP)


def test_a_first_checkpoint_that_was_not_finished_is_no_loss(tmp_path: Path) -> None:
    write_fsdp(tmp_path, 4, tracked=False)
    assert find_start(tmp_path, FSDP).folder == tmp_path / "global_step_4", "killed just before the tracker"
    (tmp_path / "global_step_4" / "data.pt").unlink()
    start = find_start(tmp_path, FSDP)
    assert start.folder is None
    assert "the first checkpoint was not finished" in start.message


def test_shards_of_another_number_of_ranks_are_refused_with_the_way_to_convert(tmp_path: Path) -> None:
    folder = write_fsdp(tmp_path, 4, ranks=2)
    assert fault(folder, FSDP) is None
    with pytest.raises(UserError, match=r"2 ranks.* has 1: .*gtpo-verl export .*global_step_4 --dtype float32"):
        find_start(tmp_path, FSDP)
    with pytest.raises(UserError, match="2 ranks"):
        check_folder(folder, FSDP)
    assert find_start(tmp_path, Layout("fsdp", 2)).folder == folder


def test_megatron_checkpoints_are_complete_when_their_list_of_contents_is(tmp_path: Path) -> None:
    write_megatron(tmp_path, 4)
    folder = write_megatron(tmp_path, 8)
    assert find_start(tmp_path, MEGATRON).folder == folder
    with pytest.raises(UserError, match=r"saved by Megatron.*--backend megatron"):
        find_start(tmp_path, FSDP)
    with pytest.raises(UserError, match=r"saved by Megatron.*--backend megatron"):
        check_folder(folder, FSDP)
    with pytest.raises(UserError, match=r"saved by FSDP.*gtpo-verl export"):
        find_start(write_fsdp(tmp_path / "fsdp", 4).parent, MEGATRON)
    (folder / "actor" / "optimizer" / "dist_ckpt").rmdir()
    assert fault(folder, MEGATRON) == "actor/optimizer/dist_ckpt is missing"
    (folder / "actor" / "ckpt_contents.json").write_text("[" * 100_000)
    assert fault(folder, MEGATRON) == "actor/ckpt_contents.json is not readable"
    (folder / "actor" / "ckpt_contents.json").unlink()
    assert find_start(tmp_path, MEGATRON).folder == tmp_path / "global_step_4"


def test_a_folder_that_the_user_names_must_be_complete(saved: Path) -> None:
    check_folder(saved / "global_step_4", FSDP)
    cut(saved / "global_step_4" / "data.pt")
    with pytest.raises(
        UserError, match=r"global_step_4: data.pt was cut off. Complete in .*: global_step_8, global_step_12"
    ):
        check_folder(saved / "global_step_4", FSDP)
    with pytest.raises(UserError, match="name a checkpoint"):
        check_folder(saved, FSDP)


def test_what_is_removed_lies_before_what_the_tracker_names(saved: Path) -> None:
    (saved / TRACKER).write_text("8")
    assert prune(saved, None) == prune(saved, 0) == prune(saved, -1) == []  # verl's words for all
    assert prune(saved, 2) == []
    assert prune(saved, 1) == [4]
    assert list(checkpoints(saved)) == [8, 12]
    (saved / TRACKER).write_text("12")
    assert prune(saved, 1) == [8]
    assert tracked_step(saved) == 12


@pytest.mark.parametrize("ranks", ["1e30", "1e999", "0", "-1", "null", '"x"', "1" + 400 * "0", "[" * 100_000])
def test_an_absurd_number_of_ranks_is_a_fault(saved: Path, ranks: str) -> None:
    """Shards of as many ranks were listed: with 10^30 of them a start took all memory."""
    folder = next(iter(checkpoints(saved).values()))
    (folder / "actor" / "fsdp_config.json").write_text(f'{{"world_size": {ranks}}}')
    assert "actor/fsdp_config.json" in fault(folder, FSDP)
