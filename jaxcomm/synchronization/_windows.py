"""Windows: triggers that end them, the mini-batches finished by then, and the remaining queue."""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm._contract import PyTree
from jaxcomm._require import AboveZero, Positive, checked
from jaxcomm.synchronization._trees import chosen

InFlight = Literal["abort", "finish_late"]


class Trigger(NamedTuple):
    """The rule that ends a window; its input `float32[workers, M]` is each mini-batch's end time.

    Attributes:
      seconds: A function from these times to the seconds after which the window ends, float32[].
      max_seconds: An upper bound on the seconds of a window, if one exists.
      waits_for_all: Whether it waits for all workers, so that no mini-batch is half finished.
    """

    seconds: Callable[[jax.Array], jax.Array]
    max_seconds: float = math.inf
    waits_for_all: bool = False

    def __call__(self, done: jax.Array) -> jax.Array:
        """The seconds after which the window ends, float32[]."""
        return self.seconds(done)


def all_workers() -> Trigger:
    """The window ends when all workers have finished all their mini-batches, as in synchronous SGD.

    Returns:
      A trigger, for :func:`windows`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm.synchronization import all_workers
      >>> print(all_workers()(jnp.array([[1.0, 2.0], [3.0, 6.0]])))
      6.0
    """
    return Trigger(lambda done: jnp.max(done), waits_for_all=True)


def fastest_worker() -> Trigger:
    """The window ends when the first worker has finished all its mini-batches.

    Returns:
      A trigger, for :func:`windows`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm.synchronization import fastest_worker
      >>> print(fastest_worker()(jnp.array([[1.0, 2.0], [3.0, 6.0]])))
      2.0
    """
    return Trigger(lambda done: jnp.min(done[:, -1]))


@checked
def k_sync(workers: Positive) -> Trigger:
    """The window ends when k workers have finished all their mini-batches.

    Args:
      workers: k, an int of at least 1 and at most the number of workers.

    Returns:
      A trigger, for :func:`windows`.

    Raises:
      ValueError: If `workers` is not a positive int; when used, if there are fewer than k workers.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm.synchronization import k_sync
      >>> print(k_sync(2)(jnp.array([[1.0, 2.0], [3.0, 6.0], [2.0, 4.0]])))
      4.0
    """

    def ends(done: jax.Array) -> jax.Array:
        if workers > len(done):
            raise ValueError(f"`k_sync` waits for {workers} workers, but there are {len(done)}.")
        return jnp.sort(done[:, -1])[workers - 1]

    return Trigger(ends)


@checked
def deadline(seconds: AboveZero) -> Trigger:
    """The window ends after a fixed time, or when all workers have finished, if that is earlier.

    Args:
      seconds: A positive number.

    Returns:
      A trigger, for :func:`windows`.

    Raises:
      ValueError: If `seconds` is not positive and finite; in :func:`windows`, if no worker can
        finish a mini-batch within it.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm.synchronization import deadline
      >>> print(deadline(5.0)(jnp.array([[1.0, 2.0], [3.0, 6.0]])))
      5.0
    """
    return Trigger(lambda done: jnp.minimum(jnp.float32(seconds), jnp.max(done)), seconds)


@checked
def k_batch_sync(minibatches: Positive) -> Trigger:
    """The window ends when workers together have finished k mini-batches, or all of them.

    Args:
      minibatches: k, an int of at least 1.

    Returns:
      A trigger, for :func:`windows`.

    Raises:
      ValueError: If `minibatches` is not a positive int.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm.synchronization import k_batch_sync
      >>> print(k_batch_sync(3)(jnp.array([[1.0, 2.0], [3.0, 6.0]])))
      3.0
    """
    return Trigger(lambda done: jnp.sort(done.ravel())[min(minibatches, done.size) - 1])


class Queue(NamedTuple):
    """The position of each worker in its sequence of mini-batches."""

    position: jax.Array  # int32[workers], the number of its own mini-batches that each has finished
    remaining_seconds: (
        jax.Array
    )  # float32[workers], remaining seconds of the one in flight; 0 if there is none


def new_queue(workers: int) -> Queue:
    """The queue before the first window.

    Args:
      workers: The number of workers.

    Returns:
      A queue in which no worker has started a mini-batch.

    Example:
      >>> from jaxcomm.synchronization._windows import new_queue
      >>> print(new_queue(2).position)
      [0 0]
    """
    return Queue(jnp.zeros(workers, jnp.int32), jnp.zeros(workers, jnp.float32))


class Window(NamedTuple):
    """The result of a window."""

    seconds: jax.Array  # float32[], its length
    first: jax.Array  # int32[workers], the number of the first mini-batch of each worker
    finished: jax.Array  # the number of finished mini-batches from that one on: int32[workers], or
    # uint32 if the first may be late and its gradient needs `stale_params`
    stale: jax.Array  # bool[workers], whether the first one began in an earlier window


def require_stale_params(finished: jax.Array | int, stale_params: PyTree) -> None:
    """Raises if a first mini-batch may be late and the parameters at its start are missing."""
    is_unsigned = jnp.issubdtype(jnp.asarray(finished).dtype, jnp.unsignedinteger)
    if stale_params is None and is_unsigned:
        raise ValueError("Late mini-batches need `stale_params` as the third part of the batch.")


def close_window(
    queue: Queue, times: jax.Array, trigger: Trigger, *, in_flight: InFlight = "finish_late"
) -> tuple[Window, Queue]:
    r"""Closes one window of Non-blocking SGD on a clock.

    .. math:: c_{ij} = \sum_{l \le j} t_{il}, \qquad \tau = \mathrm{trigger}(c), \qquad
              m_i = |\{j : c_{ij} \le \tau\}|

    Here :math:`t_{il}` is the time of mini-batch l of worker i, and :math:`m_i` is the number that
    the worker finishes. A worker's unfinished mini-batches stay in its queue in order. Therefore,
    an epoch neither loses nor repeats a mini-batch. Times that differ only by rounding count as
    equal: a deadline of 0.7 seconds allows seven mini-batches of 0.1 seconds. Nothing is sent.

    Args:
      queue: The result of :func:`new_queue`, or the queue after the previous window.
      times: :math:`t_{ij}`, float32[workers, M], seconds of the mini-batches of the window. For a
        half-finished mini-batch from the previous window, its remaining seconds count instead.
      trigger: The rule that ends the window.
      in_flight: The treatment of a half-finished mini-batch. `"finish_late"` continues it, with the
        gradient at the parameters at which it began; see :func:`stale_params`. `"abort"` restarts
        it in the next window at the new parameters, with the new time from `times`. If every window
        is too short for a worker, that worker never finishes a mini-batch.

    Returns:
      The window, and the queue after it.

    Raises:
      ValueError: If `times` and the queue differ in their number of workers.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm.synchronization import fastest_worker
      >>> from jaxcomm.synchronization._windows import close_window, new_queue
      >>> times = jnp.array([[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]])
      >>> window, queue = close_window(new_queue(2), times, fastest_worker())
      >>> print(window.seconds, window.finished, queue.position)
      3.0 [3 1] [3 1]

    References:
      He, Dube, `Accelerating Parallel Stochastic Gradient Descent via Non-blocking Mini-batches
      <https://arxiv.org/abs/2211.00889>`_, 2022. The full paper was not available: `in_flight` and
      the triggers other than :func:`fastest_worker` are a reconstruction.
    """
    first = jnp.where(queue.remaining_seconds > 0, queue.remaining_seconds, times[:, 0])
    # A tree sum has as few roundings as the tree is deep.
    done = lax.associative_scan(jnp.add, times.at[:, 0].set(first), axis=1)
    seconds = trigger(done)
    rounding = (math.log2(times.shape[1]) + 4) * float(jnp.finfo(done.dtype).eps)
    finished = jnp.sum(done <= seconds * (1 + rounding), axis=1, dtype=jnp.int32)
    # The first unfinished mini-batch; if a worker has finished all, it ends at infinity.
    boundaries = jnp.pad(done, ((0, 0), (1, 1)), constant_values=((0, 0), (0, jnp.inf)))
    begins, ends = (
        jnp.take_along_axis(boundaries, finished[:, None] + k, axis=1)[:, 0] for k in (0, 1)
    )
    late = in_flight == "finish_late" and not trigger.waits_for_all
    in_flight_now = (begins < seconds * (1 - rounding)) & (finished < times.shape[1])
    left = jnp.where(in_flight_now & late, ends - seconds, 0)
    counts = finished.astype(jnp.uint32) if late else finished
    window = Window(seconds, queue.position, counts, queue.remaining_seconds > 0)
    return window, Queue(queue.position + finished, left)


class StaleParams(NamedTuple):
    """Marks the result of :func:`stale_params` in a state that is saved.

    It is :math:`z`, leaves [workers, ...]. A checkpoint that is restored for another number of
    workers then starts it from their parameters, since no mini-batch is in flight there.
    """

    params: PyTree


def stale_params(
    window: Window, queue: Queue, previous: PyTree, before: PyTree, after: PyTree
) -> PyTree:
    r"""The parameters at which each worker begins or has begun its next mini-batch.

    .. math:: z_i \gets \begin{cases} z_i & \text{still on a mini-batch from an earlier window} \\
              x & \text{on a mini-batch started in this window} \\
              x' & \text{idle} \end{cases}

    This is the third part of the batch of :func:`window_gradients` for windows with
    `in_flight="finish_late"`: a late gradient is evaluated at old parameters.

    Args:
      window: The closed window, of :func:`windows`.
      queue: The field `queue` of the clock after it.
      previous: :math:`z`, leaves [workers, ...], the result of this function for the previous
        window; initially each worker's parameters.
      before: :math:`x`, leaves [workers, ...], each worker's parameters in the window.
      after: :math:`x'`, leaves [workers, ...], each worker's parameters in the next window.

    Returns:
      Leaves [workers, ...].

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm.synchronization import deterministic, fastest_worker, stale_params, windows
      >>> times = deterministic([1.0, 1.5])
      >>> start, close = windows(times, fastest_worker(), workers=2, minibatches=1)
      >>> window, clock = close(start)
      >>> print(stale_params(window, clock.queue, jnp.zeros(2), jnp.zeros(2), jnp.ones(2)))
      [1. 0.]
    """
    in_flight = queue.remaining_seconds > 0
    from_earlier_window = in_flight & window.stale & (window.finished == 0)
    of_each = jax.vmap(chosen)
    return of_each(from_earlier_window, previous, of_each(in_flight, before, after))
