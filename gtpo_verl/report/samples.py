"""Responses on the page: where a method put the credit, and how answers to one prompt changed over the training."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gtpo_verl.files import read_json_lines
from gtpo_verl.report.results import Arm
from gtpo_verl.runs.correctness import is_correct
from gtpo_verl.runs.directory import SAMPLES_FILE, VALIDATION
from gtpo_verl.runs.reader import Training, threshold_of

SHOWN_PROMPTS = 2  # of the validation, with their responses over time
READ_PROMPTS = 8 * SHOWN_PROMPTS  # those are chosen among


@dataclass(frozen=True)
class Token:
    """A token of a response; shades are relative to its other tokens."""

    text: str
    advantage: float
    entropy: float  # nats
    shade: float  # in [0.15, 1]: how far the advantage is from 0
    entropy_shade: float  # in [0, 1]


@dataclass(frozen=True)
class CreditSample:
    """A response of an arm at a step."""

    arm: str
    step: int
    prompt: str
    correct: bool
    group: tuple[int, int]  # how many of its group are correct and wrong
    tokens: tuple[Token, ...]
    left_out: int  # tokens behind those that were kept
    alone: bool  # no other of its group has its verdict: its tokens have one credit, whatever their entropies


@dataclass(frozen=True)
class Response:
    """A response of a validation; ``correct`` as the training scored it."""

    step: int
    text: str
    correct: bool


def credit_samples(arms: Sequence[Arm]) -> list[CreditSample]:
    """Two responses of each arm's first training to one prompt, the same for as many arms as kept one, in their order.

    Preferred are prompts with two responses of each verdict in every arm, and the last step that has one.
    """
    kept: dict[tuple[int, str], dict[str, list[CreditSample]]] = {}
    for arm in arms:
        for step, found in _kept(arm.counted[0].training):
            place = kept.setdefault((step, found["prompt"]), {})
            place.setdefault(arm.name, []).append(_sample(arm.name, step, found))
    if not kept:
        return []

    def worth(place: tuple[int, str]) -> tuple[int, int, int]:
        by_arm = kept[place].values()
        return sum(min(samples[0].group) > 1 for samples in by_arm), len(by_arm), place[0]

    return [sample for samples in kept[max(kept, key=worth)].values() for sample in samples]


def _kept(training: Training) -> Iterator[tuple[int, dict[str, Any]]]:
    """Responses that a training kept with their advantages, each with its step."""
    file = training.path / SAMPLES_FILE
    lines = [line for _, line in read_json_lines(file) if isinstance(line, dict)] if file.is_file() else []
    for line in lines:
        for found in line.get("samples") or ():
            if found.get("tokens") and line["step"] <= training.last_step:
                yield line["step"], found


def responses_over_time(arms: Sequence[Arm]) -> list[tuple[str, list[tuple[str, list[Response]]]]]:
    """Of the first prompts that all arms validated: the prompt, and for each arm its responses at a few validations."""
    by_arm = {arm.name: _over_time(arm) for arm in arms}
    read = {name: found for name, found in by_arm.items() if found}
    if not read:
        return []
    prompts = [prompt for prompt in next(iter(read.values())) if all(prompt in found for found in read.values())]
    return [(prompt, [(name, found[prompt]) for name, found in read.items()]) for prompt in prompts[:SHOWN_PROMPTS]]


def _over_time(arm: Arm) -> dict[str, list[Response]]:
    """The first response to each prompt at the first validation, one in the middle and the last."""
    training = arm.counted[0].training
    steps = sorted({validation.step for found in training.validations.values() for validation in found})
    chosen = sorted({steps[0], steps[len(steps) // 2], steps[-1]}) if steps else []
    found: dict[str, list[Response]] = {}
    for step in chosen:
        firsts: dict[str, Response] = {}
        for _, line in read_json_lines(training.path / VALIDATION / f"{step}.jsonl"):
            if line is not None and line["input"] not in firsts:
                correct = is_correct(line.get("acc"), threshold_of(training.config))
                firsts[line["input"]] = Response(step, str(line.get("output", "")), correct)
            if len(firsts) == READ_PROMPTS:
                break
        for prompt, response in firsts.items():
            found.setdefault(prompt, []).append(response)
    return {prompt: responses for prompt, responses in found.items() if len(responses) == len(chosen)}


def _sample(arm: str, step: int, found: dict[str, Any]) -> CreditSample:
    """Shades run from the smallest to the largest in the response, so that small shifts are seen."""
    advantages, entropies = ([float(value) for value in found[name]] for name in ("advantages", "entropies"))
    distances = _relative([abs(value) for value in advantages])
    shades = [0.15 + 0.85 * distance for distance in distances] if any(distances) else [0.5] * len(advantages)
    columns = (found["tokens"], advantages, entropies, shades, _relative(entropies))
    tokens = tuple(Token(*one) for one in zip(*columns, strict=True))
    left_out = int(found["length"]) - len(tokens)
    right, wrong = found["group"]
    correct, alone = bool(found["correct"]), (right if found["correct"] else wrong) == 1
    return CreditSample(arm, int(step), found["prompt"], correct, (right, wrong), tokens, left_out, alone)


def _relative(values: Sequence[float]) -> list[float]:
    """Values as shares of their range; 0 where all are equal."""
    low, width = min(values), max(values) - min(values)
    return [(value - low) / width if width > 1e-6 else 0.0 for value in values]
