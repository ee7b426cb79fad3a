"""The one exception that a command shows to its user as a single line, and the place where it is shown."""

import os
import sys
from collections.abc import Callable


class UserError(Exception):
    """Something the user can put right; the message says what is wrong and what to do, in one line."""


def main_guard(command: Callable[[], int]) -> int:
    """Run a command; a :class:`UserError` becomes one line on stderr and exit code 2, Ctrl-C exit code 130.

    ``GTPO_VERL_TRACEBACK=1`` shows the stack trace as well.
    """
    try:
        return command()
    except UserError as error:
        if os.environ.get("GTPO_VERL_TRACEBACK") == "1":
            raise
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        return 130
