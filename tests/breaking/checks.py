"""What must hold of a run directory in which trainings were killed, against that of one uninterrupted training."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from gtpo_verl.runs.checkpoints import Layout, checkpoints, fault, tracked_step
from gtpo_verl.runs.directory import GROUPS_FILE, METRICS_FILE

WEIGHTS = Path("actor", "huggingface", "model.safetensors")
# Of a step: the same in every training of a seed, whatever the timing. A step that was killed between its checkpoint
# and its log lacks what verl computes last.
COMPARED = ("actor/grad_norm", "actor/pg_loss", "training/accuracy", "credit/entropy_all")
LAYOUT = Layout("fsdp", 1)


def lines_of(file: Path) -> list[Any]:
    """The values of a file of JSON lines, which must all be complete."""
    return [json.loads(line) for line in file.read_text().splitlines() if line] if file.exists() else []


def file_problems(run_dir: Path, reference: Path) -> list[str]:
    """What is wrong with metrics and groups: every step once, in order, and as in the reference."""
    problems = []
    for name in (METRICS_FILE, GROUPS_FILE):
        steps = [line["step"] for line in lines_of(run_dir / name)]
        doubled = sorted(step for step, count in Counter(steps).items() if count > 1)
        missing = sorted(set(range(1, max(steps, default=0) + 1)) - set(steps))
        if doubled:
            problems.append(f"{name} has steps twice: {doubled}")
        if missing:
            problems.append(f"{name} lacks steps: {missing}")
    wanted = {line["step"]: line["groups"] for line in lines_of(reference / GROUPS_FILE)}
    other = [line["step"] for line in lines_of(run_dir / GROUPS_FILE) if line["groups"] != wanted.get(line["step"])]
    if other:
        problems.append(f"other groups than in the reference in steps {other}")
    data = {line["step"]: line["data"] for line in lines_of(reference / METRICS_FILE)}
    for line in lines_of(run_dir / METRICS_FILE):
        differing = [
            key for key in COMPARED if key in line["data"] and line["data"][key] != data[line["step"]].get(key)
        ]
        if differing:
            problems.append(f"step {line['step']} has other {', '.join(differing)} than the reference")
    return problems


def last_saved(run_dir: Path) -> int:
    """The step that the tracker names, whose checkpoint must be complete; 0 where there is none."""
    directory = run_dir / "checkpoints"
    step = tracked_step(directory)
    if step is None:
        return 0
    broken = fault(directory / f"global_step_{step}", LAYOUT)
    if broken:
        raise ValueError(f"the tracker names global_step_{step}: {broken}")
    return step


def weights_difference(run_dir: Path, reference: Path, step: int) -> float:
    """The largest difference of a weight from the reference's after a step; 0.0 where all are equal bit for bit."""
    one, other = (load_file(place / "checkpoints" / f"global_step_{step}" / WEIGHTS) for place in (run_dir, reference))
    if one.keys() != other.keys():
        raise ValueError("the checkpoints have other tensors")
    return max(
        0.0 if torch.equal(one[name], other[name]) else (one[name].double() - other[name].double()).abs().max().item()
        for name in one
    )


def kept(run_dir: Path) -> list[int]:
    """Steps of the checkpoints that are there, complete or not."""
    return list(checkpoints(run_dir / "checkpoints"))
