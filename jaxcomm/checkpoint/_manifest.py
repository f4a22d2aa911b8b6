"""What a checkpoint says of itself: path, shape, dtype and checksum of each leaf; its errors."""

import contextlib
import json
import os
import re
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxcomm.checkpoint._arrays import Leaf

FORMAT = 4
"""The only format that is written and read; those before it were never released."""

_SYSTEM = re.compile(r"os_error_code='(\d+)'")
"""How tensorstore reports an error of the system, at the end of a long line."""

_LONGEST = 300


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
        text = str(error).strip()
        reason = (text.partition("\n")[0] or type(error).__name__)[:_LONGEST].rstrip(".")
        if found := _SYSTEM.search(text):
            reason = os.strerror(int(found[1]))
        raise CheckpointError(f"{what}: {reason}. {advice}") from error


class Entry(NamedTuple):
    """A leaf of a checkpoint."""

    shape: tuple[int, ...]
    dtype: str
    checksum: int = 0  # 0 also if it has no values.

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def entry_of(leaf: Leaf, checksum: int = 0) -> Entry:
    """The description of a leaf."""
    return Entry(tuple(leaf.shape), str(leaf.dtype), checksum)


class Manifest(NamedTuple):
    """A checkpoint's description of itself."""

    position: Any
    leaves: dict[str, Entry]

    def signed(self) -> bytes:
        """A line of JSON, and the CRC-32 of that line."""
        leaves = {path: entry._asdict() for path, entry in self.leaves.items()}
        value = {"format": FORMAT, "position": self.position, "leaves": leaves}
        line = json.dumps(value).encode()
        return line + b"\n%d\n" % zlib.crc32(line)


def verified(written: bytes, where: str) -> Manifest:
    """The inverse of `Manifest.signed`.

    Raises:
      ValueError: If it is not what was written.
      CheckpointError: If it is of another format.
    """
    line, _, crc32 = written.partition(b"\n")
    if crc32 != b"%d\n" % zlib.crc32(line):
        raise ValueError("its manifest is damaged")
    value = json.loads(line)
    if value["format"] != FORMAT:
        raise CheckpointError(
            f"{where} has format {value['format']}, and this release reads format {FORMAT}: "
            "restore it with the jaxcomm that saved it."
        )
    leaves = {
        path: Entry(tuple(leaf["shape"]), leaf["dtype"], leaf["checksum"])
        for path, leaf in value["leaves"].items()
    }
    return Manifest(value["position"], leaves)
