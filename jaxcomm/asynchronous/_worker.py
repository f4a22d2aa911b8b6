"""A worker: its memory, and the program that it runs for each gradient."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxcomm._contract import PyTree
from jaxcomm.aggregation import mean
from jaxcomm.asynchronous._messages import Job, Order, Report, hosted
from jaxcomm.synchronization._trees import scaled, squared_norm
from jaxcomm.synchronization.events import Task
from jaxcomm.synchronization.events._engine import key_of
from jaxcomm.synchronization.events._messages import bytes_of
from jaxcomm.training._make_step import make_step

News = Callable[[int], tuple[int, PyTree] | None]

# Keeps the parameters, and has the last gradient as its state.
_keeping = optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params),
    lambda gradient, state, params=None: (jax.tree.map(jnp.zeros_like, gradient), gradient),
)


def _mesh_of(job: Job) -> Mesh:
    devices = jax.local_devices()[: job.devices]
    if job.batch_size % len(devices):
        raise ValueError(
            f"`batch_size`={job.batch_size} must be a multiple of the {len(devices)} devices of a "
            "worker, of which `devices` uses fewer."
        )
    auto = (AxisType.Auto,) * 2  # Types of axes would not fit arrays of no mesh.
    return jax.make_mesh((1, len(devices)), ("data", "island"), auto, devices=devices)


def everywhere(job: Job) -> NamedSharding:
    """Where the memory of a worker is: on all devices of this process.

    All programs return it there. A place of its own would compile the next program again.
    """
    return NamedSharding(_mesh_of(job), PartitionSpec())


def gradients(job: Job) -> Callable[..., tuple[jax.Array, PyTree]]:
    """`(params, batch, key) -> (loss, gradient)`, the mean over the devices of this process."""
    tx = optax.chain(mean(), _keeping)
    step = make_step(job.loss_fn, tx, _mesh_of(job), donate=False)

    def gradient(params: PyTree, batch: PyTree, key: jax.Array) -> tuple[jax.Array, PyTree]:
        given = {"key": key} if job.has_key else {}
        _, (_, found), metrics = step(params, tx.init(params), batch, **given)
        loss: jax.Array = metrics["loss"]
        if job.clip is not None:
            norm = jnp.sqrt(squared_norm(found))
            found = scaled(found, jnp.minimum(1, job.clip / jnp.maximum(norm, 1e-30)))
        return jnp.where(is_finite(found), loss, jnp.nan), found

    return gradient


def is_finite(tree: PyTree) -> jax.Array:
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in floats] or [jnp.bool_(True)]))


class Programs:
    """The compiled programs of a worker, which all workers of a process share."""

    def __init__(self, job: Job) -> None:
        policy, gradient, place = job.policy, gradients(job), everywhere(job)

        def step(
            own: PyTree, view: PyTree, worker: jax.Array, number: jax.Array, batch: PyTree
        ) -> Any:
            task = Task(worker, number, key_of(job.seed, worker, number))
            work = lambda params, task: gradient(params, batch, task.key)  # noqa: E731
            loss, message, own = policy.steps(work)(own, view, task)
            return loss, message, own, is_finite((loss, message))

        self.batches, self.pruned = job.batches, policy.pruned
        self.step = jax.jit(step, out_shardings=(None, None, place, None))
        self.join = jax.jit(lambda params: policy.join(params, job.workers), out_shardings=place)
        self.receive = jax.jit(policy.receive, out_shardings=place)


class Worker:
    """One worker, in whichever process it is."""

    def __init__(self, programs: Any, index: int) -> None:
        self._programs, self._index = programs, np.int32(index)
        self._own: PyTree = None
        self._view: PyTree = None

    def run(self, order: Order, news: News) -> Report:
        """Computes the gradients of an order, of which the last ends with a message.

        What is not finite is not sent. The worker then goes back to its memory of before.
        """
        started = time.monotonic()
        if order.params is not None:
            self._own = self._programs.join(order.params)
        elif order.reply is not None:
            self._own = self._programs.receive(self._own, order.reply)
        if order.view is not None:
            self._view = order.view
        before, losses, heard = self._own, [], []
        for number, examples in enumerate(order.examples, order.number):
            if (new := news(number)) is not None:
                version, self._view = new
                heard.append((number, version))
            batch = self._programs.batches(examples, int(self._index))
            loss, message, self._own, finite = self._programs.step(
                self._own, self._view, self._index, np.int32(number), batch
            )
            losses.append(loss)
        mean_loss = float(np.mean(jax.device_get(losses)))
        if not (finite and np.isfinite(mean_loss)):
            self._own, message = before, None
        seconds = time.monotonic() - started
        if message is not None:
            message = self._programs.pruned(hosted(message))
        return Report(message, mean_loss, seconds, tuple(heard), bytes_of(message))
