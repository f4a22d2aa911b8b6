"""Windows on the wall clock: each worker does as many mini-batches as fit in the time."""

import itertools
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxcomm import _axis
from jaxcomm._contract import AxisName, PerWorker, PyTree
from jaxcomm._gradients import LossFn
from jaxcomm._mesh import require_axes
from jaxcomm.synchronization._clock import Windows, windows
from jaxcomm.synchronization._stragglers import Straggler
from jaxcomm.synchronization._trees import wide
from jaxcomm.synchronization._window_gradients import GradientSums
from jaxcomm.synchronization._windows import all_workers, deadline

RECENT = 5  # The number of mini-batches whose median time predicts whether another one fits.


class WindowResult(NamedTuple):
    """The result of `step` after a window, and the mini-batch counts of this process's workers."""

    params: PyTree
    opt_state: PyTree
    metrics: dict[str, Any]  # of `step`, with `seconds`, `exchange_seconds`, the number of `idle`
    # windows so far, and `starved`, int32[workers of this process]: windows without finished work
    finished: np.ndarray  # int32[workers of this process], the number of mini-batches used


class RealTimeWindow:
    r"""Windows of Non-blocking SGD that end at a deadline on the wall clock.

    .. math:: m_i = \max\{j \le M : c_{ij} \le \tau\}

    Here :math:`c_{ij}` is the time at which worker i finishes its mini-batch j, :math:`\tau` is the
    deadline, and times start at the end of the last exchange. A worker evaluates all mini-batches
    of a window at the same parameters. It stops when the median of its recent mini-batch times
    predicts that the next mini-batch would miss the deadline. It then passes its sums to `step`. No
    gradient is discarded or late. A mini-batch that takes longer than predicted still counts, and
    the other workers wait for it. If no mini-batch of a worker fits into a window, the worker tries
    one from time to time. Unused items of an iterator stay there for the next window, so no example
    is lost or repeated.

    The host decides, and no collective runs before the window ends. The time between two calls
    counts toward the deadline; see :meth:`restart`. `step` determines the bytes that are sent.

    Args:
      loss_fn: `(params, batch) -> loss`, the mean over a mini-batch.
      step: `jaxcomm.make_step(loss_fn, tx, mesh, gradients=precomputed_gradients)`, with any `tx`:
        an aggregator before the optimizer, or gossip after it.
      mesh: The devices, one per worker. Without `straggler`, each process must have exactly one.
      seconds: :math:`\tau`; `float("inf")` waits for all workers, as in synchronous SGD.
      minibatches: M, the largest number of mini-batches per worker and window.
      axis_name: The mesh axis, or axes, of the workers.
      straggler: For one process with several workers: mini-batch times of a simulated clock, which
        replaces the wall clock.
      seed: Seed of these times.

    A call returns a named tuple: `params`, `opt_state` and `metrics` of `step`, and `finished`,
    int32[workers of this process], the mini-batches used. The metrics also have `seconds`,
    `exchange_seconds`, the number of `idle` windows so far, and `starved`, int32[workers of this
    process], the windows without finished work.

    Raises:
      ValueError: If a number is out of range, the mesh has other axes, a process has several
        devices without a `straggler`, or the straggler's times would let a worker never finish. At
        the first call, before any step, if no worker can finish a mini-batch in `seconds`.

    Example:
      >>> import itertools, jax, jax.numpy as jnp, optax, jaxcomm
      >>> from jax.sharding import AxisType
      >>> from jaxcomm.synchronization import RealTimeWindow, deterministic, precomputed_gradients
      >>> mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
      >>> loss, tx = lambda w, x: 0.5 * (w - x) ** 2, optax.chain(jaxcomm.mean(), optax.sgd(1.0))
      >>> window = RealTimeWindow(
      ...     loss,
      ...     jaxcomm.make_step(loss, tx, mesh, gradients=precomputed_gradients),
      ...     mesh,
      ...     seconds=4.0,
      ...     minibatches=4,
      ...     straggler=deterministic([1.0, 3.0]),
      ... )
      >>> params = jnp.float32(0)
      >>> queues = [itertools.repeat(jnp.float32(1)), itertools.repeat(jnp.float32(6))]
      >>> closed = window(params, jaxcomm.init(tx, params, mesh), queues)
      >>> print(closed.params, closed.finished)  # (4 x 1 + 1 x 6) / 5
      2.0 [4 1]

    References:
      He, Dube, `Accelerating Parallel Stochastic Gradient Descent via Non-blocking Mini-batches
      <https://arxiv.org/abs/2211.00889>`_, 2022. The full paper was not available. Two parts are
      ours: a deadline replaces the first worker's signal, and a worker does not start a mini-batch
      that is predicted to miss it.
    """

    def __init__(
        self,
        loss_fn: LossFn,
        step: Callable[..., tuple[PyTree, PyTree, dict[str, Any]]],
        mesh: Mesh,
        *,
        seconds: float,
        minibatches: int,
        axis_name: AxisName = "data",
        straggler: Straggler | None = None,
        seed: int = 0,
    ):
        """See the class."""
        require_axes(mesh, axis_name)
        names = _axis.names(axis_name)
        if set(names) != set(mesh.axis_names):
            raise ValueError(f"`axis_name`={axis_name!r} must name all axes, {mesh.axis_names}.")
        me = jax.process_index()
        self._devices = [d for d in mesh.devices.flat if d.process_index == me]
        self._numbers = [i for i, d in enumerate(mesh.devices.flat) if d.process_index == me]
        if straggler is None and len(self._devices) != 1:
            raise ValueError("Start one process per device, or pass a simulated `straggler`.")
        self._seconds, self._minibatches = seconds, minibatches
        self._step, self._sharding = step, NamedSharding(mesh, PartitionSpec(names))
        self._workers = mesh.size
        self._simulated: Windows | None = None
        if straggler:
            trigger = deadline(seconds) if seconds < math.inf else all_workers()
            start, close = windows(
                straggler,
                trigger,
                workers=mesh.size,
                minibatches=minibatches,
                in_flight="abort",
                seed=seed,
            )
            self._simulated = Windows(start, jax.jit(close))
        self._min_over_workers = jax.jit(
            jnp.min, out_shardings=NamedSharding(mesh, PartitionSpec())
        )
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._compiled = False
        self._began = 0.0
        self._idle, self._starved = 0, np.zeros(len(self._devices), np.int32)

        def add(params: PyTree, total: GradientSums, batch: PyTree) -> GradientSums:
            loss, gradients = jax.value_and_grad(loss_fn)(params, batch)
            more = GradientSums(wide(gradients), jnp.int32(1), loss.astype(jnp.float32))
            return jax.tree.map(jnp.add, total, more)

        self._add = jax.jit(add)
        self._zero = jax.jit(
            lambda params: GradientSums(
                jax.tree.map(jnp.zeros_like, wide(params)), jnp.int32(0), jnp.float32(0)
            )
        )

    def __call__(
        self, params: PyTree, opt_state: PyTree, queues: Sequence[Iterator[PyTree]]
    ) -> WindowResult:
        """Runs one window and its step.

        Args:
          params: The parameters, as for `step`.
          opt_state: The optimizer state, as for `step`.
          queues: For each worker of this process, an infinite iterator of its mini-batches.
        """
        local_params = [self._local(params, device) for device in self._devices]
        if self._simulated is not None:
            window, clock = self._simulated.close(self._simulated.start)
            self._simulated = self._simulated._replace(start=clock)
            counts = np.asarray(window.finished)[self._numbers]
            sums = [self._sum(*each) for each in zip(local_params, queues, counts, strict=True)]
            seconds = float(window.seconds)
        else:
            sums = [self._sum_until_deadline(*local_params, *queues)]
            seconds = time.perf_counter() - self._began
        finished = np.asarray([int(each.finished) for each in sums], np.int32)
        arrived = time.perf_counter()
        params, opt_state, metrics = self._step(params, opt_state, self._stack(sums))
        jax.block_until_ready((params, opt_state, metrics))
        self._began = time.perf_counter()
        self._idle += int(metrics["weight"]) == 0
        self._starved = self._starved + (finished == 0)
        report = {
            **metrics,
            "seconds": seconds,
            "exchange_seconds": self._began - arrived,
            "idle": self._idle,
            "starved": self._starved,
        }
        return WindowResult(params, opt_state, report, finished)

    def restart(self) -> None:
        """Starts the next window now instead of at the end of the last exchange.

        Call it on all workers after other work between two windows, for example an evaluation.
        """
        self._began = time.perf_counter()

    @property
    def minibatch_seconds(self) -> float:
        """Median of recent mini-batch times of this process on the wall clock, or 0 at first."""
        return statistics.median(self._recent) if self._recent else 0.0

    def _local(self, params: PyTree, device: jax.Device) -> PyTree:
        """The parameters of a worker on its own device."""

        def local(x: Any) -> jax.Array:
            if isinstance(x, jax.Array) and len(x.sharding.device_set) == self._workers:
                return next(s.data for s in x.addressable_shards if s.device == device)
            return jax.device_put(x, device)

        if not isinstance(params, PerWorker):
            return jax.tree.map(local, params)
        (leaves,) = params.per_worker.values()
        return jax.tree.map(lambda x: local(x)[0], leaves)

    def _sum(self, params: PyTree, queue: Iterator[PyTree], count: int) -> GradientSums:
        """The sums over `count` mini-batches."""
        total = self._zero(params)
        for batch in itertools.islice(queue, int(count)):
            total = self._add(params, total, batch)
        return total

    def _sum_until_deadline(self, params: PyTree, queue: Iterator[PyTree]) -> GradientSums:
        """The sums over as many mini-batches as fit."""
        count, total = 0, self._zero(params)
        if not self._compiled:
            count, total = 1, self._first(params, total, next(queue))
        while count < self._minibatches:
            began = time.perf_counter()
            if began - self._began + self.minibatch_seconds > self._seconds:
                break
            total = jax.block_until_ready(self._add(params, total, next(queue)))
            self._recent.append(time.perf_counter() - began)
            count += 1
        if not count and self._recent:
            # So that a worker whose mini-batches do not fit tries again.
            self._recent.popleft()
        return total

    def _first(self, params: PyTree, zeros: GradientSums, batch: PyTree) -> GradientSums:
        """Runs the first mini-batch twice: once to compile, and once to measure its time."""
        jax.block_until_ready(self._add(params, zeros, batch))
        began = time.perf_counter()
        total = jax.block_until_ready(self._add(params, zeros, batch))
        took = time.perf_counter() - began
        fastest = float(self._min_over_workers(self._stack([jnp.float32(took)])))
        if fastest > self._seconds:
            raise ValueError(f"No mini-batch ends within a deadline of {self._seconds:g} seconds.")
        self._recent.append(took)
        self._compiled, self._began = True, time.perf_counter()
        return total

    def _stack(self, each: Sequence[PyTree]) -> PyTree:
        """Stacks one tree per worker of this process into global arrays [workers, ...]."""

        def stack(*leaves: jax.Array) -> jax.Array:
            placed = [
                jax.device_put(x[None], d) for x, d in zip(leaves, self._devices, strict=True)
            ]
            shape = (self._workers, *leaves[0].shape)
            return jax.make_array_from_single_device_arrays(shape, self._sharding, placed)

        return jax.tree.map(stack, *each)
