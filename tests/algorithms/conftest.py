"""Random batches and settings for the tests of the algorithms, as hypothesis strategies behind session fixtures."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st

HERE = Path(__file__).parent

settings.register_profile("algorithms", max_examples=60, deadline=None)
settings.load_profile("algorithms")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Settings are tried over the whole grid here; that they warn when their shares do not sum to 1 has a test of its
    own.
    """
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.filterwarnings(r"ignore:(alpha|beta)1 \+ (alpha|beta)2 = "))


@dataclass
class Batch:
    """The arguments of an advantage function; what a test changes it changes with `dataclasses.replace`."""

    entropy: torch.Tensor
    correct: torch.Tensor
    mask: torch.Tensor
    group: torch.Tensor

    def call(self, function: Callable[..., Any], config: Any, **kwargs: Any) -> Any:
        return function(self.entropy, self.correct, self.mask, self.group, config, **kwargs)

    @property
    def lengths(self) -> torch.Tensor:
        return self.mask.sum(1)


@st.composite
def _batches(
    draw: st.DrawFn,
    holes: bool = True,
    empty: bool = True,
    mixed: bool = False,
    tokens: int = 24,
    smallest_group: int = 1,
) -> Batch:
    """Ragged float64 batches with NaN in the padding, shuffled rows and arbitrary group ids.

    holes: masks may have holes. empty: rows may be empty. mixed: every group has a correct and a wrong response.
    tokens: longest row.
    """
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31 - 1)))
    groups = draw(st.integers(1, 4))
    sizes = draw(st.lists(st.integers(2 if mixed else smallest_group, 6), min_size=groups, max_size=groups))
    ids = draw(st.lists(st.integers(-(2**40), 2**40), min_size=groups, max_size=groups, unique=True))
    group = torch.tensor(ids).repeat_interleave(torch.tensor(sizes))
    share = draw(st.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0]))
    rows, columns = len(group), draw(st.integers(1, tokens))
    correct = torch.rand(rows, generator=generator) < share
    if mixed:
        starts = torch.tensor([0, *sizes[:-1]]).cumsum(0)
        correct[starts], correct[starts + 1] = True, False
    shuffle = torch.randperm(rows, generator=generator)
    group, correct = group[shuffle], correct[shuffle]
    lengths = torch.randint(0 if empty else 1, columns + 1, (rows,), generator=generator)
    mask = torch.arange(columns) < lengths[:, None]
    if holes and draw(st.booleans()):
        mask &= torch.rand(rows, columns, generator=generator) < 0.8
        if not empty or mixed:
            mask[:, 0] = True
    uniform = torch.rand(rows, columns, generator=generator, dtype=torch.float64)
    kind = draw(st.sampled_from(["usual", "equal", "near zero", "peaked"]))
    entropy = {
        "usual": 3 * uniform,
        "equal": torch.full_like(uniform, 0.3),
        "near zero": 1e-7 * uniform,
        "peaked": torch.where(uniform < 0.5, 1e-9, 4 * uniform),
    }[kind]
    return Batch(torch.where(mask, entropy, torch.nan), correct, mask, group)


def _shared() -> dict[str, st.SearchStrategy[Any]]:
    return {
        "negatives": st.sampled_from(["zero", "inverse", "based_inverse"]),
        "mean": st.sampled_from(["arithmetic", "geometric"]),
        "scope": st.sampled_from(["group", "batch"]),
        "norm_scope": st.sampled_from(["group", "batch"]),
        "normalization": st.sampled_from(["all", "joint", "within", "none"]),
        "degenerate": st.sampled_from(["zero", "shape"]),
        "preserve_sign": st.booleans(),
        "entropy_clip": st.sampled_from([None, (0.2, 0.28)]),
        "entropy_floor": st.sampled_from([1e-6, 1e-3]),
    }


@pytest.fixture(scope="session")
def batches() -> Callable[..., st.SearchStrategy[Batch]]:
    return _batches


@pytest.fixture(scope="session")
def gtpo_settings() -> Callable[..., st.SearchStrategy[dict[str, Any]]]:
    """Keyword arguments of GTPOConfig over the whole grid; keywords fix a setting."""

    def build(**fixed: Any) -> st.SearchStrategy[dict[str, Any]]:
        grid = _shared() | {
            "alpha1": st.sampled_from([0.9, 1.0]),
            "alpha2": st.sampled_from([0.1, 0.5]),
            "axis": st.sampled_from(["position", "response", "matrix"]),
            "clip_kappa": st.sampled_from([None, 2.0]),
        }
        return st.fixed_dictionaries(grid | {name: st.just(value) for name, value in fixed.items()})

    return build


@pytest.fixture(scope="session")
def grpo_s_settings() -> Callable[..., st.SearchStrategy[dict[str, Any]]]:
    """Keyword arguments of GRPOSConfig over the whole grid; keywords fix a setting."""

    def build(**fixed: Any) -> st.SearchStrategy[dict[str, Any]]:
        grid = _shared() | {
            "beta1": st.sampled_from([0.9, 1.0]),
            "beta2": st.sampled_from([0.1, 0.5]),
            "entropy_mean": st.sampled_from(["arithmetic", "geometric"]),
        }
        return st.fixed_dictionaries(grid | {name: st.just(value) for name, value in fixed.items()})

    return build
