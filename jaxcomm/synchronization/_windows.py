"""What each worker has finished when a window closes, and what is left for the next."""

import math
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm._base import PyTree
from jaxcomm.synchronization._triggers import Trigger

InFlight = Literal["abort", "finish_late"]


class Queue(NamedTuple):
    """Where workers are in their mini-batches."""

    position: jax.Array  # int32[workers], how many of its own each has finished
    left: jax.Array  # float32[workers], seconds that the one in flight still takes; 0 where none is


def new_queue(workers: int) -> Queue:
    """The queue before the first window.

    Args:
      workers: How many.

    Returns:
      A queue of workers none of which has begun anything.

    Example:
      >>> from jaxcomm.synchronization import new_queue
      >>> print(new_queue(2).position)
      [0 0]
    """
    return Queue(jnp.zeros(workers, jnp.int32), jnp.zeros(workers, jnp.float32))


class Window(NamedTuple):
    """What came of a window."""

    seconds: jax.Array  # float32[], how long it was
    first: jax.Array  # int32[workers], of each the number of the first mini-batch it was to do
    finished: jax.Array  # how many it has done from that one on: int32[workers], or uint32 where
    # the first may be late, and its gradient needs `stale_params`
    late: jax.Array  # bool[workers], whether that one began in an earlier window


def require_points(finished: jax.Array | int, begun: PyTree) -> None:
    """Raises where a first mini-batch may be late, and nobody says at which parameters it began."""
    if begun is None and jnp.issubdtype(jnp.asarray(finished).dtype, jnp.unsignedinteger):
        raise ValueError(
            "`finished` is of windows with `in_flight`='finish_late' (it is unsigned), whose first "
            "mini-batch may have begun at older parameters: pass those of `stale_params` as the "
            "third part of the batch, or make the windows with `in_flight`='abort'."
        )


def close_window(
    queue: Queue, times: jax.Array, trigger: Trigger, *, in_flight: InFlight = "finish_late"
) -> tuple[Window, Queue]:
    r"""One window of Non-blocking SGD, on a clock.

    .. math:: c_{ij} = \sum_{l \le j} t_{il}, \qquad \tau = \mathrm{trigger}(c), \qquad
              m_i = |\{j : c_{ij} \le \tau\}|

    What a worker has not finished stays in its queue, in order: over an epoch, no mini-batch is
    lost or repeated. Times that differ by rounding alone are the same: in a deadline of 0.7 seconds
    there are seven mini-batches of 0.1. Nothing is sent.

    Args:
      queue: Of :func:`new_queue`, or of the window before.
      times: :math:`t_{ij}`, float32[workers, M], seconds of the mini-batches of the window; of
        one that is in flight, what is left of it counts instead.
      trigger: When it closes.
      in_flight: What becomes of a mini-batch that is half done: `"finish_late"` goes on with it,
        and takes its gradient at the parameters at which it began: see :func:`stale_params`;
        `"abort"` begins it anew in the next window, at the new parameters, for the time that is
        given there, so that a worker to which no window is long enough never finishes any.

    Returns:
      The window, and the queue after it.

    Raises:
      ValueError: If `in_flight` is neither, or `times` are not of the queue's workers.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm.synchronization import close_window, fastest_worker, new_queue
      >>> times = jnp.array([[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]])
      >>> window, queue = close_window(new_queue(2), times, fastest_worker())
      >>> print(window.seconds, window.finished, queue.position)
      3.0 [3 1] [3 1]

    References:
      He, Dube, `Accelerating Parallel Stochastic Gradient Descent via Non-blocking Mini-batches
      <https://arxiv.org/abs/2211.00889>`_, 2022. The full paper was not at hand: triggers other
      than the first worker done, and `in_flight`, are a reconstruction.
    """
    if in_flight not in get_args(InFlight):
        raise ValueError(f"`in_flight` must be one of {get_args(InFlight)}, got {in_flight!r}.")
    if times.ndim != 2 or len(times) != len(queue.position):
        raise ValueError(
            f"`times` must be [workers, mini-batches] of {len(queue.position)} workers, got shape "
            f"{times.shape}."
        )
    first = jnp.where(queue.left > 0, queue.left, times[:, 0])
    # In a tree, each sum is of as few roundings as the tree is deep.
    done = lax.associative_scan(jnp.add, times.at[:, 0].set(first), axis=1)
    seconds = trigger(done)
    rounding = (math.log2(times.shape[1]) + 4) * float(jnp.finfo(done.dtype).eps)
    finished = jnp.sum(done <= seconds * (1 + rounding), axis=1, dtype=jnp.int32)
    # Of the mini-batch after those; where a worker has done all, beyond the end of the window.
    boundaries = jnp.pad(done, ((0, 0), (1, 1)), constant_values=((0, 0), (0, jnp.inf)))
    begins, ends = (
        jnp.take_along_axis(boundaries, finished[:, None] + k, axis=1)[:, 0] for k in (0, 1)
    )
    late = in_flight == "finish_late" and not trigger.waits
    in_flight_now = (begins < seconds * (1 - rounding)) & (finished < times.shape[1])
    left = jnp.where(in_flight_now & late, ends - seconds, 0)
    counts = finished.astype(jnp.uint32) if late else finished
    window = Window(seconds, queue.position, counts, queue.left > 0)
    return window, Queue(queue.position + finished, left)


def stale_params(
    window: Window, queue: Queue, previous: PyTree, before: PyTree, after: PyTree
) -> PyTree:
    r"""The parameters at which each worker begins, or has begun, its next mini-batch.

    .. math:: z_i \gets \begin{cases} z_i & \text{still at the one it came with} \\
              x & \text{at one that it began in this window} \\
              x' & \text{at none} \end{cases}

    The third part of the batch of :func:`window_gradients`, for windows with
    `in_flight="finish_late"`: a gradient that comes late is of old parameters.

    Args:
      window: The one that has closed.
      queue: The queue after it.
      previous: :math:`z`, leaves [workers, ...], as this returned it of the window before; at first
        each worker's parameters.
      before: :math:`x`, leaves [workers, ...]: each worker's parameters in the window.
      after: :math:`x'`, those of the next.

    Returns:
      Leaves [workers, ...].

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm.synchronization import stale_params, close_window, fastest_worker, new_queue
      >>> times = jnp.array([[1.0], [1.5]])
      >>> window, queue = close_window(new_queue(2), times, fastest_worker())
      >>> print(stale_params(window, queue, jnp.zeros(2), jnp.zeros(2), jnp.ones(2)))
      [1. 0.]
    """
    in_flight = queue.left > 0
    came_with = in_flight & window.late & (window.finished == 0)

    def choose(z: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        def of_leaf(which: jax.Array) -> jax.Array:
            return which.reshape(-1, *[1] * (x.ndim - 1))

        return jnp.where(of_leaf(came_with), z, jnp.where(of_leaf(in_flight), x, y))

    return jax.tree.map(choose, previous, before, after)
