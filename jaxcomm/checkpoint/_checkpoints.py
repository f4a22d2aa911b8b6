"""Checkpoints of a training run in a directory."""

import importlib
import json
import operator
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import optax
from jax.sharding import Mesh

from jaxcomm._contract import AxisName, PyTree
from jaxcomm._require import Positive, checked
from jaxcomm.checkpoint import _arrays, _resized
from jaxcomm.checkpoint._arrays import CheckpointError, Manifest, entry_of, explained, verified
from jaxcomm.launch._environment import report_checkpoint

_UNFINISHED = ".orbax-checkpoint-tmp"


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

    @checked
    def __init__(self, directory: str | Path, *, keep: Positive | None = 3) -> None:
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
        self._orbax = importlib.import_module("jaxcomm.checkpoint._orbax")
        self._directory, self._keep = Path(directory).absolute(), keep
        self._saving: int | None = None
        with explained(f"`directory`={self._directory} cannot be used", "Choose another."):
            self._directory.mkdir(parents=True, exist_ok=True)
        self._writer = self._orbax.writer(
            lambda: report_checkpoint(self._directory / str(self._saving))
        )

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps of the complete checkpoints, oldest first."""
        names = [path.name for path in self._directory.iterdir() if path.is_dir()]
        return tuple(sorted(int(name) for name in names if name.isdecimal()))

    def save(self, step: int, state: PyTree, position: Any = None) -> None:
        """Saves a checkpoint; returns once the arrays are copied, and writes in the background.

        Args:
          step: The number of steps done, above that of every earlier checkpoint.
          state: A tree of arrays. Its arrays may be donated as soon as this returns.
          position: Where in the data to go on: anything that JSON can hold.

        Raises:
          ValueError: If a leaf is not an array, or `step` is not above the earlier ones.
          TypeError: If JSON cannot hold `position`.
          CheckpointError: If the checkpoints in the directory are of another program, or this one
            or the one before cannot be written.
        """
        leaves = _arrays.named(state, "state")
        json.dumps(position, allow_nan=False)
        entries = {path: entry_of(x) for path, x in leaves.items()}
        self.wait()
        newest = max(self.steps, default=-1)
        if operator.index(step) <= newest:
            raise ValueError(
                f"`step` must be above {newest}, the newest checkpoint in {self._directory}, got "
                f"{step!r}: restore it, or choose another directory."
            )
        if self._saving is None:
            if newest >= 0:  # `keep` must not remove checkpoints of another program.
                saved = self._manifest(newest).leaves
                _resized.other_workers(saved, entries, state, self._where(newest))
            if jax.process_index() == 0:
                for path in self._directory.iterdir():
                    if _UNFINISHED in path.name:
                        shutil.rmtree(path)
        self._saving = operator.index(step)
        arrays = {path: _arrays.stored(x) for path, x in leaves.items()}
        sums = _arrays.checksums(arrays)

        def manifest() -> bytes:
            leaves = {path: entries[path]._replace(checksum=x) for path, x in sums().items()}
            return Manifest(position, leaves).signed()

        with self._explained_save():
            copies = _arrays.copies({path: x for path, x in arrays.items() if x.size})
            args = self._orbax.Save(copies, manifest)
            self._writer.save(self._directory / str(step), args=args)

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
            The clock of :func:`jaxcomm.synchronization.windows`, a deal of
            :func:`jaxcomm.synchronization.new_deal` and a `StaleParams` in it follow too.
          workers: With `tx`: the mesh, or the number of workers, of `start`.
          axis_name: With `tx`: the axis, or axes, of the workers.

        Returns:
          A named tuple: `step`, how many steps were done; `state`, arrays with the structure and
          the shardings of `start`; and `position`, what `save` was given.

        Raises:
          FileNotFoundError: If there is no such checkpoint.
          CheckpointError: If it is damaged; of another model, method or newer release; or of
            another number of workers and `tx` is not given.
        """
        leaves = _arrays.named(start, "start")
        self.wait()
        step = self._step(step)
        where = self._where(step)
        manifest = self._manifest(step)
        wanted = {path: entry_of(x) for path, x in leaves.items()}
        counts = _resized.other_workers(manifest.leaves, wanted, start, where)
        if counts and tx is None:
            old, new = counts
            raise CheckpointError(
                f"{where} is of {old} workers, and `start` is for {new}: pass `tx` and `workers` "
                "to resize it, as `jaxcomm.resize_workers` does."
            )
        if counts is None:
            return Restored(step, self._read(step, manifest, leaves, start), manifest.position)
        # In the memory of each process, since the old mesh does not exist.
        hosted = {
            path: jax.ShapeDtypeStruct(manifest.leaves[path].shape, x.dtype)
            for path, x in leaves.items()
        }
        state = self._read(step, manifest, hosted, start)
        with explained(f"{where} cannot be resized", "Make a new state with `jaxcomm.init`."):
            state = _resized.resized(state, start, tx, workers, axis_name)
        return Restored(step, state, manifest.position)

    def wait(self) -> None:
        """Waits until the last checkpoint is complete.

        Raises:
          CheckpointError: If it cannot be written. The earlier ones are as they were.
        """
        with self._explained_save():
            self._writer.wait_until_finished()
            if self._saving is not None and self._keep is not None and jax.process_index() == 0:
                for step in self.steps[: -self._keep]:
                    # Its name goes first, so what a crash leaves of it does not look complete.
                    doomed = self._directory / f"{step}{_UNFINISHED}-removed"
                    shutil.rmtree((self._directory / str(step)).rename(doomed))

    def close(self) -> None:
        """Waits until the last checkpoint is complete, and ends the threads of the writer."""
        try:
            self.wait()
        finally:
            self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _explained_save(self) -> Any:
        return explained(
            f"The checkpoint of step {self._saving} could not be written to {self._directory}",
            "Earlier checkpoints are as they were.",
        )

    def _step(self, step: int | None) -> int:
        found = max(self.steps, default=None) if step is None else operator.index(step)
        if found not in self.steps:
            raise FileNotFoundError(
                f"There is no checkpoint of step {found} in {self._directory}, but of {self.steps}."
            )
        return found

    def _where(self, step: int) -> str:
        return f"The checkpoint of step {step} in {self._directory}"

    def _others(self, step: int) -> str:
        others = [other for other in self.steps if other != step]
        return f"Others that may be whole: {others}." if others else "There is no other."

    def _manifest(self, step: int) -> Manifest:
        with explained(f"{self._where(step)} cannot be read", self._others(step)):
            written = (self._directory / str(step) / self._orbax.MANIFEST).read_bytes()
            return verified(written)

    def _read(
        self, step: int, manifest: Manifest, like: Mapping[str, _arrays.Leaf], start: PyTree
    ) -> PyTree:
        """The state, in the places of `like`; raises if it is not what was saved."""
        where = self._where(step)
        with explained(f"{where} cannot be read", self._others(step)):
            full = {path: x for path, x in like.items() if x.size}
            arrays = self._orbax.read(self._directory / str(step), full)
            arrays |= {path: _arrays.empty(x) for path, x in like.items() if not x.size}
            sums = _arrays.checksums(arrays)()
            leaves = {path: _arrays.restored(arrays[path], x) for path, x in like.items()}
        for path, leaf in leaves.items():
            if entry_of(leaf, sums[path]) != manifest.leaves[path]:
                raise CheckpointError(
                    f"{where} is damaged: the leaf `{path}` is not what was saved. "
                    f"{self._others(step)}"
                )
        return jax.tree.unflatten(jax.tree.structure(start), leaves.values())
