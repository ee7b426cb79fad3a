"""docs/your-verl-command.md says which of verl's defaults differ, as the composed configurations have it."""

import pytest
from verl_defaults import PAGE, written


@pytest.mark.slow
def test_the_table_of_changed_defaults_is_that_of_today() -> None:
    page = PAGE.read_text()
    assert page == written(page), "write it anew: python tests/support/verl_defaults.py"
