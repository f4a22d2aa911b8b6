"""The error of checkpoints."""

import contextlib
from collections.abc import Iterator


class CheckpointError(RuntimeError):
    """A checkpoint cannot be saved, or cannot be restored into this program. One line."""


@contextlib.contextmanager
def explained(what: str, advice: str) -> Iterator[None]:
    """Raises errors of the block as one line: what failed, why, and what to do.

    Raises:
      CheckpointError: If the block raises.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        raise CheckpointError(f"{what}: {reason[:300].rstrip('.')}. {advice}") from error
