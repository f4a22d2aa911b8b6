"""A worker of jaxcomm: one process with one CPU device, a step per method."""

import time
from typing import Any

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxcomm
from experiments.lab import inputs
from experiments.lab.methods import find
from experiments.lab.models import LOSSES
from experiments.lab.serve import bytes_sent
from jaxcomm import launch


class JaxWorker:
    """Compiles steps, and measures them."""

    def __init__(self, model: str, seed: int):
        """Joins the other workers."""
        launch.initialize()
        self._loss, self._inputs = LOSSES[model], inputs.load(model)
        self._weights = self._inputs.first_weights(seed)
        self._seed = seed
        self._programs: dict[str, tuple[Any, ...]] = {}
        self._now: tuple[str, Any, Any] = ("", None, None)

    def _make(self, method: str, learning_rate: float) -> tuple[Any, Any, Any, Any, Any]:
        found, workers = find(method), jax.device_count()
        shape, names = (workers,), ("data",)
        if found.clusters:
            shape, names = (2, workers // 2), ("cluster", "data")
        mesh = jax.make_mesh(shape, names, (AxisType.Auto,) * len(names))
        tx = found.build(workers, optax.sgd(learning_rate))
        metrics = "own" if found.own_parameters else "mean"
        step = jaxcomm.make_step(self._loss, tx, mesh, axis_name=names, metrics=metrics)
        return found, mesh, tx, step, NamedSharding(mesh, PartitionSpec(names))

    def _batch(self, sharding: NamedSharding, number: int) -> Any:
        rows = self._inputs.batch(self._seed, jax.process_index(), number)
        return jax.tree.map(
            lambda each: jax.make_array_from_process_local_data(sharding, each), rows
        )

    def _start(self, method: str) -> tuple[Any, Any]:
        found, mesh, tx, _, _ = self._programs[method]
        params = (
            jaxcomm.replicate(self._weights, mesh)
            if found.own_parameters
            else jax.tree.map(jax.numpy.asarray, self._weights)
        )
        return params, jaxcomm.init(tx, params, mesh)

    def prepare(self, method: str, learning_rate: float) -> dict[str, Any]:
        """Compiles a step; returns the bytes that `jaxcomm.wire.account` counts."""
        began = time.perf_counter()
        self._programs[method] = self._make(method, learning_rate)
        _, _, _, step, sharding = self._programs[method]
        params, state = self._start(method)
        batch = self._batch(sharding, 0)
        account = jaxcomm.wire.account(step, params, state, batch)
        jax.block_until_ready(step(params, state, batch))
        share = find(method).share
        return {
            "accounted": None if share is None else share * account.bytes_per_worker,
            "seconds": time.perf_counter() - began,
        }

    def measure(self, method: str, warm_up: int, steps: int) -> dict[str, Any]:
        """Milliseconds of each of `steps` steps, after `warm_up` untimed ones, and bytes sent.

        Training continues if the last measurement was of the same method. Otherwise it starts
        from the first weights.
        """
        _, _, _, step, sharding = self._programs[method]
        name, params, state = self._now
        if name != method:
            params, state = self._start(method)
        self._now = ("", None, None)  # Its arrays are donated.
        batch = self._batch(sharding, 0)
        for _ in range(warm_up):
            params, state, metrics = jax.block_until_ready(step(params, state, batch))
        multihost_utils.sync_global_devices("start")
        before, milliseconds, losses = bytes_sent(), [], []
        for _ in range(steps):
            began = time.perf_counter()
            params, state, metrics = jax.block_until_ready(step(params, state, batch))
            milliseconds.append(1e3 * (time.perf_counter() - began))
            losses.append(float(np.mean(metrics["loss"].addressable_data(0))))
        self._now = (method, params, state)
        multihost_utils.sync_global_devices("end")
        after = bytes_sent()
        sent = None if before is None or after is None else after - before
        return {"milliseconds": milliseconds, "sent": sent, "losses": losses}
