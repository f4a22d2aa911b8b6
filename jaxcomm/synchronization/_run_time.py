"""What waiting costs, in closed form."""

from typing import NamedTuple

from jaxcomm.synchronization._stragglers import Straggler


class RunTime(NamedTuple):
    """What is expected of a strategy, communication aside."""

    seconds_per_update: float
    minibatches_per_second: float  # of all workers together, that count


def run_time(straggler: Straggler, workers: int, waits_for: int) -> RunTime:
    r"""Each worker does one mini-batch, and an update takes the first so many of them.

    .. math:: \mathbb{E}\, T_{(k:n)} \text{ seconds an update}, \qquad
              \frac{k}{\mathbb{E}\, T_{(k:n)}} \text{ mini-batches a second}

    :math:`k = n` is synchronous SGD; fewer are backup workers, whose late gradients are dropped.

    Args:
      straggler: The times.
      workers: :math:`n`.
      waits_for: :math:`k`, 1 to n.

    Raises:
      ValueError: If `waits_for` is out of range.

    Example:
      >>> from jaxcomm.synchronization import exponential, run_time
      >>> round(run_time(exponential(mean=1.0), workers=10, waits_for=8).seconds_per_update, 3)
      1.429
    """
    if not 1 <= waits_for <= workers:
        raise ValueError(f"`waits_for` must be 1 to {workers}, got {waits_for!r}.")
    if straggler.order_statistic is None:
        raise ValueError("No closed form is known of these times: simulate windows instead.")
    seconds = straggler.order_statistic(workers, waits_for)
    return RunTime(seconds, waits_for / seconds)


def non_blocking_rate(straggler: Straggler, workers: int) -> float:
    r"""Mini-batches a second of workers that never wait: :math:`\sum_i 1 / \mathbb{E}\, T_i`.

    What windows come to in the long run with `in_flight="finish_late"`, if no worker runs out of
    mini-batches within one.

    Args:
      straggler: The times.
      workers: How many.

    Example:
      >>> from jaxcomm.synchronization import deterministic, non_blocking_rate, run_time
      >>> times = deterministic([1.0] * 4 + [3.0] * 4)
      >>> gain = non_blocking_rate(times, 8) / run_time(times, 8, 8).minibatches_per_second
      >>> round(gain, 3)
      2.0
    """
    return float((1 / straggler.means(workers)).sum())
