"""A worker of Streaming DiLoCo: one process with two CPU devices, one of them for exchanges."""

import time
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxcomm
from experiments.lab import inputs
from experiments.lab.models import LOSSES
from experiments.lab.serve import bytes_sent
from jaxcomm import launch
from jaxcomm.synchronization import streaming_diloco
from jaxcomm.training import make_overlapped_step, second_mesh

CONTROL, ONE_PROGRAM, OVERLAPPED = FORMS = ("no_communication", "one_program", "overlapped")


class OverlapWorker:
    """Times the steps of three forms: without exchanges, in one program, and beside the steps."""

    def __init__(self, model: str, period: int, fragments: int, overlap: int, seed: int = 0):
        """Joins the other workers and compiles nothing yet."""
        jax.config.update("jax_num_cpu_devices", 2)
        launch.initialize()
        count = jax.process_count()
        first = [jax.local_devices(process_index=process)[0] for process in range(count)]
        mesh = jax.make_mesh((count,), ("data",), (AxisType.Auto,), devices=first)
        inner = optax.sgd(0.05)
        outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
        options = {"fragments": fragments, "overlap": overlap, "mixing_factor": 0.5}
        tx = streaming_diloco(inner, outer, period, **options)
        loss = LOSSES[model]
        steps: dict[str, tuple[Any, Callable[..., Any]]] = {}
        for form, given in ((CONTROL, jaxcomm.per_worker(inner)), (ONE_PROGRAM, tx)):
            steps[form] = given, jaxcomm.make_step(loss, given, mesh, metrics="own")
        steps[OVERLAPPED] = tx, make_overlapped_step(loss, tx, mesh, second_mesh(mesh))
        own = inputs.load(model)
        rows = NamedSharding(mesh, PartitionSpec("data"))
        self._batch = jax.tree.map(
            lambda each: jax.make_array_from_process_local_data(rows, each),
            own.batch(seed, jax.process_index(), 0),
        )
        self._period, self._steps, self._carry = period, steps, {}
        for form, (given, _) in steps.items():
            params = jaxcomm.replicate(own.first_weights(seed), mesh)
            self._carry[form] = params, jaxcomm.init(given, params, mesh)

    def prepare(self, form: str) -> dict[str, Any]:
        """Takes the steps before two periods are over, which compile every program of the form.

        The next step begins an exchange, and with an overlap below H / P nothing is under way.
        """
        return self.measure(form, 2 * self._period - 1)

    def measure(self, form: str, steps: int) -> dict[str, Any]:
        """Milliseconds of each step, and the bytes that this worker sent.

        A step ends when its parameters are ready, which an exchange under way does not delay.
        """
        _, step = self._steps[form]
        params, state = jax.block_until_ready(self._carry.pop(form))
        multihost_utils.sync_global_devices("start")
        before, milliseconds = bytes_sent(), []
        for _ in range(steps):
            began = time.perf_counter()
            params, state, _ = step(params, state, self._batch)
            jax.block_until_ready(params)
            milliseconds.append(1e3 * (time.perf_counter() - began))
        self._carry[form] = jax.block_until_ready((params, state))
        multihost_utils.sync_global_devices("end")
        after = bytes_sent()
        sent = None if before is None or after is None else after - before
        return {"milliseconds": milliseconds, "sent": sent}
