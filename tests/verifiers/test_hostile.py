"""Hostile answers against the real rules: every one gets a verdict within its limits, and the good one after it is
right.

The first test takes one of each kind, `make test` a hundred, `make test-exhaustive` a thousand, for either rule.
"""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from gtpo_verl.verifiers.pool import VerifierPool

Kind = Callable[[random.Random], str]


def nested(opening: str, core: str, closing: str) -> Kind:
    def make(rng: random.Random) -> str:
        depth = rng.choice([10, 100, 1000, 10_000])
        return opening * depth + core + closing * depth

    return make


def power(rng: random.Random) -> str:
    return "^{".join(str(rng.randint(2, 99)) for _ in range(rng.randint(2, 6))) + "}" * 5


def garbage(alphabet: str, longest: int = 2000) -> Kind:
    return lambda rng: "".join(rng.choices(alphabet, k=rng.randint(1, longest)))


def long(rng: random.Random) -> str:
    """Ten megabytes; the answer is at the start, in the middle or at the end of what nobody will read whole."""
    filler = rng.choice(["x", "$", "\\frac{", "9", "\n", "\\boxed{", "answer is "])
    return filler * (10**7 // len(filler)) + rng.choice(["", "}", "\n\\boxed{2"])


KINDS: dict[str, Kind] = {
    "power": power,
    "power in parentheses": lambda rng: "(" * rng.randint(0, 9) + f"{rng.randint(2, 9)}**" * rng.randint(2, 9) + "9",
    "factorial": lambda rng: f"{rng.randint(10, 10**9)}" + "!" * rng.randint(1, 5),
    "binomial": lambda rng: rf"\binom{{{10 ** rng.randint(3, 12)}}}{{{10 ** rng.randint(3, 11)}}}",
    "roots": nested(r"\sqrt{", "2", "}"),
    "fractions": nested(r"\frac{1}{1+", "x", "}"),
    "parentheses": nested("(", "1", ")"),
    "left": nested(r"\left(", "1", r"\right)"),
    "open braces": nested("{", "1", ""),
    "closed braces": nested("", "1", "}"),
    "minus": nested("-", "1", ""),
    "boxes": nested(r"\boxed{", "1", "}"),
    "sum": lambda rng: rf"\sum_{{k=1}}^{{{10 ** rng.randint(3, 30)}}} \frac{{1}}{{k^{rng.randint(1, 5)}}}",
    "product": lambda rng: rf"\prod_{{k=1}}^{{{10 ** rng.randint(3, 9)}}} k^k",
    "integral": lambda rng: rf"\int_0^\infty e^{{-x^{rng.randint(2, 9)}}} \sin(x^{rng.randint(2, 9)}) \ln x \, dx",
    "polynomial": lambda rng: "".join(f"(x+{rng.randint(1, 99)}y)^{{{rng.randint(50, 999)}}}" for _ in range(5)),
    "functions": nested(r"\sin(\cos(", "x", "))"),
    "matrix": lambda rng: r"\begin{pmatrix}" + "1 & 2 \\\\ " * rng.randint(10, 2000) + r"\end{pmatrix}",
    "set": lambda rng: r"\{" + ",".join(str(rng.random()) for _ in range(rng.randint(10, 2000))) + r"\}",
    "interval": lambda rng: r" \cup ".join(f"[{k}, {k + 1})" for k in range(rng.randint(2, 300))),
    "digits": lambda rng: str(rng.randint(1, 9)) * rng.randint(100, 15_000),
    "decimals": lambda rng: "0." + "3" * rng.randint(100, 15_000) + "e" + "9" * rng.randint(1, 10),
    "unbalanced": garbage(r"{}[]()$\^_&%#", 500),
    "latex": lambda rng: "".join(
        rng.choices([r"\frac", r"\sqrt", r"\boxed", r"\text", "{", "}", "$", "^", "_", "1", "x", r"\left", r"\int"], k=60)
    ),
    "control characters": garbage("".join(map(chr, range(32))) + "\x7f\x80\x9f\u2028\u2029\ufeff"),
    "nulls": lambda rng: "\0" * rng.randint(1, 5000) + "1",
    "surrogates": garbage("\ud800\udbff\udc00\udfff1x"),
    "right to left": garbage("\u202e\u202b\u0660\u0661١٢²³⅓\U0001d7d9\U0001f600"),
    "dollars": lambda rng: "$" * rng.randint(100, 9000),
    "answers": lambda rng: "answer is " * rng.randint(100, 2000) + "$",
    "spaces": lambda rng: "1" + " " * rng.randint(100, 9000) + "/" + "\t" * 5000 + "2",
    "python": lambda rng: rng.choice(
        [
            "__import__('os').system('touch hostile')",
            "().__class__.__bases__[0].__subclasses__()",
            "exec('while True: pass')",
            "{'a': open('hostile', 'w')}",
            "lambda: exit()",
            "[x for x in range(10**12)]",
        ]
    ),
    "tex": lambda rng: rng.choice([r"\input{/etc/passwd}", r"\def\a{\a\a}\a", r"\write18{touch hostile}", r"\loop\repeat"]),
    "json": lambda rng: rng.choice(['{"right": true}\n', '"}\n{"ready": true}\n', '\n{"right": true, "pred": "1"}\n']),
    "long": long,
}  # fmt: skip
FRAMES = (r"\boxed{%s}", r"so $\boxed{%s}$.", "Answer: %s", "$%s$", r"\[%s\]", "%s")


def hostile(count: int, seed: int = 0) -> Iterator[tuple[str, str]]:
    """``count`` pairs of a response and a truth, the kinds in turn; the truth is another of its kind as often as a
    number.
    """
    rng = random.Random(seed)
    kinds = list(KINDS.values())
    for number in range(count):
        kind = kinds[number % len(kinds)]
        response = rng.choice(FRAMES).replace("%s", kind(rng))
        truth = "2" if kind is long or rng.random() < 0.5 else kind(rng)
        yield response, truth


def judge_all(rule: str, count: int, workers: int, timeout: float, memory_mb: int = 256) -> None:
    """Judge hostile pairs and check what must hold for each and after all; prints what became of them."""
    with VerifierPool(rule, workers=workers, timeout=timeout, memory_mb=memory_mb) as pool:
        good = {"answer": "Answer: 7", "boxed": r"\boxed{\frac{14}{2}}"}[rule]
        assert judges_well(pool, good)
        assert pool._server is not None
        server = psutil.Process(pool._server.process.pid)
        before = server.memory_info().rss
        most = 0
        waiting = []
        for response, truth in hostile(count):
            waiting.append(pool.submit(response, truth))
            if len(waiting) < 2 * workers:
                continue  # a 10 MB response is cut when it is handed over: what waits is small
            verdict = waiting.pop(0).result()
            assert verdict["acc"] in (0.0, 1.0)
            assert verdict["score"] == 2 * verdict["acc"] - 1
            verdict["pred"].encode("utf-8")  # a lone surrogate would raise
            most = max([most, *map(resident, server.children())])
        for future in waiting:
            assert future.result()["acc"] in (0.0, 1.0)
        assert judges_well(pool, good)
        assert pool.judge(good, "8")["acc"] == 0.0
        assert most < before + (memory_mb + 64) * 2**20
        print(rule, dict(pool.counts), f"most memory {most / 2**20:.0f} MiB")


def judges_well(pool: VerifierPool, good: str) -> bool:
    """Whether a right answer is right; with limits this tight it may take several tries on a busy machine."""
    return any(pool.judge(good, "7")["acc"] == 1.0 for _ in range(50))


def resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["answer", pytest.param("boxed", marks=pytest.mark.slow)])
def test_one_of_each_kind(rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gtpo_verl.verifiers.pool.GRACE", 60.0)  # the processes that are watched stay the same
    judge_all(rule, len(KINDS), workers=4, timeout=1.0)
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["answer", "boxed"])
@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.exhaustive)])
def test_many(count: int, rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gtpo_verl.verifiers.pool.GRACE", 60.0)  # the processes that are watched stay the same
    judge_all(rule, count, workers=8, timeout=0.25)
    assert os.listdir(tmp_path) == []
