"""A directory of the launcher, in which process 0 reports, as files.

The launcher makes it, private to its user, names it in JAXCOMM_RUN_DIRECTORY, and removes it.
"""

import contextlib
import os
from pathlib import Path

from jaxcomm.launch._environment import PROCESS

RUN_DIRECTORY = "JAXCOMM_RUN_DIRECTORY"

PREEMPTED = "preempted"  # `is_preempted` has returned True.
CHECKPOINT = "checkpoint"  # One line: the path of the newest complete checkpoint.


def _report(name: str, text: str) -> None:
    """Writes a file at once; does nothing except in process 0 of a launcher."""
    path = os.environ.get(RUN_DIRECTORY)
    if path and os.environ.get(PROCESS, "0") == "0":
        with contextlib.suppress(FileNotFoundError):  # The launcher was killed.
            written = Path(path, f".{name}-{os.getpid()}")
            written.write_text(text, encoding="utf-8")
            written.replace(Path(path, name))


def report_preempted() -> None:
    """Reports that all processes stop after this step."""
    _report(PREEMPTED, "")


def report_checkpoint(path: str | os.PathLike[str]) -> None:
    """Reports the newest complete checkpoint."""
    _report(CHECKPOINT, f"{os.path.abspath(path)}\n")
