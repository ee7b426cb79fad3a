"""Prepare an embedded task: a warm-started model and two parquet files in verl's schema, cached and written atomically.

``manifest.json`` has the parameters, the versions, the accuracy of the warm-started model, and a key over everything
that decides the content: a second call with the same key reads the manifest and returns.
"""

import hashlib
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gtpo_verl import __version__
from gtpo_verl.errors import UserError
from gtpo_verl.files import read_json, reading, write_json
from gtpo_verl.runs.lock import preparing
from gtpo_verl.runs.statistics import cluster_standard_error
from gtpo_verl.tasks import EmbeddedTask, Task, task_of

if TYPE_CHECKING:  # torch and transformers take seconds to import, and a prepared task needs neither
    from omegaconf import DictConfig
    from rich.console import Console
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

MANIFEST = "manifest.json"
SAMPLES_PER_PROMPT = 4  # of the baseline
WARM_START_THREADS = 2  # more do not help a model of this size

# The code that decides the content of a task, next to its own package and its parameters.
SOURCES = ("model.py", "prepare.py")


def prepare_task(task: EmbeddedTask, directory: Path, *, seed: int = 0) -> Task:
    """Return the task prepared in ``directory``, making it first (minutes on two cores) unless it is there already.

    A task prepared with other parameters or another version is replaced. Raises UserError: the problems do not allow
    the sizes of the parts, or the directory holds something else.
    """
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    directory = directory.absolute()
    parts = partition(task, seed)
    sizes = {"train_prompts": task.train_prompts, "val_prompts": task.val_prompts}
    parameters = {"task": task.name, "seed": seed, **sizes, "warm_start": asdict(task.warm_start)}
    key = _key(task, parameters)
    if (found := _load(directory, key)) is not None:
        console.print(f"Task: reusing {directory} (baseline accuracy {found.baseline:.3f})")
        return found
    if directory.exists() and any(directory.iterdir()) and not _replaceable(directory):
        raise UserError(
            f"{directory} exists and is not a prepared task, or holds other files too: choose another directory, or "
            "remove it."
        )

    with preparing(directory, announce=lambda line: console.print(f"Task: {line}")):
        for leftover in directory.parent.glob(f".{directory.name}.unfinished-*"):  # of one that was killed
            shutil.rmtree(leftover)
        if (found := _load(directory, key)) is not None:  # another process has just made it
            return found
        with tempfile.TemporaryDirectory(prefix=f".{directory.name}.unfinished-", dir=directory.parent) as scratch:
            new = Task(Path(scratch) / "new")
            new.directory.mkdir()
            _build(task, new, parts, seed, {"key": key, "parameters": parameters}, console)
            if directory.exists():  # killed in between, no directory is left rather than an incomplete one
                directory.rename(Path(scratch) / "former")
            new.directory.rename(directory)
    made = _load(directory, key)
    assert made is not None
    console.print(f"Task: ready in {directory}")
    return made


def _replaceable(directory: Path) -> bool:
    """Whether a directory holds a prepared task, of whatever parameters, and nothing else."""
    manifest, task = read_json(directory / MANIFEST) or {}, Task(directory)
    own = {MANIFEST, *(path.name for path in (task.model_path, task.train_file, task.val_file))}
    return {"key", "parameters"} <= set(manifest) and {path.name for path in directory.iterdir()} <= own


def use_embedded_prompts(config: "DictConfig") -> None:
    """Validate on an embedded task's own prompts where its verifier is used and no others are named; in place."""
    task = task_of(config.reward.custom_reward_function.path)
    if task is not None and config.data.val_files is None:
        config.data.val_files = str(prepare_task(task, task.directory(Path("outputs"))).val_file)


@dataclass(frozen=True)
class Partition:
    """The problems of each part. Validation has no cluster in common with another part."""

    validation: tuple[Any, ...]
    train: tuple[Any, ...]
    warm_start: tuple[Any, ...]


def partition(task: EmbeddedTask, seed: int) -> Partition:
    """Assign whole clusters in seeded order, to validation, then to training, the rest to the warm start, which has the
    training part too where the task says so.

    A cluster that would exceed the size asked for is passed over, so a part has at most that size and is short of it
    only where no small cluster is left. Raises UserError where a part would be empty.
    """
    clusters: dict[str, list[Any]] = {}
    for problem in task.problems:
        clusters.setdefault(task.cluster(problem), []).append(problem)
    rest = sorted(clusters, key=lambda name: _hash(seed, name))
    parts = []
    for size in (task.val_prompts, task.train_prompts, len(task.problems)):
        problems: list[Any] = []
        left = []
        for name in rest:
            if len(problems) + len(clusters[name]) <= size:
                problems += clusters[name]
            else:
                left.append(name)
        rest = left
        parts.append(tuple(sorted(problems, key=lambda problem: _hash(seed, task.prompt(problem)))))
    validation, train, warm_start = parts
    if task.warm_start_on_training:
        warm_start += train
    if not (validation and train and warm_start):
        raise UserError(
            f"train_prompts={task.train_prompts} and val_prompts={task.val_prompts} must be positive and leave some "
            f"of the {len(task.problems)} problems to the warm start; choose other sizes"
        )
    return Partition(validation, train, warm_start)


def demonstration_stream(
    task: EmbeddedTask, problems: Sequence[Any], error_rate: float, seed: int
) -> Iterator[tuple[Any, str]]:
    """Yield pairs of a problem, drawn uniformly from ``problems``, and a fresh demonstration of it, without end."""
    rng = random.Random(seed)
    while True:
        problem = rng.choice(problems)
        yield problem, task.demonstration(problem, error_rate, rng)


def _hash(seed: int, text: str) -> bytes:
    return hashlib.sha256(f"{seed}:{text}".encode()).digest()


def rows(task: EmbeddedTask, problems: Sequence[Any], split: str) -> list[dict[str, Any]]:
    """Return the problems as rows of verl's schema; intervals are bootstrapped over ``extra_info.cluster``."""
    return [
        {
            "data_source": task.data_source,
            "prompt": [{"role": "user", "content": task.prompt(problem)}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": task.ground_truth(problem)},
            "extra_info": {
                "index": index,
                "split": split,
                "question": task.prompt(problem),
                "cluster": task.cluster(problem),
            },
        }
        for index, problem in enumerate(problems)
    ]


def measure_accuracy(
    task: EmbeddedTask,
    model: "Qwen2ForCausalLM",
    tokenizer: "PreTrainedTokenizerFast",
    problems: Sequence[Any],
    *,
    seed: int,
) -> dict[str, float]:
    """Sample at temperature 1 and score: ``accuracy``, its ``standard_error`` by cluster, and ``samples``, how many."""
    from gtpo_verl.tasks.model import sample

    repeated = [problem for problem in problems for _ in range(SAMPLES_PER_PROMPT)]
    tokens = sample(model, tokenizer, [task.prompt(p) for p in repeated], task.max_response_length, seed)
    responses = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    correct = [
        task.compute_score(task.data_source, response, task.ground_truth(problem))["acc"]
        for problem, response in zip(repeated, responses, strict=True)
    ]
    means = np.reshape(correct, (len(problems), SAMPLES_PER_PROMPT)).mean(axis=1)
    clusters = [task.cluster(problem) for problem in problems]
    return {
        "accuracy": float(means.mean()),
        "standard_error": cluster_standard_error(means, clusters),
        "samples": len(correct),
    }


def _build(
    task: EmbeddedTask, new: Task, parts: Partition, seed: int, manifest: dict[str, Any], console: "Console"
) -> None:
    """Write everything into the directory of ``new``, the manifest last."""
    recipe = task.warm_start
    console.print(
        f"Task: {len(task.problems)} {task.kind}: {len(parts.train)} for training, {len(parts.validation)} "
        f"for validation, {len(parts.warm_start)} for the warm start; validation shares no "
        f"{task.cluster_name} with them"
    )
    started = time.monotonic()
    with console.status("Loading PyTorch and transformers"):
        import torch
        from pyarrow import Table, parquet

        from gtpo_verl.tasks import model as tiny

    for file, problems, split in ((new.train_file, parts.train, "train"), (new.val_file, parts.validation, "val")):
        parquet.write_table(Table.from_pylist(rows(task, problems, split)), file)

    threads = torch.get_num_threads()
    torch.set_num_threads(min(WARM_START_THREADS, os.cpu_count() or 1))
    try:
        tokenizer = tiny.build_tokenizer()
        model = tiny.build_model(len(tokenizer), seed)
        stream = demonstration_stream(task, parts.warm_start, recipe.error_rate, seed)
        pairs = ((task.prompt(problem), text) for problem, text in stream)
        console.print(
            f"Task: warm start of a Qwen2 ({model.num_parameters() / 1e6:.2f} M parameters) on demonstrations, "
            f"{recipe.steps} steps of {recipe.batch_size}, {torch.get_num_threads()} threads"
        )
        with _progress(console, recipe.steps) as advance:
            tiny.warm_start(model, tokenizer, pairs, recipe, advance)
        with console.status("Measuring the baseline"):
            baseline = measure_accuracy(task, model, tokenizer, parts.validation, seed=seed)
    finally:
        torch.set_num_threads(threads)
    tiny.save(model, tokenizer, new.model_path)

    console.print(
        f"Task: baseline accuracy {baseline['accuracy']:.3f} ± {1.96 * baseline['standard_error']:.3f} "
        f"on {baseline['samples']} samples of the validation prompts"
    )
    low, high = task.baseline_range
    if not low <= baseline["accuracy"] <= high:
        console.print(f"[yellow]Task: a baseline outside {low} to {high} leaves little to learn from; try another seed")
    manifest |= {
        "baseline": baseline,
        "recipe": asdict(recipe),
        "sizes": {name: len(problems) for name, problems in vars(parts).items()},
        "clusters": {name: len(set(map(task.cluster, problems))) for name, problems in vars(parts).items()},
        "versions": {"gtpo-verl": __version__} | {name: metadata.version(name) for name in ("torch", "transformers")},
        "seconds": round(time.monotonic() - started, 1),
    }
    write_json(new.directory / MANIFEST, manifest)


@contextmanager
def _progress(console: "Console", steps: int) -> Iterator[Callable[[float], None]]:
    """Show a progress bar; yields a function of the loss to be called after each step."""
    from rich.progress import Progress

    with Progress(*Progress.get_default_columns(), "loss {task.fields[loss]:.3f}", console=console) as bar:
        row = bar.add_task("warm start", total=steps, loss=float("nan"))

        def advance(loss: float) -> None:
            bar.update(row, advance=1, loss=loss)
            done = round(bar.tasks[row].completed)
            if not console.is_terminal and done % (steps // 4 or 1) == 0:
                console.print(f"Task: warm start, step {done} of {steps}, loss {loss:.3f}")

        yield advance


def _key(task: EmbeddedTask, parameters: dict[str, Any]) -> str:
    """Return a digest of everything that decides a task's content: parameters, package version, source code."""
    digest = hashlib.sha256(json.dumps([__version__, parameters], sort_keys=True).encode())
    tasks = Path(__file__).parent
    for file in (*(tasks / name for name in SOURCES), *sorted((tasks / task.name).glob("*.py"))):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _load(directory: Path, key: str) -> Task | None:
    """Return the task in ``directory``, or None where there is none or it has another key."""
    with reading(directory / MANIFEST):
        manifest = read_json(directory / MANIFEST)
        return Task(directory, manifest) if manifest and manifest.get("key") == key else None
