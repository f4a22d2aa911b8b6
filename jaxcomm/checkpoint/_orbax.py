"""What orbax writes into the directory of a step: arrays in its own form, our manifest beside them.

orbax is optional, so this module is imported when a directory is opened.
"""

import asyncio
import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxcomm.checkpoint._arrays import Leaf

MANIFEST = "manifest.json"


def _write(directory: Path, manifest: bytes) -> None:
    """Writes the manifest, and all files to the disk, not only to the memory of the system."""
    (directory / MANIFEST).write_bytes(manifest)
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


@dataclasses.dataclass
class _Later:
    """A future that works when its result is asked for, in the thread of orbax that asks."""

    work: Callable[[], None]

    def result(self, timeout: float | None = None) -> None:
        del timeout
        self.work()


class _Handler(ocp.PyTreeCheckpointHandler):
    """Leaves to the background what orbax does with each array before it writes, too.

    With several processes, arrays on devices are copied by orbax, so it begins at once.
    """

    async def async_save(self, directory: Any, args: "Save") -> list[_Later]:
        """What it returns is the writing."""
        tree = ocp.args.PyTreeSave(dict(args.arrays))
        save = functools.partial(super().async_save, directory, args=tree)
        begun = await save() if jax.process_count() > 1 else None

        def finish() -> None:
            for future in asyncio.run(save()) if begun is None else begun:
                future.result()
            if jax.process_index() == 0:
                _write(Path(directory), args.manifest())

        return [_Later(finish)]


@ocp.args.register_with_handler(_Handler, for_save=True, for_restore=True)
@dataclasses.dataclass
class Save(ocp.args.CheckpointArgs):
    """Arrays, which are copies if they are on the host, and what makes the manifest."""

    arrays: Mapping[str, Any]
    manifest: Callable[[], bytes]


def writer(complete: Callable[[], None]) -> Any:
    """Calls `complete` in the background after each save."""
    options = ocp.options.AsyncOptions(
        post_finalization_callback=complete, create_directories_asynchronously=False
    )
    return ocp.AsyncCheckpointer(_Handler(), async_options=options)


def read(directory: Path, like: Mapping[str, Leaf]) -> dict[str, Any]:
    """The arrays, where those of `like` are; NumPy arrays where it has no place for all."""

    def restore_args(x: Leaf) -> Any:
        place = getattr(x, "sharding", None)
        # An array that is committed to a device of this process cannot join those of the others.
        own = jax.process_count() > 1 and isinstance(x, jax.Array) and x.is_fully_addressable
        if place is None or own:
            return ocp.RestoreArgs(restore_type=np.ndarray)
        return ocp.ArrayRestoreArgs(sharding=place, restore_type=jax.Array)

    args = {path: restore_args(x) for path, x in like.items()}
    tree = ocp.args.PyTreeRestore(dict.fromkeys(like, 0), restore_args=args)
    found: dict[str, Any] = ocp.PyTreeCheckpointer().restore(directory, args=tree)
    return found
