"""A worker of jaxcomm: one process with one CPU device, a step per method."""

import functools
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxcomm
from experiments.lab import inputs, worker
from experiments.lab.methods import CONTROL, LabMethod, before, find
from experiments.lab.models import LOSSES
from experiments.lab.worker import LEARNING_RATE, MOMENTUM
from experiments.sparse_methods import measure_densities, sparse_method
from experiments.tasks.task import Task
from jaxcomm import launch

OPTIMIZERS = {
    "sgd": lambda learning_rate, momentum: optax.sgd(learning_rate),
    "adam": lambda learning_rate, momentum: optax.adam(learning_rate, b1=momentum),
}
EXAMPLES = 32  # of the model `words`, per worker, as in the study `sparse`
CALIBRATION = 20  # Batches that measure the densities of `words`.


def load_words(workers: int) -> tuple[Callable, inputs.Inputs, Callable]:
    """The model `words` of the study `sparse`: the next word, with an embedding of 5,000 words.

    Returns:
      The loss; what training starts from and reads, in which a batch is windows and next words; and
      the methods, for capacities that follow from densities of batches of another seed.
    """
    task = Task("words")
    data = task.hold_out(EXAMPLES).dataset

    def batch(seed, worker, step):
        rng = np.random.default_rng([seed, worker, step])
        chosen = rng.integers(0, len(data.train_inputs), EXAMPLES)
        return data.train_inputs[chosen], data.train_labels[chosen]

    measured = []
    for step in range(CALIBRATION):
        parts = [batch(1, worker, step) for worker in range(workers)]
        measured.append(jax.tree.map(lambda *rows: np.concatenate(rows), *parts))
    leaves = measure_densities(task, workers, task.first_weights(0), measured)
    capacities = {leaf.leaf: leaf.capacity for leaf in leaves if leaf.is_sparse}

    def find_sparse(label, seed):
        if label == CONTROL:
            return find(label)
        return before(lambda: sparse_method(label, capacities).build(seed))

    read = inputs.Inputs(lambda seed: jax.device_get(task.first_weights(seed)), batch)
    return task.loss, read, find_sparse


class Program(NamedTuple):
    """A compiled step, shared by all learning rates and seeds, which are in its state.

    Attributes:
      method: The method.
      mesh: The workers.
      step: The step.
      build: `(learning_rate, seed, momentum) -> tx`.
      loss: `(params, rows) -> loss`, of one worker.
    """

    method: LabMethod
    mesh: Mesh
    step: Callable
    build: Callable
    loss: Callable

    def place(self, spec: PartitionSpec, tree: Any) -> Any:
        """The arrays of this worker as parts of those of all workers."""
        sharding = NamedSharding(self.mesh, spec)
        return jax.tree.map(
            lambda each: jax.make_array_from_process_local_data(sharding, each), tree
        )


class Replica:
    """The parameters and the state of all workers, of which this one holds its part."""

    def __init__(
        self, program: Program, weights: Any, learning_rate: float, seed: int, momentum: float
    ):
        self.program = program
        if program.method.own_parameters:
            self.params = jaxcomm.replicate(weights, program.mesh)
        else:
            self.params = program.place(PartitionSpec(), weights)
        tx = program.build(learning_rate, seed, momentum)
        self.state = jaxcomm.init(tx, self.params, program.mesh)
        jax.block_until_ready((self.params, self.state))

    def step(self, batch: Any) -> float:
        """One step; returns the mean loss, or that of this worker with its own parameters."""
        self.params, self.state, metrics = jax.block_until_ready(
            self.program.step(self.params, self.state, batch)
        )
        return float(np.mean(metrics["loss"].addressable_data(0)))

    def loss(self, rows: Any) -> float:
        """The loss of rows, with the parameters that all workers have, or with their mean."""
        is_own = self.program.method.own_parameters
        shared = jaxcomm.consensus(self.params) if is_own else self.params
        params = jax.tree.map(lambda x: x.addressable_data(0), shared)
        return float(self.program.loss(params, rows))


class Worker(worker.BaseWorker):
    """A worker that compiles a step per method."""

    def __init__(self, model: str, optimizer: str = "sgd"):
        """Joins the other workers."""
        launch.initialize()
        self.rank, self.workers = jax.process_index(), jax.process_count()
        if model == "words":
            self._loss, self.inputs, self._find = load_words(self.workers)
        else:
            self._loss, self.inputs, self._find = LOSSES[model], inputs.load(model), find
        self._optimizer = OPTIMIZERS[optimizer]
        self._program = functools.cache(self._make)
        self._last = {}

    def _make(self, name: str) -> Program:
        method = self._find(name, 0)
        shape, names = (self.workers,), ("data",)
        if method.clusters:
            shape, names = (2, self.workers // 2), ("cluster", "data")
        mesh = jax.make_mesh(shape, names, (AxisType.Auto,) * len(names))

        def build(learning_rate, seed, momentum):
            rates = {"learning_rate": learning_rate, "momentum": momentum}
            rated = optax.inject_hyperparams(self._optimizer)(**rates)
            return self._find(name, seed).build(self.workers, rated)

        metrics = "own" if method.own_parameters else "mean"
        tx = build(1.0, 0, MOMENTUM)
        step = jaxcomm.make_step(self._loss, tx, mesh, axis_name=names, metrics=metrics)
        return Program(method, mesh, step, build, jax.jit(self._loss))

    def replica(
        self, method: str, learning_rate: float, seed: int, momentum: float = MOMENTUM
    ) -> Replica:
        """The first parameters, placed on the mesh, and the first state; frees the last ones."""
        self._last.clear()
        weights = self.inputs.first_weights(seed)
        return Replica(self._program(method), weights, learning_rate, seed, momentum)

    def measured(self, method: str) -> Replica:
        """Training continues if the last measurement was of the same method, or starts again."""
        if method not in self._last:
            self._last[method] = self.replica(method, LEARNING_RATE, 0)
        return self._last[method]

    def batch(self, replica: Replica, seed: int, number: int) -> Any:
        """The batch on the mesh."""
        rows, mesh = self.inputs.batch(seed, self.rank, number), replica.program.mesh
        return replica.program.place(PartitionSpec(mesh.axis_names), rows)

    def batches(self, replica: Replica, count: int) -> list[Any]:
        """The first batch, in every step."""
        return [self.batch(replica, 0, 0)] * count

    def total(self, value: float) -> float:
        """The sum over workers."""
        return float(np.sum(multihost_utils.process_allgather(np.float32(value))))

    def prepare(self, method: str) -> worker.Answer:
        """Compiles a step; returns the bytes that `jaxcomm.wire.account` counts."""
        replica = self.replica(method, LEARNING_RATE, 0)
        program, batch = replica.program, self.batch(replica, 0, 0)
        account = jaxcomm.wire.account(program.step, replica.params, replica.state, batch)
        replica.step(batch)
        share = program.method.share
        return {"accounted": None if share is None else share * account.bytes_per_worker}

    def profile(self, method: str, steps: int, file: str) -> worker.Answer:
        """Traces steps; the first worker keeps its trace in a file."""
        self.measure(method, 2, 1)
        if self.rank:
            self.measure(method, 0, steps)
            return {}
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder, profiler_options=options):
                self.measure(method, 0, steps)
            (trace,) = Path(folder).rglob("*.trace.json.gz")
            shutil.copy(trace, file)
        return {}
