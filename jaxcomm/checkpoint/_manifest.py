"""What a checkpoint says of itself: its format; path, shape, dtype and checksum of each leaf."""

import math
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from jaxcomm.checkpoint._errors import CheckpointError
from jaxcomm.checkpoint._leaves import Leaf

FORMAT = 3
"""The only format that is written and read; those before it were never released."""

_AXES = re.compile(r"\.per_worker\['([^']*)'\]|\['per_worker'\]\['([^']*)'\]")


class Entry(NamedTuple):
    """A leaf of a checkpoint."""

    shape: tuple[int, ...]
    dtype: str
    checksum: int  # That of `_checksum.py`, if there is no `crc32`.
    offset: int | None = None  # Where it begins in the pack, in bytes; None: an array of its own.
    crc32: int | None = None  # Of its bytes in the pack.

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class Manifest(NamedTuple):
    """A checkpoint's description of itself; arrays are numbered in the order of `leaves`."""

    step: int
    position: Any
    leaves: dict[str, Entry]


def entry_of(leaf: Leaf, checksum: int = 0, offset: int | None = None) -> Entry:
    """The description of a leaf; `save` adds the CRC-32 of a packed one."""
    return Entry(tuple(leaf.shape), str(leaf.dtype), checksum, offset)


def to_json(manifest: Manifest) -> dict[str, Any]:
    """The manifest as JSON."""
    leaves = [{"path": path, **entry._asdict()} for path, entry in manifest.leaves.items()]
    return {
        "format": FORMAT,
        "step": manifest.step,
        "position": manifest.position,
        "leaves": leaves,
    }


def from_json(value: Any, where: str) -> Manifest:
    """Reads a manifest.

    Raises:
      CheckpointError: If it is of another format, or is not a manifest.
    """
    number = value.get("format") if isinstance(value, dict) else None
    if not isinstance(number, int):
        raise CheckpointError(f"{where} is not a checkpoint of jaxcomm: it has no format.")
    if number != FORMAT:
        raise CheckpointError(
            f"{where} has format {number}, and this release reads format {FORMAT}: restore it with "
            "the jaxcomm that saved it."
        )
    try:
        leaves = {
            str(leaf["path"]): Entry(
                tuple(int(n) for n in leaf["shape"]),
                str(leaf["dtype"]),
                int(leaf["checksum"]),
                None if leaf["offset"] is None else int(leaf["offset"]),
                None if leaf["crc32"] is None else int(leaf["crc32"]),
            )
            for leaf in value["leaves"]
        }
        return Manifest(int(value["step"]), value["position"], leaves)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{where} is damaged: its manifest lacks {error}.") from error


def axes_of(path: str) -> str | None:
    """The axes of workers over which a leaf differs, such as `"data"`; None if it does not."""
    found = _AXES.search(path)
    return (found[1] or found[2]) if found else None


def require_same_leaves(saved: Mapping[str, Entry], start: Mapping[str, Entry], where: str) -> None:
    """Raises unless both have the same leaves, of the same dtypes.

    Raises:
      CheckpointError: If a leaf is missing in one of them, or has another dtype.
    """
    advice = "It is of another model, method or version: restore with the program that saved it."
    for path in start:
        if path not in saved:
            raise CheckpointError(f"{where} lacks the leaf `{path}`. {advice}")
    for path, entry in saved.items():
        if path not in start:
            raise CheckpointError(
                f"{where} has the leaf `{path}`, which this program lacks. {advice}"
            )
        if entry.dtype != start[path].dtype:
            raise CheckpointError(
                f"{where} has the leaf `{path}` as {entry}, and this program has {start[path]}. "
                f"{advice}"
            )


def other_workers(
    saved: Mapping[str, Entry], start: Mapping[str, Entry], where: str, by_worker: Collection[str]
) -> tuple[int, int] | None:
    """The numbers of workers of the checkpoint and of `start`, or None if they are equal.

    `by_worker` are the paths of other leaves with a row per worker, such as those of a clock.

    Raises:
      CheckpointError: If a leaf that is equal on all workers has another shape.
    """

    def has_rows(path: str) -> bool:
        return axes_of(path) is not None or path in by_worker

    different = None
    for path, entry in saved.items():
        old, new = entry.shape, start[path].shape
        if has_rows(path) and old and new and old[0] != new[0]:
            different = different or (old[0], new[0])
    for path, entry in saved.items():
        of_workers = different and has_rows(path)
        if entry.shape != start[path].shape and not of_workers:
            raise CheckpointError(
                f"{where} has the leaf `{path}` as {entry}, and this program has {start[path]}. "
                "It is of another model or method: restore with the program that saved it."
            )
    return different


def size_of(entry: Entry) -> int:
    """The number of values of a leaf."""
    return math.prod(entry.shape)
