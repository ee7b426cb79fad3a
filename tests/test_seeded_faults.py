"""The faults that `make test-faults` seeds are where it looks for them: that command takes half an hour to say so."""

from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def test_every_fault_is_in_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(TESTS)
    from seeded_faults import FAULTS, ROOT

    moved = {
        fault.name for fault in FAULTS if (ROOT / "gtpo_verl" / fault.file).read_text().count(fault.old) != fault.count
    }
    assert moved == set()
    named = {test for fault in FAULTS for test in fault.tests}
    assert {test for test in named if not (ROOT / test.partition("::")[0]).exists()} == set()
