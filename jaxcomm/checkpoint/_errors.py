"""The error of checkpoints."""

import contextlib
import os
import re
from collections.abc import Iterator


class CheckpointError(RuntimeError):
    """A checkpoint cannot be saved, or cannot be restored into this program. One line."""


_SYSTEM = re.compile(r"os_error_code='(\d+)'")
"""How tensorstore reports an error of the system, at the end of a long line."""

_LONGEST = 300


def _reason(error: Exception) -> str:
    text = str(error).strip()
    if found := _SYSTEM.search(text):
        return os.strerror(int(found[1]))
    first = text.partition("\n")[0] or type(error).__name__
    return first[:_LONGEST].rstrip(".")


@contextlib.contextmanager
def explained(what: str, advice: str) -> Iterator[None]:
    """Raises errors of the block as one line: what failed, why, and what to do.

    Raises:
      CheckpointError: If the block raises.
    """
    try:
        yield
    except (CheckpointError, ImportError):
        raise
    except Exception as error:
        raise CheckpointError(f"{what}: {_reason(error)}. {advice}") from error
