"""Checkpoints of a training run in a directory."""

import json
import operator
from collections.abc import Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import jax
import optax
from jax.sharding import Mesh

from jaxcomm._contract import AxisName, PyTree
from jaxcomm.checkpoint import _resized
from jaxcomm.checkpoint._checksum import checksums
from jaxcomm.checkpoint._errors import CheckpointError, explained
from jaxcomm.checkpoint._leaves import Leaf, named, on_all_processes, once, restored, stored
from jaxcomm.checkpoint._manifest import (
    Entry,
    Manifest,
    entry_of,
    other_workers,
    require_same_leaves,
)
from jaxcomm.checkpoint._pack import pack
from jaxcomm.checkpoint._store import Store
from jaxcomm.launch._run_directory import report_checkpoint


class Restored(NamedTuple):
    """A restored training run.

    Attributes:
      step: The number of steps that were done.
      state: Arrays, with the structure and the shardings of `start`.
      position: What `save` was given: where in the data to go on.
    """

    step: int
    state: Any
    position: Any


class Checkpoints:
    """Checkpoints of one training run, one directory a step.

    A checkpoint holds any tree of arrays: parameters, optimizer state with what differs by worker,
    typed keys, clocks. It is written in the background, and gets its name when it is complete, so
    a crash leaves the earlier ones as they were. With several processes, all of them call the same
    methods in the same order, and the directory is one that all of them share.

    Example:
      >>> import tempfile, jax.numpy as jnp, optax, jaxcomm
      >>> from jaxcomm.checkpoint import Checkpoints
      >>> tx = optax.chain(jaxcomm.top_k_sgd(ratio=0.5), optax.sgd(0.1))
      >>> params = jnp.ones(2)
      >>> state = {"params": params, "opt_state": jaxcomm.init(tx, params, 4)}
      >>> with tempfile.TemporaryDirectory() as directory, Checkpoints(directory) as checkpoints:
      ...     checkpoints.save(10, state, position={"epoch": 0, "batch": 10})
      ...     step, state, position = checkpoints.restore(state)
      >>> step, position
      (10, {'epoch': 0, 'batch': 10})
    """

    def __init__(self, directory: str | Path, *, keep: int | None = 3) -> None:
        """Opens a directory of checkpoints, and creates it if there is none.

        Args:
          directory: A local path. One program at a time may save there; any number may restore.
            The first save removes an unfinished checkpoint of a run that has crashed.
          keep: How many checkpoints to keep, the newest ones; None keeps all.

        Raises:
          ValueError: If `keep` is not a positive int or None.
          CheckpointError: If the directory cannot be created.
          ImportError: If orbax is not installed.
        """
        if keep is not None and (isinstance(keep, bool) or operator.index(keep) < 1):
            raise ValueError(f"`keep` must be at least 1, or None to keep all, got {keep!r}.")
        self._directory = Path(directory).absolute()
        self._saving: int | None = None
        self._checked = False
        if self._directory.exists() and not self._directory.is_dir():
            raise CheckpointError(f"`directory`={self._directory} is a file. Choose another.")
        with explained(f"`directory`={self._directory} cannot be used", "Choose another."):
            self._store = Store(self._directory, keep, self._complete)

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps of the complete checkpoints, oldest first."""
        return tuple(self._store.steps())

    def save(self, step: int, state: PyTree, position: Any = None) -> None:
        """Saves a checkpoint; returns once the arrays are copied, and writes in the background.

        Args:
          step: The number of steps done, above that of every earlier checkpoint.
          state: A tree of arrays. Its arrays may be donated as soon as this returns.
          position: Where in the data to go on: anything that JSON can hold.

        Raises:
          ValueError: If a leaf is not an array, `step` is not above the earlier ones, or JSON
            cannot hold `position`.
          CheckpointError: If the checkpoints in the directory are of another program, or this one
            or the one before cannot be written.
        """
        leaves = named(state, "state")
        try:
            position = json.loads(json.dumps(position, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ValueError(f"`position` must be a value that JSON can hold: {error}.") from error
        values = on_all_processes([*leaves.values()])
        self.wait()
        newest = max(self.steps, default=-1)
        if isinstance(step, bool) or operator.index(step) <= newest:
            raise ValueError(
                f"`step` must be above {newest}, the newest checkpoint in {self._directory}, got "
                f"{step!r}: restore it and go on from there, or choose another directory."
            )
        entries_now = {path: entry_of(x) for path, x in leaves.items()}
        self._require_own(newest, entries_now, _resized.by_worker(state))
        arrays = [once(stored(x)) for x in values]
        packed, offsets = pack(arrays)
        sums = iter(checksums([x for x, n in zip(arrays, offsets, strict=True) if n is None]))
        of_leaves = [next(sums) if offset is None else 0 for offset in offsets]
        described = zip(leaves.values(), of_leaves, offsets, strict=True)
        entries = dict(zip(leaves, (entry_of(*leaf) for leaf in described), strict=True))
        self._saving = operator.index(step)
        with self._explained_save():
            self._store.save(Manifest(self._saving, position, entries), packed, arrays)

    def restore(
        self,
        start: PyTree,
        step: int | None = None,
        *,
        tx: optax.GradientTransformation | None = None,
        workers: Mesh | int | None = None,
        axis_name: AxisName = "data",
    ) -> Restored:
        """Restores a checkpoint into the shardings of `start`.

        Args:
          start: The state with which the program would start: its structure, dtypes and shardings.
            Leaves may be `jax.ShapeDtypeStruct`.
          step: Which checkpoint. Default: the newest.
          tx: If given, a checkpoint of another number of workers is resized to `workers`; `start`
            is then a dict with `"params"` and `"opt_state"`. See :func:`jaxcomm.resize_workers`.
            A `Clock`, `Deal` and `StaleParams` of :mod:`jaxcomm.synchronization` in it follow too.
          workers: With `tx`: the mesh, or the number of workers, of `start`.
          axis_name: With `tx`: the axis, or axes, of the workers.

        Raises:
          FileNotFoundError: If there is no such checkpoint.
          CheckpointError: If it is damaged; of another model, method or newer release; or of
            another number of workers and `tx` is not given.
        """
        if (tx is None) != (workers is None):
            raise ValueError("To resize, `restore` needs both `tx` and `workers`.")
        leaves = named(start, "start")
        self.wait()
        step = self._step(step)
        where = f"The checkpoint of step {step} in {self._directory}"
        manifest = self._manifest(step)
        wanted = {path: entry_of(x) for path, x in leaves.items()}
        require_same_leaves(manifest.leaves, wanted, where)
        counts = other_workers(manifest.leaves, wanted, where, _resized.by_worker(start))
        if counts and tx is None:
            old, new = counts
            raise CheckpointError(
                f"{where} is of {old} workers, and `start` is for {new}: pass `tx` and `workers` "
                "to resize it, as `jaxcomm.resize_workers` does."
            )
        if counts is None:
            placed = dict(zip(leaves, on_all_processes([*leaves.values()]), strict=True))
            return Restored(step, self._read(manifest, placed, start), manifest.position)
        hosted = {path: jax.ShapeDtypeStruct(x.shape, x.dtype) for path, x in leaves.items()}
        state = self._read(manifest, hosted, start)
        with explained(f"{where} cannot be resized", "Make a new state with `jaxcomm.init`."):
            state = _resized.resized(state, start, tx, workers, axis_name)
        return Restored(step, state, manifest.position)

    def wait(self) -> None:
        """Waits until the last checkpoint is complete.

        Raises:
          CheckpointError: If it cannot be written. The earlier ones are as they were.
        """
        with self._explained_save():
            self._store.wait()

    def close(self) -> None:
        """Waits until the last checkpoint is complete, and ends the threads of the writer."""
        try:
            self.wait()
        finally:
            self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _complete(self) -> None:
        if jax.process_index() == 0:
            report_checkpoint(self._directory / str(self._saving))

    def _explained_save(self) -> Any:
        return explained(
            f"The checkpoint of step {self._saving} could not be written to {self._directory}",
            "Earlier checkpoints are as they were.",
        )

    def _step(self, step: int | None) -> int:
        steps = self.steps
        if step is None and steps:
            return steps[-1]
        if step not in steps:
            what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            found = f"; it has those of steps {[*steps]}" if steps else ""
            raise FileNotFoundError(f"There is {what} in {self._directory}{found}.")
        return operator.index(step)

    def _manifest(self, step: int) -> Manifest:
        where = f"The checkpoint of step {step} in {self._directory}"
        with explained(f"{where} cannot be read", self._others(step)):
            return self._store.manifest(step, where)

    def _others(self, step: int) -> str:
        others = [other for other in self.steps if other != step]
        return f"Others that may be whole: {others}." if others else "There is no other."

    def _require_own(
        self, newest: int, entries: dict[str, Entry], by_worker: Collection[str]
    ) -> None:
        """Raises if the directory has checkpoints of another program, which `keep` would remove."""
        if not self._checked and newest >= 0:
            where = f"The checkpoint of step {newest} in {self._directory}"
            saved = self._manifest(newest).leaves
            require_same_leaves(saved, entries, where)
            other_workers(saved, entries, where, by_worker)
        self._checked = True

    def _read(self, manifest: Manifest, like: Mapping[str, Leaf], start: PyTree) -> PyTree:
        """The state, in the places of `like`; raises if it is not what was saved."""
        where = f"The checkpoint of step {manifest.step} in {self._directory}"
        order = {path: number for number, path in enumerate(manifest.leaves)}
        with explained(f"{where} cannot be read", self._others(manifest.step)):
            arrays, found = self._store.arrays(
                manifest.step,
                [*manifest.leaves.values()],
                [like[path] for path in manifest.leaves],
            )
        others = [number for number in order.values() if number not in found]
        sums = dict(zip(others, checksums([arrays[i] for i in others]), strict=True))
        for path, entry in manifest.leaves.items():
            of_leaf = (found | sums)[order[path]]
            if of_leaf != (entry.checksum if order[path] in sums else entry.crc32):
                raise CheckpointError(
                    f"{where} is damaged: the leaf `{path}` is not what was saved. "
                    f"{self._others(manifest.step)}"
                )
        leaves = [restored(arrays[order[path]], leaf) for path, leaf in like.items()]
        return jax.tree.unflatten(jax.tree.structure(start), leaves)
