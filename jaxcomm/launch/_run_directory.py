"""A private directory of one launch, in which process 0 tells the launcher how far it is.

`joined`: process 0 begins its roll call. `connected`: JAX has connected all processes.
`checkpoint`: one line, the absolute path of the newest complete checkpoint.
"""

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from jaxcomm.launch._errors import LaunchError

RUN_DIRECTORY = "JAXCOMM_RUN_DIRECTORY"
JOINED, CONNECTED, CHECKPOINT = "joined", "connected", "checkpoint"


def _write(name: str, line: str, environment: Mapping[str, str] | None) -> None:
    """Writes a file by rename, so that the launcher reads all of it or none."""
    if not (directory := (os.environ if environment is None else environment).get(RUN_DIRECTORY)):
        return
    part = Path(directory, f"{name}.part")
    part.write_text(line, encoding="utf-8", errors="surrogateescape")
    part.replace(Path(directory, name))


def report_joined(environment: Mapping[str, str] | None = None) -> None:
    """Tells the launcher that process 0 begins its roll call; without a launcher, does nothing."""
    _write(JOINED, "", environment)


def report_connected(environment: Mapping[str, str] | None = None) -> None:
    """Tells the launcher that all processes are connected; without a launcher, does nothing."""
    _write(CONNECTED, "", environment)


def report_checkpoint(path: str | Path, environment: Mapping[str, str] | None = None) -> None:
    """Tells the launcher the newest complete checkpoint; without a launcher, does nothing.

    Process 0 calls this, once the checkpoint can be restored.
    """
    _write(CHECKPOINT, f"{Path(path).absolute()}\n", environment)


class Reported(NamedTuple):
    """A checkpoint that process 0 has reported."""

    path: str
    changed: tuple[int, int]  # Differs for two reports, also of the same path.


class RunDirectory:
    """The launcher's side: makes the directory, reads it, and removes it."""

    def __enter__(self) -> Self:
        try:
            self._path = Path(tempfile.mkdtemp(prefix="jaxcomm-launch-"))  # Mode 0700.
        except OSError as error:
            raise LaunchError(
                f"launch cannot make a directory in {tempfile.gettempdir()}: {error.strerror}; "
                "set TMPDIR to a directory that it may write to."
            ) from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        shutil.rmtree(self._path, ignore_errors=True)

    @property
    def environment(self) -> dict[str, str]:
        """The variable that tells the processes of this directory."""
        return {RUN_DIRECTORY: str(self._path)}

    def begin(self) -> None:
        """Forgets the roll call of the start before; the checkpoint stays."""
        for name in (JOINED, CONNECTED):
            (self._path / name).unlink(missing_ok=True)

    def has_joined(self) -> bool:
        return (self._path / JOINED).exists()

    def has_connected(self) -> bool:
        return (self._path / CONNECTED).exists()

    def checkpoint(self) -> Reported | None:
        """Returns the newest checkpoint, if one was reported."""
        try:
            with open(self._path / CHECKPOINT, encoding="utf-8", errors="surrogateescape") as file:
                status = os.fstat(file.fileno())
                line = file.readline().strip()
        except FileNotFoundError:
            return None
        return Reported(line, (status.st_ino, status.st_mtime_ns)) if line else None
