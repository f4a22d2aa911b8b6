"""What orbax writes into the directory of a checkpoint: a manifest, a pack, and large arrays.

orbax is optional, so only `_store` imports this module, when a directory is opened.
"""

import dataclasses
import json
import os
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

MANIFEST, PACK = "manifest.json", "pack.bytes"


def _write(path: str, *parts: Any) -> None:
    """Writes a file to the disk, not only to the memory of the system."""
    with open(path, "wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())


def signed(manifest: Any) -> bytes:
    """A manifest as a line of JSON, and the CRC-32 of that line."""
    line = json.dumps(manifest).encode()
    return line + b"\n%d\n" % zlib.crc32(line)


def verified(written: bytes) -> Any:
    """The inverse of `signed`.

    Raises:
      ValueError: If it is not what was written.
    """
    line, _, crc32 = written.partition(b"\n")
    if crc32 != b"%d\n" % zlib.crc32(line):
        raise ValueError("its manifest is damaged")
    return json.loads(line)


class NoMetadata(ocp.metadata.MetadataStore):
    """No file of orbax's own: the manifest says it all, and the file costs a thread per save."""

    def is_blocking_writer(self) -> bool:
        """Nothing is left to wait for."""
        return True

    def write(self, file_path: Any, metadata: Any) -> None:
        """Writes nothing."""

    def update(self, file_path: Any, **kwargs: Any) -> None:
        """Writes nothing."""

    def read(self, file_path: Any) -> None:
        """Finds nothing."""

    def wait_until_finished(self) -> None:
        """Waits for nothing."""

    def close(self) -> None:
        """Closes nothing."""


class StepHandler(ocp.AsyncCheckpointHandler):
    """Writes two files in one thread; arrays that are not in the pack are left to tensorstore.

    Files of one's own are cheap: orbax spends 20 ms of a core on a tree of a single array.
    """

    def __init__(self) -> None:
        """Starts no thread before it saves."""
        self._arrays = ocp.PyTreeCheckpointHandler()
        self._writer = ThreadPoolExecutor(1, "checkpoint")

    async def async_save(self, directory: Any, args: "StepSave") -> list[Future[None]]:
        """Copies the arrays; what it returns is the writing."""
        futures: list[Future[None]] = []
        if args.arrays:
            tree = ocp.args.PyTreeSave(dict(args.arrays))
            futures += await self._arrays.async_save(directory, args=tree) or []
        if jax.process_index() == 0:
            futures.append(self._writer.submit(self._write_files, str(directory), args))
        return futures

    @staticmethod
    def _write_files(directory: str, args: "StepSave") -> None:
        parts = args.pack
        if parts:
            _write(os.path.join(directory, PACK), *parts)
        _write(os.path.join(directory, MANIFEST), signed(args.manifest()))

    def save(self, directory: Any, args: "StepSave") -> None:
        """Not used: every save is in the background."""
        raise NotImplementedError("Checkpoints are saved in the background.")

    def restore(self, directory: Any, args: "StepRestore") -> dict[str, Any]:
        """The arrays that are not in the pack."""
        tree = ocp.args.PyTreeRestore(
            item=dict.fromkeys(args.arrays, 0), restore_args=dict(args.arrays)
        )
        found: dict[str, Any] = self._arrays.restore(directory, args=tree)
        return found

    def finalize(self, directory: Any) -> None:
        """Joins what the processes have written."""
        if any(path.name.startswith("ocdbt.process") for path in directory.iterdir()):
            self._arrays.finalize(directory)

    def close(self) -> None:
        """Ends the threads."""
        self._writer.shutdown()
        self._arrays.close()


@ocp.args.register_with_handler(StepHandler, for_save=True)
@dataclasses.dataclass
class StepSave(ocp.args.CheckpointArgs):
    """What to save.

    Attributes:
      manifest: Makes the manifest, in the background.
      pack: The bytes of each packed array, in order.
      arrays: The other arrays.
    """

    manifest: Callable[[], Any]
    pack: list[np.ndarray]
    arrays: Mapping[str, Any]


@ocp.args.register_with_handler(StepHandler, for_restore=True)
@dataclasses.dataclass
class StepRestore(ocp.args.CheckpointArgs):
    """The arrays to restore, and how orbax restores each."""

    arrays: Mapping[str, Any]
