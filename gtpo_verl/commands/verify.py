"""``gtpo-verl verify FILE``: how far the two rules agree on the responses of a run."""

import argparse
import hashlib
import json
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from gtpo_verl.errors import UserError
from gtpo_verl.verifiers import RULES
from gtpo_verl.verifiers.pool import Verdict, VerifierPool

SCHEMA = 1  # raised when a key of the JSON report changes its meaning or goes
SHOWN = 160  # characters of a response's end in an example
CELLS = ("both", "answer_only", "boxed_only", "neither")

EPILOG = """\
FILE is a dump of responses as verl writes it: validation/STEP.jsonl of a run, or trainer.rollout_data_dir.
Each line is an object with `output` (the response) and `gts` (the right answer); `input` (the prompt) and `acc`
(the verdict of the run) are used where they are there.

examples:
  gtpo-verl verify outputs/dapo/validation/100.jsonl
  gtpo-verl verify rollouts/*.jsonl --json agreement.json --workers 8

Ctrl-C stops and reports on the responses that were judged.
"""


@dataclass(frozen=True)
class Sample:
    """A line of a dump; ``prompt`` is a digest that tells prompts apart, ``acc`` the verdict of the run or None."""

    place: str
    prompt: str
    response: str
    truth: str
    acc: float | None


@dataclass(frozen=True)
class Example:
    """A response on which the rules disagree: where it is, its end, the truth, and what each rule read."""

    place: str
    truth: str
    end: str
    answer: Verdict
    boxed: Verdict


@dataclass
class Agreement:
    """Counts over the judged samples. ``cells`` is the 2x2 table, ``recorded`` the agreement of each rule with the run's own verdict."""

    cells: Counter[str] = field(default_factory=Counter)
    failures: dict[str, Counter[str]] = field(default_factory=lambda: {rule: Counter() for rule in RULES})
    recorded: dict[str, Counter[bool]] = field(default_factory=lambda: {rule: Counter() for rule in RULES})
    prompts: list[str] = field(default_factory=list)
    agreed: list[bool] = field(default_factory=list)
    examples: list[Example] = field(default_factory=list)

    def add(self, sample: Sample, answer: Verdict, boxed: Verdict, most_examples: int) -> None:
        """Count one sample."""
        right = {"answer": answer["acc"] == 1.0, "boxed": boxed["acc"] == 1.0}
        cell = {(1, 1): "both", (1, 0): "answer_only", (0, 1): "boxed_only", (0, 0): "neither"}
        self.cells[cell[right["answer"], right["boxed"]]] += 1
        for rule, verdict in (("answer", answer), ("boxed", boxed)):
            if verdict["verifier_failure"]:
                self.failures[rule][verdict["verifier_failure"]] += 1
            if sample.acc is not None:
                self.recorded[rule][(sample.acc >= 1.0) == right[rule]] += 1
        agreed = right["answer"] == right["boxed"]
        self.prompts.append(sample.prompt)
        self.agreed.append(agreed)
        if not agreed and len(self.examples) < most_examples:
            end = "".join(c if c.isprintable() else " " for c in sample.response[-SHOWN:])
            self.examples.append(Example(sample.place, sample.truth, end, answer, boxed))

    @property
    def samples(self) -> int:
        return len(self.agreed)

    def share(self) -> float:
        """The share of samples on which the rules agree."""
        return sum(self.agreed) / self.samples

    def interval(self) -> tuple[float, float]:
        """A 95 % interval of the share over prompts.

        The samples of a prompt resemble each other, so prompts are drawn again (bootstrap). Where every prompt has the same
        share that would give a width of 0; a share of 0 or 1 then gets the exact interval of as many independent prompts
        (Clopper and Pearson 1934), another one the whole range.
        """
        from gtpo_verl.runs.statistics import CONFIDENCE, cluster_means, estimate

        _, means, _ = cluster_means(self.prompts, [float(agreed) for agreed in self.agreed])
        interval = estimate(means).interval
        if interval is not None:
            return interval.low, interval.high
        edge = ((1 - CONFIDENCE) / 2) ** (1 / len(means))
        return {1.0: (edge, 1.0), 0.0: (0.0, 1 - edge)}.get(self.share(), (0.0, 1.0))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``gtpo-verl verify``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a dump of responses, JSON lines")
    parser.add_argument("--workers", type=int, default=2, help="processes for each rule (default: %(default)s)")
    parser.add_argument(
        "--timeout", type=float, default=10.0, metavar="SECONDS", help="limit of one sample (default: %(default)s)"
    )
    parser.add_argument(
        "--memory-mb", type=int, default=1024, metavar="MIB", help="memory of one sample (default: %(default)s)"
    )
    parser.add_argument(
        "--no-fallback",
        action="store_true",
        help="boxed: a response without a box is wrong, instead of being read by its last formula or number",
    )
    parser.add_argument(
        "--examples", type=int, default=10, metavar="N", help="disagreements to show (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the report as JSON")


def run(args: argparse.Namespace) -> int:
    """Judge every response by both rules and report; returns the exit code.

    Raises:
        UserError: a file that is no dump, a limit that cannot be, or a report that cannot be written.
    """
    total = sum(1 for _ in read_samples(args.files))  # every line is checked before the first is judged
    if total == 0:
        raise UserError(f"no response in {', '.join(map(str, args.files))}.")
    if args.json is not None and not args.json.parent.is_dir():
        raise UserError(f"--json={args.json}: there is no directory {args.json.parent}.")
    limits = {"workers": args.workers, "timeout": args.timeout, "memory_mb": args.memory_mb}
    agreement = Agreement()
    interrupted = False
    with ExitStack() as stack:
        answer = stack.enter_context(VerifierPool("answer", **limits))
        boxed = stack.enter_context(VerifierPool("boxed", {"fallback": not args.no_fallback}, **limits))
        progress = stack.enter_context(_progress())
        task = progress.add_task("judging", total=total)
        try:
            for sample, first, second in judged(read_samples(args.files), answer, boxed, ahead=4 * args.workers):
                agreement.add(sample, first, second, args.examples)
                progress.advance(task)
        except KeyboardInterrupt:
            interrupted = True
    if agreement.samples == 0:
        raise KeyboardInterrupt
    print_report(agreement, total)
    if args.json is not None:
        write_json(args.json, agreement, total, args.files)
    return 130 if interrupted else 0


def _progress() -> Progress:
    return Progress(
        *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )


def read_samples(files: Sequence[Path]) -> Iterator[Sample]:
    """Read the samples of dumps, a line at a time.

    Raises:
        UserError: no such file, or a line that is not a sample; it names the line and what it lacks.
    """
    for file in files:
        if not file.is_file():
            raise UserError(f"{file}: no such file.")
        try:
            with file.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield _sample(line, f"{file}:{number}")
        except OSError as error:
            raise UserError(f"{file} cannot be read: {error.strerror}.") from error
        except UnicodeDecodeError as error:
            raise UserError(f"{file} is not text in UTF-8: it must hold JSON lines.") from error


def _sample(line: str, place: str) -> Sample:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is not JSON ({error}): the file must be a dump of verl's, JSON lines.") from error
    if not isinstance(record, dict) or not isinstance(record.get("output"), str):
        has = ", ".join(map(str, record)) if isinstance(record, dict) else type(record).__name__
        raise UserError(f"{place} has no text `output`, the response (it has: {has}).")
    if record.get("gts") is None:
        raise UserError(f"{place} has no `gts`, the right answer: nothing can be judged without it.")
    prompt = hashlib.blake2b(str(record.get("input", place)).encode("utf-8", "replace"), digest_size=12).hexdigest()
    acc = record.get("acc")
    if acc is not None and not isinstance(acc, int | float):
        raise UserError(f"{place}: `acc` must be a number, and is {acc!r}.")
    return Sample(place, prompt, record["output"], str(record["gts"]), None if acc is None else float(acc))


def judged(
    samples: Iterable[Sample], answer: VerifierPool, boxed: VerifierPool, ahead: int
) -> Iterator[tuple[Sample, Verdict, Verdict]]:
    """Judge samples by both rules, in order; at most ``ahead`` of them are in memory beside the one that is yielded."""
    waiting: deque[tuple[Sample, Future[Verdict], Future[Verdict]]] = deque()
    for sample in samples:
        waiting.append(
            (sample, answer.submit(sample.response, sample.truth), boxed.submit(sample.response, sample.truth))
        )
        if len(waiting) > ahead:
            first, one, other = waiting.popleft()
            yield first, one.result(), other.result()
    for first, one, other in waiting:
        yield first, one.result(), other.result()


def print_report(agreement: Agreement, total: int, console: Console | None = None) -> None:
    """Print the 2x2 table, the share with its interval, what failed, and examples."""
    console = console or Console(soft_wrap=True)
    cells, low_high = agreement.cells, agreement.interval()
    table = Table(box=None, header_style="dim", pad_edge=False)
    table.add_column("")
    table.add_column("boxed: right", justify="right")
    table.add_column("boxed: wrong", justify="right")
    table.add_row("answer: right", str(cells["both"]), str(cells["answer_only"]))
    table.add_row("answer: wrong", str(cells["boxed_only"]), str(cells["neither"]))
    console.print(table)
    if agreement.samples < total:
        console.print(f"interrupted: {agreement.samples} of {total} responses were judged", style="bold yellow")
    console.print(
        f"agreement {_percent(agreement.share())} of {agreement.samples} responses to {len(set(agreement.prompts))} prompts, "
        f"95 % interval {_percent(low_high[0])} to {_percent(low_high[1])}",
        highlight=False,
    )
    for rule in RULES:
        failures = agreement.failures[rule]
        if failures:
            text = ", ".join(f"{count} {name}" for name, count in sorted(failures.items()))
            console.print(f"{rule}: no verdict of its own on {failures.total()} (counted as wrong): {text}")
        same, other = agreement.recorded[rule][True], agreement.recorded[rule][False]
        if same + other:
            share = _percent(same / (same + other))
            console.print(f"{rule}: the run's own verdict on {share} of {same + other}", highlight=False)
    for example in agreement.examples:
        console.print(f"\n{example.place}  truth {example.truth!r}", markup=False, highlight=False)
        for rule, verdict in (("answer", example.answer), ("boxed", example.boxed)):
            what = "right" if verdict["acc"] else verdict["verifier_failure"] or "wrong"
            console.print(f"  {rule}: {what}, read {verdict['pred']!r}", markup=False, highlight=False)
        console.print(f"  ...{example.end}", markup=False, highlight=False, style="dim")


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def write_json(path: Path, agreement: Agreement, total: int, files: Sequence[Path]) -> None:
    """Write the report for programs.

    Raises:
        UserError: the file cannot be written.
    """
    low, high = agreement.interval()
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "files": [str(file) for file in files],
        "responses": total,
        "judged": agreement.samples,
        "prompts": len(set(agreement.prompts)),
        "table": {cell: agreement.cells[cell] for cell in CELLS},
        "agreement": {"share": agreement.share(), "low": low, "high": high, "confidence": 0.95},
        "failures": {rule: dict(agreement.failures[rule]) for rule in RULES},
        "recorded": {
            rule: {"same": counts[True], "other": counts[False]} for rule, counts in agreement.recorded.items()
        },
        "examples": [asdict(example) for example in agreement.examples],
    }
    try:
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}): choose another --json.") from error
    print(f"report: {path}", file=sys.stderr)
