"""Records of an evaluation, made by hand."""

from collections.abc import Callable

import pytest

from gtpo_verl.evaluation.records import ProblemRecord, Response, problem_key


@pytest.fixture
def record() -> Callable[..., ProblemRecord]:
    def make(row: int, accs: list[float | None], *, failed: int = 0, length: int = 5) -> ProblemRecord:
        prompt = [{"role": "user", "content": f"{row}?"}]
        key = problem_key(prompt, str(row))
        responses = tuple(Response(key, "sums", acc, f"a{acc}", length, f"#{row}") for acc in accs)
        return ProblemRecord(row, key, "sums", prompt, str(row), failed, responses)

    return make
