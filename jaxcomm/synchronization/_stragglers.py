"""Stragglers: models of mini-batch times that differ between workers or over time."""

import math
import pathlib
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm._require import AboveZero, AtLeastZero, Range, checked

MAX_TRACE_BYTES = 2**26  # Lines and numbers of a trace take up to 70 times its bytes.


class Straggler(NamedTuple):
    """A model of mini-batch times.

    Attributes:
      sample: `(key, step, (workers, count)) -> float32[workers, count]`, seconds of each
        mini-batch.
      means: `workers -> float64[workers]`, the expected seconds of a mini-batch of each worker.
      order_statistic: `(workers, k) -> seconds`, the expected time until the first k workers have
        finished one mini-batch; `None` if no closed form is known.
      minimum: A lower bound on the seconds of any mini-batch of any worker.
      period: The number of windows after which times repeat, 1 if they are constant; `None` if they
        are random.
    """

    sample: Callable[[jax.Array, jax.Array, tuple[int, int]], jax.Array]
    means: Callable[[int], np.ndarray]
    order_statistic: Callable[[int, int], float] | None
    minimum: float = 0.0
    period: int | None = None


def seconds_of(seconds: float | Callable[[Any], jax.Array], given: Any) -> jax.Array:
    """The seconds, which may be a function of something."""
    return seconds(given) if callable(seconds) else jnp.float32(seconds)


def _in_turn(times: np.ndarray) -> Straggler:
    """The rows of `times`, float64[steps, workers], one after the other."""
    narrow = times.astype(np.float32)

    def of(workers: int) -> np.ndarray:
        if times.shape[1] != workers:
            raise ValueError(f"There are times of {times.shape[1]} workers, for {workers} workers.")
        return times

    def draw(key: jax.Array, step: jax.Array, shape: tuple[int, int]) -> jax.Array:
        del key
        of(shape[0])
        row = jnp.asarray(narrow)[step % len(narrow)] if len(narrow) > 1 else jnp.asarray(narrow[0])
        return jnp.broadcast_to(row[:, None], shape)

    def means(workers: int) -> np.ndarray:
        return cast(np.ndarray, of(workers).mean(axis=0))

    def order_statistic(workers: int, k: int) -> float:
        return float(np.sort(of(workers), axis=1)[:, k - 1].mean())

    return Straggler(draw, means, order_statistic, float(times.min()), period=len(times))


def deterministic(seconds: Sequence[float]) -> Straggler:
    """Each worker has a constant mini-batch time.

    Args:
      seconds: The seconds of a mini-batch of each worker.

    Returns:
      The straggler model, for :func:`windows` and :func:`run_time`.

    Raises:
      ValueError: If a time is not positive, or the list is empty; when used, if the number of times
        is not the number of workers.

    Example:
      >>> from jaxcomm.synchronization import deterministic
      >>> deterministic([1.0, 1.0, 3.0]).order_statistic(3, 3)
      3.0
    """
    times = np.asarray(seconds, np.float64)
    if times.ndim != 1 or not np.all((times > 0) & (times < np.inf)):
        raise ValueError(f"`seconds` must be a positive number per worker, got {seconds!r}.")
    return _in_turn(times[None])


@checked
def shifted_exponential(mean: AboveZero, shift: AtLeastZero = 0.0) -> Straggler:
    r"""Exponential times with a constant shift.

    .. math:: T = s + \mathrm{Exp}(\mu), \qquad
              \mathbb{E}\, T_{(k:n)} = s + \frac{H_n - H_{n-k}}{\mu}, \quad
              H_n = \sum_{j \le n} \frac{1}{j}

    Here :math:`T_{(k:n)}` is the k-th smallest of n independent times.

    Args:
      mean: :math:`1 / \mu`, seconds.
      shift: :math:`s`, the minimum seconds, at least 0.

    Returns:
      The straggler model, for :func:`windows` and :func:`run_time`.

    Raises:
      ValueError: If `mean` is not positive, or `shift` is negative.

    Example:
      >>> from jaxcomm.synchronization import shifted_exponential
      >>> round(shifted_exponential(mean=1.0).order_statistic(8, 8), 3)
      2.718
    """

    def draw(key: jax.Array, step: jax.Array, shape: tuple[int, int]) -> jax.Array:
        drawn = jax.random.exponential(jax.random.fold_in(key, step), shape, jnp.float32)
        return shift + mean * drawn

    def order_statistic(workers: int, k: int) -> float:
        return shift + mean * sum(1 / j for j in range(workers - k + 1, workers + 1))

    return Straggler(draw, lambda workers: np.full(workers, shift + mean), order_statistic, shift)


@checked
def pareto(scale: AboveZero, shape: Annotated[float, Range(above=1)]) -> Straggler:
    r"""Pareto times, which have a heavy tail.

    .. math:: P(T > t) = (m / t)^{a} \text{ for } t \ge m, \qquad
              \mathbb{E}\, T_{(k:n)} = m \frac{\Gamma(n + 1)\, \Gamma(n - k + 1 - 1/a)}
              {\Gamma(n - k + 1)\, \Gamma(n + 1 - 1/a)}

    Here :math:`T_{(k:n)}` is the k-th smallest of n independent times.

    Args:
      scale: :math:`m`, the minimum seconds.
      shape: :math:`a`, above 1 for a finite mean.

    Returns:
      The straggler model, for :func:`windows` and :func:`run_time`.

    Raises:
      ValueError: If `scale` is not positive, or `shape` is not above 1.

    Example:
      >>> from jaxcomm.synchronization import pareto
      >>> round(pareto(scale=1.0, shape=2.0).order_statistic(1, 1), 3)
      2.0
    """

    def draw(key: jax.Array, step: jax.Array, size: tuple[int, int]) -> jax.Array:
        return scale * jax.random.pareto(jax.random.fold_in(key, step), shape, size, jnp.float32)

    def order_statistic(workers: int, k: int) -> float:
        slower, log = workers - k + 1, math.lgamma
        return scale * math.exp(
            log(workers + 1) + log(slower - 1 / shape) - log(slower) - log(workers + 1 - 1 / shape)
        )

    mean = scale * shape / (shape - 1)
    return Straggler(draw, lambda workers: np.full(workers, mean), order_statistic, scale)


@checked
def bernoulli_sleep(
    base: AboveZero, sleep: AboveZero, probability: Annotated[float, Range(least=0, most=1)]
) -> Straggler:
    r"""A fixed time plus an occasional sleep.

    .. math:: T = b + z \cdot \mathrm{Bernoulli}(p), \qquad
              \mathbb{E}\, T_{(k:n)} = b + z\, P(\mathrm{Bin}(n, p) \ge n - k + 1)

    Here :math:`T_{(k:n)}` is the k-th smallest of n independent times.

    Args:
      base: :math:`b`, seconds.
      sleep: :math:`z`, seconds.
      probability: :math:`p` in [0, 1].

    Returns:
      The straggler model, for :func:`windows` and :func:`run_time`.

    Raises:
      ValueError: If a time is not positive, or `probability` is out of range.

    Example:
      >>> from jaxcomm.synchronization import bernoulli_sleep
      >>> bernoulli_sleep(base=1.0, sleep=10.0, probability=0.5).order_statistic(1, 1)
      6.0
    """

    def draw(key: jax.Array, step: jax.Array, shape: tuple[int, int]) -> jax.Array:
        asleep = jax.random.bernoulli(jax.random.fold_in(key, step), probability, shape)
        return jnp.where(asleep, base + sleep, base).astype(jnp.float32)

    def order_statistic(workers: int, k: int) -> float:
        sleepers = range(workers - k + 1, workers + 1)
        return base + sleep * sum(
            math.comb(workers, j) * probability**j * (1 - probability) ** (workers - j)
            for j in sleepers
        )

    mean = base + sleep * probability
    return Straggler(draw, lambda workers: np.full(workers, mean), order_statistic, base)


def recorded_times(file: str | pathlib.Path) -> Straggler:
    """Measured times from a file, one line per step, repeated cyclically.

    Args:
      file: A file with comma-separated seconds, one column per worker. All mini-batches of a step
        take the same time.

    Returns:
      The straggler model, for :func:`windows` and :func:`run_time`.

    Raises:
      OSError: If the file cannot be read.
      ValueError: If the file is not a table of positive numbers in the range of float32, or has
        more than 64 MiB; when used, if the number of columns is not the number of workers.

    Example:
      >>> import pathlib, tempfile
      >>> from jaxcomm.synchronization import recorded_times
      >>> file = pathlib.Path(tempfile.mkdtemp()) / "times.csv"
      >>> _ = file.write_text("1.0,3.0\\n1.0,5.0\\n")
      >>> print(recorded_times(file).means(2))
      [1. 4.]
    """
    with open(file, "rb") as opened:
        raw = opened.read(MAX_TRACE_BYTES + 1)
    if len(raw) > MAX_TRACE_BYTES:
        raise ValueError(f"{file} has more than {MAX_TRACE_BYTES} bytes.")
    try:
        with warnings.catch_warnings(action="ignore"):  # An empty file raises the error below.
            times = np.loadtxt(raw.decode().splitlines(), delimiter=",", ndmin=2)
    except ValueError as error:
        raise ValueError(f"{file} is no table of numbers: {error!s:.200}") from error
    limits = np.finfo(np.float32)
    if not times.size or not np.all((times >= limits.tiny) & (times <= limits.max)):
        raise ValueError(f"{file} must hold positive seconds in the range of float32.")
    return _in_turn(times)
