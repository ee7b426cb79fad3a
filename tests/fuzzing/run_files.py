"""Directories of runs whose files are damaged, read by all that reads runs."""

import json
import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import yaml

from fuzzing import PASSED, REFUSED, check, refused
from fuzzing.values import as_json, changed, odd, torn
from gtpo_verl.errors import UserError
from gtpo_verl.evaluation.records import ProblemFile, changes_since, open_evaluation
from gtpo_verl.evaluation.subject import find_subject
from gtpo_verl.experiments.status import statuses, table
from gtpo_verl.planning.measured import read_steps
from gtpo_verl.report.page import write_report
from gtpo_verl.runs import checkpoints
from gtpo_verl.runs.directory import restore_step
from gtpo_verl.runs.reader import read_runs
from gtpo_verl.runs.state import state_of, status_of
from gtpo_verl.verifiers.agreement import read_samples, threshold_of

sys.path.append(str(Path(__file__).parents[1] / "support"))

REPORTS = 0.01  # the share of cases with a whole report, whose figures take a second
NAMES = ("run", "run", "[bold]run[/bold]", "é ü", "a=1,b=2", "-x")
FACTS = {"settings": {"seed": 0}}


@cache
def _sound(scratch: Path) -> dict[str, bytes]:
    """{path: content} of a directory with the files of every command: a sweep of two runs, one with an evaluation."""
    from run_writer import RunWriter

    shutil.rmtree(scratch, ignore_errors=True)
    small = {"prompts": 4, "steps": 4, "every": 2}
    sweep = RunWriter(scratch).sweep("sweep", arms=("dapo", "gtpo"), seeds=(0,), spread=(0, 0), **small)
    first = sweep / "algo=dapo,seed=0"
    responses = [{"acc": 1.0, "answer": "2", "length": 3, "response": "= 2"}]
    problem = {"row": 0, "problem": "a", "data_source": "sums", "prompt": "1+1?", "ground_truth": "2", "failed": 0}
    files = {
        "phase.json": {"step": 3, "phase": "generating", "since": 1.0},
        "LOCK.json": {"host": "gone", "pid": 1, "heartbeat": 1.0, "token": "t"},
        "evaluation/evaluation.json": FACTS,
        "evaluation/problems.jsonl": problem | {"responses": responses},
        "groups.jsonl": {"step": 1, "groups": {"a": 1}},
        "checkpoints/latest_checkpointed_iteration.txt": 4,
        "checkpoints/global_step_4/step.json": {
            "metrics": {"step": 9, "data": {}},
            "groups": {"step": 9, "groups": {}},
        },
        "checkpoints/global_step_4/actor/fsdp_config.json": {"world_size": 1},
    }
    for name, value in files.items():
        (first / name).parent.mkdir(parents=True, exist_ok=True)
        (first / name).write_text(json.dumps(value) + "\n")
    (first / "train.log").write_text("gtpo_verl WARNING: odd\nerror: no more\n")
    (sweep / "attempts.json").write_text(json.dumps({"runs": {first.name: {"number": 1}}}))
    found = {str(file.relative_to(sweep)): file.read_bytes() for file in sweep.rglob("*") if file.is_file()}
    shutil.rmtree(scratch)
    return found


def _damaged(rng: Random, name: str, content: bytes) -> bytes:
    if rng.random() < 0.4:
        return torn(rng, content)
    if name.endswith(".jsonl"):
        lines = [json.loads(line) for line in content.splitlines()]
        for _ in range(rng.choice((1, 1, 3))):
            place = rng.randrange(len(lines))
            lines[place] = changed(rng, lines[place])
        rng.shuffle(lines)
        return b"\n".join(map(as_json, lines))
    if name.endswith(".yaml"):
        tree = changed(rng, yaml.safe_load(content))
        return yaml.safe_dump(tree, allow_unicode=False).encode("utf-8", "surrogatepass")
    return as_json(changed(rng, json.loads(content))) if name.endswith(".json") else as_json(odd(rng))


def write_sweep(rng: Random, directory: Path, *, sound: bool = False) -> Path:
    """A sweep, unless it is to be sound some of its files damaged, missing, or directories; returns it."""
    sweep = directory / rng.choice(NAMES)
    files = dict(_sound(directory.parent / "sound"))
    victims = [] if sound else rng.sample(sorted(files), rng.choice((1, 1, 1, 2, 4)))
    for name, content in files.items():
        file = sweep / name
        file.parent.mkdir(parents=True, exist_ok=True)
        way = rng.random() if name in victims else 1.0
        if way < 0.08:
            continue
        if way < 0.13:
            file.mkdir()
        else:
            file.write_bytes(_damaged(rng, name, content) if name in victims else content)
    return sweep


def _readers(sweep: Path) -> dict[str, Callable[[], Any]]:
    run = sweep / "algo=dapo,seed=0"
    layout = checkpoints.Layout("fsdp2", 1)
    samples = run / "validation" / "2.jsonl"
    return {
        "read a run": lambda: read_runs([run]),
        "read a sweep": lambda: read_runs([sweep]),
        "read both runs": lambda: read_runs([run, sweep / "algo=gtpo,seed=0"]),
        "status": lambda: status_of(run),
        "state": lambda: state_of(run),
        "status of a sweep": lambda: table(statuses(sweep)),
        "start": lambda: checkpoints.find_start(run / "checkpoints", layout),
        "restored step": lambda: restore_step(run, run / "checkpoints" / "global_step_4"),
        "subject of eval": lambda: find_subject(str(run), before=True),
        "problems": lambda: ProblemFile(run / "evaluation" / "problems.jsonl"),
        "an evaluation": lambda: open_evaluation(run / "evaluation", FACTS, fresh=False),
        "change": lambda: changes_since(run / "evaluation", FACTS["settings"], [], limit=9, threshold=1.0),
        "measured": lambda: read_steps(run),
        "samples of verify": lambda: list(read_samples({samples: threshold_of(samples)})),
    }


def run_files(rng: Random, directory: Path) -> str:
    """Four of the readers get through, or say one line."""
    sweep = write_sweep(rng, directory)
    every = _readers(sweep)
    readers = {name: every[name] for name in rng.sample(sorted(every), 4)}
    if rng.random() < REPORTS:
        readers = {"report": lambda: write_report([sweep], directory / "report", rng.choice(((), ("seed",))))}
    outcome = PASSED
    for name, read in readers.items():
        try:
            read()
        except UserError as error:
            outcome = refused(error)
        except OSError as error:  # the command line says one line of these
            check(error.strerror, f"{name}: {error!r}")
            outcome = REFUSED
        except Exception as error:
            raise AssertionError(name) from error
    return outcome
