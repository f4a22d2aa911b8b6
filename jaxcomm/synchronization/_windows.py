"""When a window closes, what each worker has finished by then, and what is left for the next."""

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp

Trigger: TypeAlias = Callable[[jax.Array], jax.Array]
"""`float32[workers, M]`, when each mini-batch is done -> `float32[]`, when the window ends."""

InFlight = Literal["abort", "finish_late"]


def everybody() -> Trigger:
    """The window ends when all workers are done: the synchronous baseline.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm.synchronization import everybody
      >>> print(everybody()(jnp.array([[1.0, 2.0], [3.0, 6.0]])))
      6.0
    """
    return lambda done: jnp.max(done)


def first_done() -> Trigger:
    """The window ends when the first worker is done.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm.synchronization import first_done
      >>> print(first_done()(jnp.array([[1.0, 2.0], [3.0, 6.0]])))
      2.0
    """
    return lambda done: jnp.min(done[:, -1])


def quorum(workers: int) -> Trigger:
    """The window ends when so many workers are done.

    Args:
      workers: An int of at least 1, and at most all.

    Raises:
      ValueError: If it is not; when used, if there are fewer.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm.synchronization import quorum
      >>> print(quorum(2)(jnp.array([[1.0, 2.0], [3.0, 6.0], [2.0, 4.0]])))
      4.0
    """
    if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
        raise ValueError(f"`workers` must be a Python int of at least 1, got {workers!r}.")

    def trigger(done: jax.Array) -> jax.Array:
        if workers > len(done):
            raise ValueError(f"A quorum of {workers} is more than all {len(done)} workers.")
        return jnp.sort(done[:, -1])[workers - 1]

    return trigger


def deadline(seconds: float) -> Trigger:
    """The window ends after a time, or before if all are done.

    Args:
      seconds: A positive number.

    Raises:
      ValueError: If it is not.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm.synchronization import deadline
      >>> print(deadline(5.0)(jnp.array([[1.0, 2.0], [3.0, 6.0]])))
      5.0
    """
    if not seconds > 0:
        raise ValueError(f"`seconds` must be positive, got {seconds!r}.")
    return lambda done: jnp.minimum(jnp.float32(seconds), jnp.max(done))


def total_count(minibatches: int) -> Trigger:
    """The window ends when all workers together have done so many mini-batches, or all of them.

    Args:
      minibatches: An int of at least 1.

    Raises:
      ValueError: If it is not.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm.synchronization import total_count
      >>> print(total_count(3)(jnp.array([[1.0, 2.0], [3.0, 6.0]])))
      3.0
    """
    if not isinstance(minibatches, int) or isinstance(minibatches, bool) or minibatches < 1:
        raise ValueError(f"`minibatches` must be a Python int of at least 1, got {minibatches!r}.")
    return lambda done: jnp.sort(done.ravel())[min(minibatches, done.size) - 1]


class Queue(NamedTuple):
    """Where workers are in their mini-batches."""

    position: jax.Array  # int32[workers], how many of its own each has finished
    left: jax.Array  # float32[workers], seconds that the one in flight still takes; 0 where none is


def new_queue(workers: int) -> Queue:
    """The queue before the first window.

    Args:
      workers: How many.

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
    finished: jax.Array  # int32[workers], how many it has done, from that one on


def close_window(
    queue: Queue, times: jax.Array, trigger: Trigger, *, in_flight: InFlight = "abort"
) -> tuple[Window, Queue]:
    r"""One window of Non-blocking SGD, on a clock.

    .. math:: c_{ij} = \sum_{l \le j} t_{il}, \qquad \tau = \mathrm{trigger}(c), \qquad
              m_i = |\{j : c_{ij} \le \tau\}|

    What a worker has not finished stays in its queue, in order: over an epoch, no mini-batch is
    lost or repeated. Nothing is sent.

    Args:
      queue: Of :func:`new_queue`, or of the window before.
      times: :math:`t_{ij}`, float32[workers, M], seconds of the mini-batches of the window; of
        one that is in flight, what is left of it counts instead.
      trigger: When it closes.
      in_flight: What becomes of a mini-batch that is half done: `"abort"` begins it anew in the
        next window, at the new parameters, for the time that is given there; `"finish_late"` goes
        on with it, and takes its gradient at the parameters at which it began.

    Returns:
      The window, and the queue after it.

    Raises:
      ValueError: If `in_flight` is neither, or `times` are not of the queue's workers.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm.synchronization import close_window, first_done, new_queue
      >>> times = jnp.array([[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]])
      >>> window, queue = close_window(new_queue(2), times, first_done())
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
    done = jnp.cumsum(times.at[:, 0].set(first), axis=1)
    seconds = trigger(done)
    finished = jnp.sum(done <= seconds, axis=1, dtype=jnp.int32)
    all_done = finished == times.shape[1]
    ends = jnp.take_along_axis(done, jnp.where(all_done, 0, finished)[:, None], axis=1)[:, 0]
    goes_on = ~all_done & (in_flight == "finish_late")
    left = jnp.where(goes_on, ends - seconds, 0)
    return Window(seconds, queue.position, finished), Queue(queue.position + finished, left)
