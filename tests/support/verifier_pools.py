"""A rule that misbehaves on command, and pools that are closed after a test."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gtpo_verl.verifiers.pool import VerifierPool

RULE = '''
import ctypes, os, signal, time

def judge(response, truth, **options):
    """The response is a statement that is run; what it does is the test."""
    scope = {"ctypes": ctypes, "os": os, "signal": signal, "time": time, "options": options}
    exec(response, scope)
    return scope.get("right", True), str(scope.get("pred", os.getpid()))
'''

MakePool = Callable[..., VerifierPool]


@pytest.fixture
def make_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakePool]:
    """Make a pool; ``rule="obedient"`` runs the response as Python and is right unless that says otherwise."""
    (tmp_path / "obedient.py").write_text(RULE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    pools: list[VerifierPool] = []

    def make(rule: str = "obedient", **settings: object) -> VerifierPool:
        pools.append(VerifierPool(rule, **settings))  # type: ignore[arg-type]
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
