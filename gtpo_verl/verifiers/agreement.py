"""How far the two rules agree on dumped responses, with each other and with the verdicts of the run."""

import hashlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from gtpo_verl.errors import UserError
from gtpo_verl.files import read_json_lines, reading
from gtpo_verl.runs.correctness import is_correct
from gtpo_verl.runs.directory import CONFIG_FILE, RECORD_FILE
from gtpo_verl.verifiers import RULES
from gtpo_verl.verifiers.pool import Verdict, VerifierPool

SHOWN = 160  # characters of a response's end in an example
# by whether the rules `answer` and `boxed` found the response right
CELLS = {(1, 1): "both", (1, 0): "answer_only", (0, 1): "boxed_only", (0, 0): "neither"}


@dataclass(frozen=True)
class Sample:
    """A line of a dump; ``prompt`` is a digest of the prompt, ``correct`` what the run found, None where unknown."""

    place: str
    prompt: str
    response: str
    truth: str
    correct: bool | None


@dataclass(frozen=True)
class Example:
    """A response on which the rules disagree: where it is, how it ends, the truth, and both verdicts."""

    place: str
    truth: str
    end: str
    answer: Verdict
    boxed: Verdict


@dataclass
class Agreement:
    """Counts over verified samples: ``cells`` is the 2x2 table of the rules, ``recorded`` how often each rule agrees
    (True) or disagrees with the run.
    """

    cells: Counter[str] = field(default_factory=Counter)
    failures: dict[str, Counter[str]] = field(default_factory=lambda: {rule: Counter() for rule in RULES})
    recorded: dict[str, Counter[bool]] = field(default_factory=lambda: {rule: Counter() for rule in RULES})
    prompts: list[str] = field(default_factory=list)
    agreed: list[bool] = field(default_factory=list)
    examples: list[Example] = field(default_factory=list)

    def add(self, sample: Sample, answer: Verdict, boxed: Verdict, most_examples: int) -> None:
        """Count one sample."""
        verdicts = {"answer": answer, "boxed": boxed}
        right = {rule: verdict["acc"] == 1.0 for rule, verdict in verdicts.items()}  # a rule gives 0.0 or 1.0
        self.cells[CELLS[right["answer"], right["boxed"]]] += 1
        for rule, verdict in verdicts.items():
            if verdict["verifier_failure"]:
                self.failures[rule][verdict["verifier_failure"]] += 1
            if sample.correct is not None:
                self.recorded[rule][sample.correct == right[rule]] += 1
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
        """The share of samples on which the rules agree, a mean over prompts, each of the mean over its samples."""
        return float(self._means().mean())

    def interval(self) -> tuple[float, float]:
        """A 95 % interval of the share, by a bootstrap over prompts. Where it has no spread, a share of 0 or 1 gets the
        exact interval for as many independent prompts (Clopper and Pearson 1934), any other share the whole range.
        """
        from gtpo_verl.runs.statistics import CONFIDENCE, estimate

        means = self._means()
        interval = estimate(means).interval
        if interval is not None:
            return interval.low, interval.high
        edge = ((1 - CONFIDENCE) / 2) ** (1 / len(means))
        return {1.0: (edge, 1.0), 0.0: (0.0, 1 - edge)}.get(float(means.mean()), (0.0, 1.0))

    def _means(self) -> Any:
        """(P,) float64: the share of each prompt."""
        from gtpo_verl.runs.statistics import cluster_means

        return cluster_means(self.prompts, [float(agreed) for agreed in self.agreed])[1]

    def as_dict(self) -> dict[str, Any]:
        """The counts for programs."""
        low, high = self.interval()
        return {
            "judged": self.samples,
            "prompts": len(set(self.prompts)),
            "table": {cell: self.cells[cell] for cell in CELLS.values()},
            "agreement": {"share": self.share(), "low": low, "high": high, "confidence": 0.95},
            "failures": {rule: dict(self.failures[rule]) for rule in RULES},
            "recorded": {rule: {"same": each[True], "other": each[False]} for rule, each in self.recorded.items()},
            "examples": [asdict(example) for example in self.examples],
        }


def threshold_of(file: Path) -> float:
    """``algorithm.correct_threshold`` of the run whose directory holds the dump, 1.0 where no run does."""
    for directory in file.resolve().parents:
        config_file = directory / CONFIG_FILE
        if config_file.is_file() and (directory / RECORD_FILE).is_file():
            with reading(config_file):
                return float(OmegaConf.select(OmegaConf.load(config_file), "algorithm.correct_threshold"))
    return 1.0  # of a dump that belongs to no run; the project's own verifiers return 0.0 or 1.0


def read_samples(thresholds: dict[Path, float]) -> Iterator[Sample]:
    """Read the samples of dumps, one line at a time; ``thresholds``: the ``acc`` from which a response is correct, for
    each dump. Raises UserError: there is no such file, or a line is not a sample; names the line and what it lacks.
    """
    for file, threshold in thresholds.items():
        if not file.is_file():
            raise UserError(f"{file}: no such file.")
        try:
            for number, record in read_json_lines(file):
                yield _sample(record, f"{file}:{number}", threshold)
        except OSError as error:
            raise UserError(f"{file} cannot be read: {error.strerror}.") from error


def _sample(record: Any, place: str, threshold: float) -> Sample:
    if record is None:
        raise UserError(f"{place} is not JSON: the file must be a dump of verl's, in JSON lines.")
    if not isinstance(record, dict) or not isinstance(record.get("output"), str):
        has = ", ".join(map(str, record)) if isinstance(record, dict) else type(record).__name__
        raise UserError(f"{place} has no text `output`, the response (it has: {has}).")
    if record.get("gts") is None:
        raise UserError(f"{place} has no `gts`, the correct answer, which the verifiers compare with.")
    prompt = hashlib.blake2b(str(record.get("input", place)).encode("utf-8", "replace"), digest_size=12).hexdigest()
    acc = record.get("acc")
    if acc is not None and not isinstance(acc, int | float):
        raise UserError(f"{place}: `acc` must be a number, and is {acc!r}.")
    correct = None if acc is None else is_correct(acc, threshold)
    return Sample(place, prompt, record["output"], str(record["gts"]), correct)


def verified(
    samples: Iterable[Sample], answer: VerifierPool, boxed: VerifierPool, ahead: int
) -> Iterator[tuple[Sample, Verdict, Verdict]]:
    """Verify samples by both rules and yield them in order; at most ``ahead`` further ones are in memory."""
    waiting: deque[tuple[Sample, Future[Verdict], Future[Verdict]]] = deque()
    for sample in samples:
        first, second = (pool.submit(sample.response, sample.truth) for pool in (answer, boxed))
        waiting.append((sample, first, second))
        if len(waiting) > ahead:
            oldest, first, second = waiting.popleft()
            yield oldest, first.result(), second.result()
    for oldest, first, second in waiting:
        yield oldest, first.result(), second.result()
