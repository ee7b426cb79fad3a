"""``gtpo-verl export``: the weights of a checkpoint in Hugging Face format, by verl's own merger, when somebody needs
them: at every save one rank would write them all while the others wait.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from gtpo_verl.commands.options import declare
from gtpo_verl.errors import UserError, reason_in
from gtpo_verl.runs.checkpoints import MODEL_LINK, Layout, checkpoints, fault, link_model, newest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    declare(
        parser,
        ("run", Path, "a run's directory (its last checkpoint), or RUN/checkpoints/global_step_N"),
        ("--init-on-cpu", False, "initialise on the CPU, for models larger than a GPU's memory"),
    )


def run(args: argparse.Namespace) -> int:
    """Write the weights into the checkpoint and link them as ``RUN/model``; returns the exit code."""
    folder = _checkpoint(args.run)
    actor = folder / "actor"
    if (actor / "ckpt_contents.json").is_file():
        raise UserError(
            f"{folder} was saved by Megatron, whose checkpoints have the weights in {actor}/model/huggingface."
        )
    broken = fault(folder, Layout("fsdp", ranks=0, contents=("model",)))
    if broken:
        raise UserError(f"{folder}: {broken}.")
    merged = actor / ".export"
    shutil.rmtree(merged, ignore_errors=True)
    command = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
    command += ["--local_dir", str(actor), "--target_dir", str(merged)]
    command += ["--use_cpu_initialization"] * args.init_on_cpu
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    done = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True, env=environment)
    if done.returncode:
        log = actor / "export.log"
        log.write_text(done.stderr)
        raise UserError(
            f"{folder}: verl's merger failed ({reason_in(done.stderr.splitlines())}): a shard may be damaged. Export "
            f"an earlier checkpoint; the stack trace is in {log}."
        )
    weights = actor / "huggingface"
    weights.mkdir(exist_ok=True)
    for file in sorted(merged.iterdir(), key=lambda file: file.suffix == ".json"):  # the list of weights after them
        file.replace(weights / file.name)
    merged.rmdir()
    print(f"Weights in Hugging Face format: {weights}")
    run_dir = folder.parent.parent
    if link_model(run_dir):
        print(f"Linked: {run_dir / MODEL_LINK}")
    return 0


def _checkpoint(given: Path) -> Path:
    if given.name.startswith("global_step_"):
        return given
    directory = given / "checkpoints"
    found = ", ".join(folder.name for folder in checkpoints(directory).values())
    try:
        folder = newest(directory)
    except ValueError as error:
        raise UserError(f"{error}: name a checkpoint of {directory}, {found}.") from error
    if folder is not None:
        return folder
    if not given.is_dir():
        raise UserError(f"{given}: no such directory; name a run's, or RUN/checkpoints/global_step_N.")
    named = (
        f"name one of {directory}: {found}."
        if found
        else "a training saves one every trainer.save_freq steps and at its end, and none where that is -1."
    )
    raise UserError(f"{given} has no finished checkpoint: {named}")
