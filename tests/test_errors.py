"""What the command line shows of an error."""

import pytest

from gtpo_verl.errors import UserError, did_you_mean, main_guard


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (UserError("do this"), "error: do this\n"),
        (UserError("x\ny \x1b[31m does not exist: é"), "error: x\\ny \\x1b[31m does not exist: é\n"),
        (PermissionError(13, "Permission denied", "/some/file"), "error: /some/file: Permission denied\n"),
        (OSError(28, "No space left on device"), "error: No space left on device\n"),
    ],
)
def test_what_a_user_can_put_right_is_one_line(
    error: Exception, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def command() -> int:
        raise error

    assert main_guard(command) == 2
    assert capsys.readouterr().err == line
    monkeypatch.setenv("GTPO_VERL_TRACEBACK", "1")
    with pytest.raises(type(error)):
        main_guard(command)


def test_the_closest_name_is_found_in_whatever_case() -> None:
    assert did_you_mean("GTPO", ["dapo", "gtpo", "Knight"]) == "; did you mean gtpo?"
    assert did_you_mean("knigth", ["dapo", "gtpo", "Knight"]) == "; did you mean Knight?"
    assert did_you_mean("luffy", ["dapo", "gtpo"]) == ""
