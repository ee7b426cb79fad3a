"""The committed verdict is what its committed data say, and its statistics are what they are called."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from scipy import stats

RESULTS = Path(__file__).parents[1] / "docs" / "results"


@pytest.fixture
def verdict(tmp_path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("verdict", RESULTS / "verdict.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["verdict"] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_is_computed_from_the_data(verdict: ModuleType) -> None:
    assert verdict.page() == (RESULTS / "verdict.md").read_text()


def run_of(verdict: ModuleType, accuracy: float) -> dict[str, object]:
    return {
        "validations": {str(step): accuracy + 0.01 * place for place, step in enumerate(verdict.VALIDATED)},
        "steps": {name: [1.0] * verdict.STEPS for name in verdict.KEPT},
    }


def test_a_contrast_is_of_paired_endpoints(
    verdict: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdict, "DATA", tmp_path)
    rng = np.random.default_rng(0)
    seeds = verdict.PARTS["A"].seeds
    gains = rng.normal(0.03, 0.02, len(seeds))
    base = rng.normal(0.5, 0.1, len(seeds))
    for seed, gain, start in zip(seeds, gains, base, strict=True):
        verdict.write("sums", seed, {"runs": {"dapo": run_of(verdict, start), "gtpo": run_of(verdict, start + gain)}})
    failed = verdict.read("sums", seeds[0])
    failed["runs"]["gtpo"]["validations"].pop("24")
    verdict.write("sums", seeds[0], failed)

    found = verdict.Contrast.of("sums", "gtpo", "dapo", seeds)

    values = 100 * gains[1:]
    assert found.seeds == len(values)
    assert found.mean == pytest.approx(values.mean())
    assert found.p == pytest.approx(stats.ttest_rel(100 * (base + gains)[1:], 100 * base[1:]).pvalue)
    error = values.std(ddof=1) / np.sqrt(len(values))
    above = stats.t.sf((values.mean() - 2) / error, len(values) - 1)
    assert found.equivalence == pytest.approx(1 - above)
    assert found.flips <= 0.001
    assert "The runs are not complete" in verdict.page()


@pytest.mark.parametrize(
    ("adjusted", "equivalence", "words"),
    [
        (0.01, 0.2, "worse"),
        (0.01, 0.01, "worse, and by less than 2 points"),
        (0.2, 0.01, "equivalent within 2 points"),
        (0.2, 0.2, "not decided"),
    ],
)
def test_the_words_are_the_registered_ones(
    verdict: ModuleType, adjusted: float, equivalence: float, words: str
) -> None:
    contrast = verdict.Contrast("sums", "gtpo", "dapo", 16, -1.0, 1.0, -2.0, 0.0, 0.01, 0.01, equivalence)
    assert verdict.words(contrast, adjusted) == words
    assert f"| {words} |" in (RESULTS / "registration.md").read_text().replace("better, or worse", "worse")


def test_data_of_a_run_names_its_commit_and_overrides() -> None:
    for file in (RESULTS / "data").glob("*-[0-9]*.json"):
        for arm, run in json.loads(file.read_text())["runs"].items():
            assert run["overrides"], (file.name, arm)
            assert len(run["commit"]) == 40
