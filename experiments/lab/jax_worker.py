"""A worker of jaxcomm: one process with one CPU device, a step per method."""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxcomm
from experiments.cli.errors import ExperimentError
from experiments.lab import curves, inputs, traces, words
from experiments.lab.methods import LabMethod, find
from experiments.lab.models import LOSSES
from experiments.lab.serve import bytes_sent
from experiments.methods.sparse import Capacity
from jaxcomm import launch

OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "sgd": optax.sgd,
    "adam": optax.adam,
}


class _Program(NamedTuple):
    """A compiled step, shared by all learning rates and seeds, which are in its state.

    Attributes:
      method: The method.
      mesh: The workers.
      step: The step.
      sharding: The sharding of a batch.
      transformation: `(learning_rate, seed) -> tx`.
    """

    method: LabMethod
    mesh: Mesh
    step: Callable[..., Any]
    sharding: NamedSharding
    transformation: Callable[[float, int], optax.GradientTransformation]


class JaxWorker:
    """Compiles steps, measures them, and trains."""

    def __init__(self, model: str, seed: int, capacities: Mapping[str, Sequence[float]] = {}):
        """Joins the other workers.

        Args:
          model: `mlp`, `transformer` or `words`.
          seed: The seed of weights and batches of `prepare` and `measure`.
          capacities: The fields of the `Capacity` of each sparse leaf; for `words` only.
        """
        launch.initialize()
        self._find: Callable[[str, int], LabMethod] = find
        if model == words.MODEL:
            self._loss, self._inputs = words.load()
            sizes = {path: Capacity(*fields) for path, fields in capacities.items()}
            self._find = lambda label, seed: words.find(label, seed, sizes)
        else:
            self._loss, self._inputs = LOSSES[model], inputs.load(model)
        self._evaluated_loss = jax.jit(self._loss)
        self._seed = seed
        self._programs: dict[tuple[str, str], _Program] = {}
        self._prepared: dict[str, tuple[_Program, float]] = {}
        self._now: tuple[str, Any, Any] = ("", None, None)

    def _program(self, method: str, optimizer: str) -> _Program:
        if optimizer not in OPTIMIZERS:
            raise ExperimentError(
                f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {optimizer!r}."
            )
        if (method, optimizer) not in self._programs:
            self._programs[method, optimizer] = self._make(method, optimizer)
        return self._programs[method, optimizer]

    def _make(self, method: str, optimizer: str) -> _Program:
        found, workers = self._find(method, 0), jax.device_count()
        shape, names = (workers,), ("data",)
        if found.clusters:
            shape, names = (2, workers // 2), ("cluster", "data")
        mesh = jax.make_mesh(shape, names, (AxisType.Auto,) * len(names))

        def transformation(learning_rate: float, seed: int) -> optax.GradientTransformation:
            rated = optax.inject_hyperparams(OPTIMIZERS[optimizer])(learning_rate=learning_rate)
            if found.own_parameters:
                rated = jaxcomm.per_worker(rated)
            return self._find(method, seed).build(workers, rated)

        metrics = "own" if found.own_parameters else "mean"
        tx = transformation(1.0, 0)
        step = jaxcomm.make_step(self._loss, tx, mesh, axis_name=names, metrics=metrics)
        sharding = NamedSharding(mesh, PartitionSpec(names))
        return _Program(found, mesh, step, sharding, transformation)

    def _batch(self, program: _Program, seed: int, number: int) -> Any:
        rows = self._inputs.batch(seed, jax.process_index(), number)
        return jax.tree.map(
            lambda each: jax.make_array_from_process_local_data(program.sharding, each), rows
        )

    def _start(self, program: _Program, learning_rate: float, seed: int) -> tuple[Any, Any]:
        """The first parameters, placed on the mesh, and the first state."""
        mesh, weights = program.mesh, self._inputs.first_weights(seed)
        if program.method.own_parameters:
            params = jaxcomm.replicate(weights, mesh)
        else:
            everywhere = NamedSharding(mesh, PartitionSpec())
            params = jax.tree.map(
                lambda each: jax.make_array_from_process_local_data(everywhere, each), weights
            )
        return params, jaxcomm.init(program.transformation(learning_rate, seed), params, mesh)

    def prepare(self, method: str, learning_rate: float, optimizer: str = "sgd") -> dict[str, Any]:
        """Compiles a step; returns the bytes that `jaxcomm.wire.account` counts."""
        began = time.perf_counter()
        program = self._program(method, optimizer)
        self._prepared[method] = program, learning_rate
        params, state = self._start(program, learning_rate, self._seed)
        batch = self._batch(program, self._seed, 0)
        account = jaxcomm.wire.account(program.step, params, state, batch)
        jax.block_until_ready(program.step(params, state, batch))
        share = program.method.share
        return {
            "accounted": None if share is None else share * account.bytes_per_worker,
            "seconds": time.perf_counter() - began,
        }

    def measure(self, method: str, warm_up: int, steps: int) -> dict[str, Any]:
        """Milliseconds of each of `steps` steps, after `warm_up` untimed ones, and bytes sent.

        Training continues if the last measurement was of the same method. Otherwise it starts
        from the first weights.
        """
        program, learning_rate = self._prepared[method]
        name, params, state = self._now
        if name != method:
            params, state = self._start(program, learning_rate, self._seed)
        self._now = ("", None, None)  # Its arrays are donated.
        batch = self._batch(program, self._seed, 0)
        for _ in range(warm_up):
            params, state, metrics = jax.block_until_ready(program.step(params, state, batch))
        multihost_utils.sync_global_devices("start")
        before, milliseconds, losses = bytes_sent(), [], []
        for _ in range(steps):
            began = time.perf_counter()
            params, state, metrics = jax.block_until_ready(program.step(params, state, batch))
            milliseconds.append(1e3 * (time.perf_counter() - began))
            losses.append(float(np.mean(metrics["loss"].addressable_data(0))))
        self._now = (method, params, state)
        multihost_utils.sync_global_devices("end")
        after = bytes_sent()
        sent = None if before is None or after is None else after - before
        return {"milliseconds": milliseconds, "sent": sent, "losses": losses}

    def profile(self, method: str, steps: int, file: str) -> dict[str, Any]:
        """Traces steps; the first worker keeps its trace in a file.

        Returns:
          Of the first worker, milliseconds per step by operation; of the others, nothing.
        """
        self.measure(method, 2, 1)
        if jax.process_index():
            self.measure(method, 0, steps)
            return {}
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder, profiler_options=options):
                self.measure(method, 0, steps)
            found = traces.keep(Path(folder), Path(file))
        return {"milliseconds": {name: took / 1e3 / steps for name, took in found.items()}}

    def train(
        self,
        method: str,
        learning_rate: float,
        steps: int,
        seed: int,
        evaluate_every: int,
        optimizer: str = "sgd",
        split: str = "held_out",
    ) -> dict[str, Any]:
        """Trains from the first weights of `seed`; see `curves.train`.

        The evaluated loss is that of the rows `split`: `held_out` or `validation`. A step's loss is
        the mean over workers.

        Raises:
          ValueError: If each worker has its own parameters.
        """
        program, rows = self._program(method, optimizer), getattr(self._inputs, split)
        if program.method.own_parameters:
            raise ValueError(f"The workers of {method} have no common parameters to evaluate.")
        self._now = ("", None, None)
        params, state = self._start(program, learning_rate, seed)
        jax.block_until_ready((params, state))

        def step(number: int) -> float:
            nonlocal params, state
            batch = self._batch(program, seed, number)
            params, state, metrics = jax.block_until_ready(program.step(params, state, batch))
            return float(metrics["loss"].addressable_data(0))

        return curves.train(step, lambda: self._evaluate(params, rows), steps, evaluate_every)

    def _evaluate(self, params: Any, rows: Any) -> float:
        """The loss on rows. Each worker computes it on its share of them."""
        own = jax.tree.map(lambda each: each[jax.process_index() :: jax.process_count()], rows)
        local = jax.tree.map(lambda x: x.addressable_data(0), params)
        total = self._evaluated_loss(local, own) * len(jax.tree.leaves(own)[0])
        summed = np.sum(multihost_utils.process_allgather(total))
        return float(summed) / len(jax.tree.leaves(rows)[0])
