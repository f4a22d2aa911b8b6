"""Arrays and a manifest in one directory a step, by orbax."""

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxcomm.checkpoint._leaves import Leaf, empty
from jaxcomm.checkpoint._manifest import Entry, Manifest, from_json, size_of, to_json
from jaxcomm.checkpoint._pack import unpack

_PACK = "pack"


def _orbax() -> Any:
    try:
        return importlib.import_module("orbax.checkpoint")
    except ModuleNotFoundError as error:
        raise ImportError(
            f'`jaxcomm.checkpoint` needs {error.name}: `pip install "jaxcomm[checkpoint]"`.'
        ) from error


class Store:
    """Writes in the background; a directory gets its final name when it is complete."""

    def __init__(self, directory: Path, keep: int | None, complete: Callable[[], None]) -> None:
        """Opens the directory, and creates it if necessary; `complete` is called after a save."""
        self._ocp = _orbax()
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        # Not to remove what another program is writing, before this one writes.
        self._manager = self._open(read_only=True)
        self._writes = False
        self._writer_options = {
            "max_to_keep": keep,
            "cleanup_tmp_directories": True,
            "enable_async_checkpointing": True,
            "async_options": self._ocp.options.AsyncOptions(post_finalization_callback=complete),
        }

    def _open(self, **options: Any) -> Any:
        return self._ocp.CheckpointManager(
            self._directory, options=self._ocp.CheckpointManagerOptions(**options)
        )

    def steps(self) -> list[int]:
        """The complete checkpoints, oldest first."""
        if not self._writes:
            self._manager.reload()
        return sorted(self._manager.all_steps())

    def save(self, manifest: Manifest, packed: np.ndarray, arrays: Sequence[Any]) -> None:
        """Copies the arrays to the host, and writes them in the background.

        Those with an offset in the manifest are in `packed`.
        """
        if not self._writes:
            self._manager.close()
            self._manager = self._open(**self._writer_options)
            self._writes = True
        args = self._ocp.args
        entries = manifest.leaves.values()
        tree = {
            str(i): x
            for i, (entry, x) in enumerate(zip(entries, arrays, strict=True))
            if x.size and entry.offset is None
        }
        if packed.size:
            tree[_PACK] = packed
        self._manager.save(
            manifest.step,
            args=args.Composite(
                state=args.PyTreeSave(tree), manifest=args.JsonSave(to_json(manifest))
            ),
            force=True,
        )

    def manifest(self, step: int, where: str) -> Manifest:
        """The manifest of a checkpoint."""
        args = self._ocp.args
        found = self._manager.restore(step, args=args.Composite(manifest=args.JsonRestore()))
        return from_json(found["manifest"], where)

    def arrays(self, step: int, entries: Sequence[Entry], like: Sequence[Leaf]) -> list[Any]:
        """The arrays of a checkpoint, where those of `like` are; NumPy arrays where it has those.

        Keys are integers.
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
        if any(entry.offset is not None for entry in entries):
            restore_args[_PACK] = on_host
        args = ocp.args.PyTreeRestore(
            item=dict.fromkeys(restore_args, 0), restore_args=restore_args
        )
        found = self._manager.restore(step, args=ocp.args.Composite(state=args))["state"]

        def array(number: int, entry: Entry, x: Leaf) -> Any:
            if entry.offset is not None:
                return unpack(found[_PACK], entry, x)
            return found[str(number)] if size_of(entry) else empty(x)

        return [array(i, *pair) for i, pair in enumerate(zip(entries, like, strict=True))]

    def wait(self) -> None:
        """Waits for the save in the background; raises its error."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, and ends the threads."""
        self._manager.close()
