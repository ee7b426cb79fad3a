"""Checkpoints as verl 0.9.1 writes them: which one a training goes on from, and which may be removed.

A checkpoint is ``global_step_N/`` with ``actor/``, ``data.pt`` and, in the asynchronous modes, ``transfer_queue/``; the
tracker beside it names the last one. verl believes the tracker: it takes a missing folder for a new training, and finds
out in the middle of loading that a file was cut off.
"""

import json
import re
import shutil
import zipfile
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gtpo_verl.errors import UserError
from gtpo_verl.files import write_atomically, write_text

TRACKER = "latest_checkpointed_iteration.txt"
VERL_CONTENTS = ("model", "optimizer", "extra")  # verl's default
CONTENTS = (*VERL_CONTENTS, "hf_model")
# Where verl's engines save weights in Hugging Face format below a checkpoint: FSDP, Megatron
HF_WEIGHTS = (Path("actor", "huggingface"), Path("actor", "model", "huggingface"))
MODEL_LINK = "model"  # in a run's directory
_FSDP_FILES = {"model": "model", "optimizer": "optim", "extra": "extra_state"}
MOST_RANKS = 1_000_000  # more are not those of a training
_NAME = re.compile(r"global_step_(\d+)")
FSDP = ("fsdp", "fsdp2")


@dataclass(frozen=True)
class Layout:
    """What the run that resumes expects of a checkpoint."""

    strategy: str  # the actor's, fsdp, fsdp2 or megatron; checkpoints of others are not looked into
    ranks: int  # of the actor; FSDP loads the shards of as many
    contents: Collection[str] = VERL_CONTENTS  # what is loaded, verl's checkpoint.load_contents


@dataclass(frozen=True)
class Start:
    """The checkpoint from which a training starts, None for the first step, and what is said about it."""

    folder: Path | None
    message: str = ""

    @property
    def step(self) -> int:
        """The last one that counts; -1 where even a validation before the first one is repeated."""
        named = self.folder and _NAME.fullmatch(self.folder.name)
        return int(named[1]) if named else -1


def checkpoints(directory: Path) -> dict[int, Path]:
    """{step: folder} of the checkpoints in a directory, complete or not, in order of steps."""
    if not directory.is_dir():
        return {}
    named = ((_NAME.fullmatch(entry.name), entry) for entry in directory.iterdir() if entry.is_dir())
    return dict(sorted((int(match[1]), folder) for match, folder in named if match))


def tracked_step(directory: Path) -> int | None:
    """The step that the tracker names; None where there is none. ValueError, saying what it holds: it is no number."""
    file = directory / TRACKER
    if not file.exists():
        return None
    text = file.read_bytes()
    if not text.strip().isdigit():
        raise ValueError(f"{file} is empty" if not text.strip() else f"{file} holds {text[:20]!r} instead of a step")
    return int(text)


def newest(directory: Path) -> Path | None:
    """The checkpoint that the tracker names; None without one, or such a folder. ValueError: see `tracked_step`."""
    step = tracked_step(directory)
    folder = directory / f"global_step_{step}"
    return folder if step is not None and folder.is_dir() else None


def link_checkpoints(run_dir: Path, directory: Path) -> None:
    """Let `RUN/checkpoints`, where a run's are looked for, lead to the directory in which it saves them. Raises
    UserError: the run has checkpoints of its own there.
    """
    link = run_dir / "checkpoints"
    if link.resolve() == directory.resolve():
        return
    if link.is_dir() and not link.is_symlink():
        raise UserError(f"trainer.default_local_dir={directory}: the run has checkpoints in {link}; move them there.")
    write_atomically(link, lambda path: path.symlink_to(directory.resolve()))


def link_model(run_dir: Path) -> Path | None:
    """Link ``model`` to the newest checkpoint's weights in Hugging Face format; None where there are none."""
    try:
        saved = newest(run_dir / "checkpoints")
    except ValueError:  # what to do about the tracker is said where it is followed
        return None
    link, weights = run_dir / MODEL_LINK, hf_weights(saved) if saved else None
    if weights is None:
        return None
    if link.is_dir() and not link.is_symlink():  # the run was copied with its links followed
        print(f"note: {link} is a directory and stays as it is; the newest weights are in {weights}.", flush=True)
        return None
    write_atomically(link, lambda path: path.symlink_to(weights.relative_to(run_dir)))
    return link


def hf_weights(checkpoint: Path) -> Path | None:
    """The directory of a checkpoint's weights in Hugging Face format; None where it has none."""
    places = (checkpoint / place for place in HF_WEIGHTS)
    return next((place for place in places if any(place.glob("*.safetensors"))), None)


def repair_tracker(folder: Path) -> None:
    """Let the tracker name this checkpoint, from which verl then resumes."""
    write_text(folder.parent / TRACKER, folder.name.removeprefix("global_step_"))


def fault(folder: Path, layout: Layout) -> str | None:
    """What is wrong with a checkpoint, or None; reads the ends of its files, not the whole.

    A file that torch has written ends with its table of contents, so one that was cut off is recognised.
    """
    if not folder.is_dir():
        return "there is no such folder"
    actor = folder / "actor"
    found = None if actor.is_dir() else "actor/ is missing"
    if layout.strategy == "megatron":
        found = _megatron_fault(actor)
    elif layout.strategy in FSDP:
        found = _fsdp_fault(actor, layout)
    if found:
        return found
    if (folder / "transfer_queue.tmp").exists() and not (folder / "transfer_queue").exists():
        return "transfer_queue/ was not written to the end"
    return next(_bad_files(folder, [folder / "data.pt", *folder.glob("sampling.pt")]), None)


def _fsdp_fault(actor: Path, layout: Layout) -> str | None:
    file = actor / "fsdp_config.json"
    if not file.is_file():
        return "actor/fsdp_config.json is missing: it was not written to the end"
    try:
        ranks = int(json.loads(file.read_text())["world_size"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return "actor/fsdp_config.json was not written to the end"
    if not 0 < ranks <= MOST_RANKS:
        return f"actor/fsdp_config.json names {ranks} ranks"
    kinds = [name for part, name in _FSDP_FILES.items() if part in layout.contents]
    shards = (actor / f"{kind}_world_size_{ranks}_rank_{rank}.pt" for rank in range(ranks) for kind in kinds)
    return next(_bad_files(actor.parent, shards), None)


def _megatron_fault(actor: Path) -> str | None:
    # verl writes this list of contents last, by renaming
    file = actor / "ckpt_contents.json"
    if not file.is_file():
        return "actor/ckpt_contents.json is missing: it was not written to the end"
    try:
        contents = json.loads(file.read_text())["contents"].values()
        missing = [part["path"] for part in contents if not (actor / part["path"]).exists()]
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError):
        return "actor/ckpt_contents.json is not readable"
    return f"actor/{missing[0]} is missing" if missing else None


def _bad_files(folder: Path, files: Iterable[Path]) -> Iterator[str]:
    for file in files:
        name = file.relative_to(folder)
        if not file.is_file():
            yield f"{name} is missing"
            continue
        try:
            zipfile.ZipFile(file).close()
        except (zipfile.BadZipFile, OSError, ValueError):
            yield f"{name} was cut off" if file.stat().st_size else f"{name} is empty"


def check_backend(folder: Path, layout: Layout) -> None:
    """Raise a UserError, with how to convert it, where a checkpoint was saved by the other backend."""
    fsdp, megatron = folder / "actor" / "fsdp_config.json", folder / "actor" / "ckpt_contents.json"
    if layout.strategy in FSDP and megatron.is_file():
        raise _not_loadable(folder, "was saved by Megatron, and this run has FSDP")
    if layout.strategy == "megatron" and fsdp.is_file():
        raise _not_loadable(folder, "was saved by FSDP, and this run has Megatron")


def check_ranks(folder: Path, layout: Layout) -> None:
    """Raise a UserError, with how to convert it, where a complete checkpoint of FSDP is of another number of ranks."""
    if layout.strategy not in FSDP:
        return
    ranks = json.loads((folder / "actor" / "fsdp_config.json").read_text())["world_size"]
    if ranks != layout.ranks:
        problem = f"was saved by {ranks} ranks, and this run has {layout.ranks}: FSDP's shards fit their number alone"
        raise _not_loadable(folder, problem)


def _not_loadable(folder: Path, problem: str) -> UserError:
    command, model = merging(folder, "--dtype float32")
    return UserError(
        f"{folder} {problem}. Train on as it was saved, or start a new run from its weights, without the optimizer's "
        f"state: `{command}`, then actor_rollout_ref.model.path={model} with another trainer.run_dir."
    )


def merging(folder: Path, options: str = "") -> tuple[str, str]:
    """The command that merges a checkpoint's shards, and the model that it makes. options: of `gtpo-verl export`."""
    actor = folder / "actor"
    if (actor / "model").is_dir():  # Megatron's
        return f"python -m verl.model_merger merge --backend megatron --local_dir {actor} --target_dir MODEL", "MODEL"
    return f"gtpo-verl export {folder} {options}".rstrip(), str(actor / "huggingface")


def find_start(directory: Path, layout: Layout) -> Start:
    """Find the checkpoint from which a training with ``resume_mode=auto`` goes on; nothing is changed.

    It is the one that the tracker names. Where that is not complete, or the tracker is not readable, it is the newest
    complete one that is not newer, with a message. UserError: there are checkpoints, and none can be resumed from; or
    this run cannot load the one there is.
    """
    found = checkpoints(directory)
    for folder in found.values():  # before their files are missed
        check_backend(folder, layout)
    try:
        tracked, problem = tracked_step(directory), ""
    except ValueError as error:
        tracked, problem = None, str(error)
    if tracked is not None:
        folder = directory / f"global_step_{tracked}"
        broken = fault(folder, layout)
        if not broken:
            check_ranks(folder, layout)
            return Start(folder)
        problem = f"{directory / TRACKER} names global_step_{tracked}: {broken}"
    faults = {step: fault(folder, layout) for step, folder in found.items()}
    usable = [step for step, broken in faults.items() if not broken and (tracked is None or step <= tracked)]
    if usable:
        check_ranks(found[usable[-1]], layout)
        listed = ", ".join(f"global_step_{step}" for step in usable)
        problem = problem or f"{directory} has no {TRACKER}"
        return Start(found[usable[-1]], f"{problem}. Resuming from global_step_{usable[-1]}; complete: {listed}.")
    if not problem and not found:
        return Start(None)
    listed = "; ".join(
        f"global_step_{step}: {broken or 'newer than the tracker says'}" for step, broken in faults.items()
    )
    if not problem and len(found) == 1:  # killed while it saved for the first time: nothing was promised
        return Start(None, f"{listed}: the first checkpoint was not finished. Training from the first step.")
    raise UserError(
        f"{problem or f'{directory} has no {TRACKER}'}; no checkpoint is complete ({listed or 'there is none'}). To "
        f"train from the first step, remove {directory} or set another trainer.run_dir."
    )


def check_folder(folder: Path, layout: Layout) -> None:
    """Check what ``trainer.resume_from_path`` names. UserError: it is not complete, or this run cannot load it."""
    if not _NAME.fullmatch(folder.name):
        raise UserError(f"trainer.resume_from_path={folder}: name a checkpoint, .../global_step_N.")
    check_backend(folder, layout)
    if broken := fault(folder, layout):
        usable = [path.name for path in checkpoints(folder.parent).values() if not fault(path, layout)]
        raise UserError(
            f"trainer.resume_from_path={folder}: {broken}. Complete in {folder.parent}: {', '.join(usable) or 'none'}."
        )
    check_ranks(folder, layout)


def prune(directory: Path, keep: int | None) -> list[int]:
    """Remove the oldest checkpoints up to the tracked one but for the last ``keep``; their steps. None, 0 and negative
    numbers keep all, as in verl.
    """
    latest = tracked_step(directory)
    if keep is None or keep <= 0 or latest is None:
        return []
    old = [step for step in checkpoints(directory) if step <= latest][:-keep]
    for step in old:
        # The tracker names a later one, so a removal that is interrupted loses nothing.
        shutil.rmtree(directory / f"global_step_{step}")
    return old
