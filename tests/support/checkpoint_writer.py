"""Checkpoints with the files that verl's FSDP and Megatron managers write."""

import json
from pathlib import Path

import torch

from gtpo_verl.runs.checkpoints import TRACKER

CONTENTS = ("model", "optim", "extra_state")


def write_fsdp(directory: Path, step: int, ranks: int = 1, *, tracked: bool = True) -> Path:
    """A complete ``global_step_N``, named by the tracker."""
    folder = directory / f"global_step_{step}"
    actor = folder / "actor"
    actor.mkdir(parents=True)
    for rank in range(ranks):
        for kind in CONTENTS:
            torch.save({"weight": torch.zeros(64)}, actor / f"{kind}_world_size_{ranks}_rank_{rank}.pt")
    (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": ranks}))
    torch.save({"prompts": step}, folder / "data.pt")
    if tracked:
        (directory / TRACKER).write_text(str(step))
    return folder


def write_megatron(directory: Path, step: int) -> Path:
    """A complete ``global_step_N``, named by the tracker."""
    folder = directory / f"global_step_{step}"
    actor = folder / "actor"
    paths = {"model": "model/huggingface", "optimizer": "optimizer/dist_ckpt", "rng_state": "extra/dist_ckpt"}
    for path in paths.values():
        (actor / path).mkdir(parents=True)
    contents = {name: {"path": path} for name, path in paths.items()}
    (actor / "ckpt_contents.json").write_text(json.dumps({"schema_version": 2, "contents": contents}))
    torch.save({"prompts": step}, folder / "data.pt")
    (directory / TRACKER).write_text(str(step))
    return folder
