"""``gtpo-verl export``: the weights of a checkpoint in Hugging Face format, when somebody needs them: at every save one
rank would write them all while the others wait.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from omegaconf import OmegaConf

from gtpo_verl.commands.options import declare
from gtpo_verl.errors import UserError, reason_in
from gtpo_verl.files import reading
from gtpo_verl.runs.checkpoints import MODEL_LINK, Layout, checkpoints, fault, link_model, newest
from gtpo_verl.runs.directory import CONFIG_FILE

DTYPES = ("bfloat16", "float16", "float32")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    declare(
        parser,
        ("run", Path, "a run's directory (its last checkpoint), or RUN/checkpoints/global_step_N"),
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (default: that of the run's rollouts)")


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
    weights, former = actor / "huggingface", actor / ".former"
    if former.is_dir() and not weights.is_dir():  # an export was killed between its two last steps
        former.rename(weights)
    for left in (merged, former):
        shutil.rmtree(left, ignore_errors=True)
    run_dir = folder.parent.parent
    dtype = args.dtype or _rollout_dtype(run_dir)
    command = [sys.executable, "-m", "gtpo_verl.integrations.merge", str(actor), str(merged), dtype]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    done = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True, env=environment)
    if done.returncode:
        log = actor / "export.log"
        log.write_text(done.stderr)
        raise UserError(
            f"{folder}: its shards cannot be merged ({reason_in(done.stderr.splitlines())}): one may be damaged. "
            f"Export an earlier checkpoint; the stack trace is in {log}."
        )
    weights.mkdir(exist_ok=True)
    for file in weights.iterdir():  # but weights of an export in another type, perhaps in other pieces
        if ".safetensors" not in file.name and not (merged / file.name).exists():
            shutil.copy2(file, merged)
    weights.rename(former)
    merged.rename(weights)
    shutil.rmtree(former)
    print(f"Weights in Hugging Face format, {dtype}: {weights}")
    if link_model(run_dir) and (run_dir / MODEL_LINK).resolve() == weights.resolve():
        print(f"Linked: {run_dir / MODEL_LINK}")
    return 0


def _rollout_dtype(run_dir: Path) -> str:
    """The type in which vLLM held the policy; bfloat16, verl's default, where no run is known."""
    file = run_dir / CONFIG_FILE
    if not file.is_file():
        return "bfloat16"
    with reading(file):
        name = str(OmegaConf.select(OmegaConf.load(file), "actor_rollout_ref.rollout.dtype"))
    return {"float": "float32", "half": "float16"}.get(name, name if name in DTYPES else "bfloat16")


def _checkpoint(given: Path) -> Path:
    given = given.absolute()
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
