"""A directory of checkpoints: what orbax writes and reads, which are complete, which to keep."""

import importlib
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxcomm.checkpoint._leaves import Leaf, empty
from jaxcomm.checkpoint._manifest import Entry, Manifest, from_json, size_of, to_json
from jaxcomm.checkpoint._pack import bytes_of, unpack

_UNFINISHED = ".orbax-checkpoint-tmp"


def _handler() -> Any:
    try:
        importlib.import_module("orbax.checkpoint")
        return importlib.import_module("jaxcomm.checkpoint._handler")
    except ModuleNotFoundError as error:
        raise ImportError(
            f'`jaxcomm.checkpoint` needs {error.name}: `pip install "jaxcomm[checkpoint]"`.'
        ) from error


class Store:
    """Writes in the background; a directory gets its final name when it is complete."""

    def __init__(self, directory: Path, keep: int | None, complete: Callable[[], None]) -> None:
        """Opens the directory, and creates it if necessary; `complete` is called after a save."""
        self._handler = _handler()
        ocp = self._ocp = self._handler.ocp
        self._directory, self._keep = directory, keep
        directory.mkdir(parents=True, exist_ok=True)
        self._writes = False
        self._writer = ocp.AsyncCheckpointer(
            self._handler.StepHandler(),
            async_options=ocp.options.AsyncOptions(
                post_finalization_callback=complete, create_directories_asynchronously=False
            ),
            checkpoint_metadata_store=self._handler.NoMetadata(),
        )

    def steps(self) -> list[int]:
        """The complete checkpoints, oldest first."""
        names = [path.name for path in self._directory.iterdir() if path.is_dir()]
        return sorted(int(name) for name in names if name.isdecimal())

    def save(self, manifest: Manifest, packed: Sequence[np.ndarray], arrays: Sequence[Any]) -> None:
        """Writes the arrays in the background; they are copied when it returns.

        Those with an offset in the manifest are in `packed`.
        """
        if not self._writes:
            self._remove_unfinished()
            self._writes = True
        entries = manifest.leaves.values()
        tree = {
            str(i): x
            for i, (entry, x) in enumerate(zip(entries, arrays, strict=True))
            if x.size and entry.offset is None
        }

        def described() -> dict[str, Any]:
            sums = map(zlib.crc32, packed)
            leaves = {
                path: entry if entry.offset is None else entry._replace(crc32=next(sums))
                for path, entry in manifest.leaves.items()
            }
            return to_json(manifest._replace(leaves=leaves))

        args = self._handler.StepSave(described, packed, tree)
        self._writer.save(self._directory / str(manifest.step), args=args)

    def manifest(self, step: int, where: str) -> Manifest:
        """The manifest of a checkpoint."""
        written = (self._directory / str(step) / self._handler.MANIFEST).read_bytes()
        return from_json(self._handler.verified(written), where)

    def arrays(
        self, step: int, entries: Sequence[Entry], like: Sequence[Leaf]
    ) -> tuple[list[Any], dict[int, int]]:
        """The arrays of a checkpoint, and the CRC-32 of those which have one, by number.

        Arrays are where those of `like` are; NumPy arrays where it has those. Keys are integers.
        """
        ocp = self._ocp
        on_host = ocp.RestoreArgs(restore_type=np.ndarray)
        restore_args = {
            str(i): (
                on_host
                if isinstance(x, np.ndarray) or x.sharding is None
                else ocp.ArrayRestoreArgs(sharding=x.sharding, restore_type=jax.Array)
            )
            for i, (entry, x) in enumerate(zip(entries, like, strict=True))
            if size_of(entry) and entry.offset is None
        }
        packs = any(entry.offset is not None for entry in entries)
        directory = self._directory / str(step)
        packed = (directory / self._handler.PACK).read_bytes() if packs else b""
        found = self._restore(directory, restore_args)
        sums: dict[int, int] = {}

        def array(number: int, entry: Entry, x: Leaf) -> Any:
            if entry.offset is None:
                return found[str(number)] if size_of(entry) else empty(x)
            sums[number] = zlib.crc32(bytes_of(packed, entry, x))
            return unpack(packed, entry, x)

        return [array(i, *pair) for i, pair in enumerate(zip(entries, like, strict=True))], sums

    def wait(self) -> None:
        """Waits for the save in the background; raises its error. Removes the oldest ones."""
        self._writer.wait_until_finished()
        if self._writes and self._keep is not None and jax.process_index() == 0:
            for step in self.steps()[: -self._keep]:
                self._remove(self._directory / str(step))

    def close(self) -> None:
        """Waits, and ends the threads."""
        self._writer.close()

    def _restore(self, directory: Path, restore_args: Mapping[str, Any]) -> dict[str, Any]:
        if not restore_args:
            return {}
        args = self._handler.StepRestore(restore_args)
        found: dict[str, Any] = self._writer.restore(directory, args=args)
        return found

    def _remove(self, directory: Path) -> None:
        """Takes its name first, so that what a crash leaves of it does not look complete."""
        doomed = directory.with_name(f"{directory.name}{_UNFINISHED}-removed")
        shutil.rmtree(directory.rename(doomed))

    def _remove_unfinished(self) -> None:
        """What a run that has crashed was writing."""
        if jax.process_index() == 0:
            for path in self._directory.iterdir():
                if _UNFINISHED in path.name:
                    shutil.rmtree(path)
