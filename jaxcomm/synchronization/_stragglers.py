"""How long mini-batches take on workers that are not alike, or not always."""

import math
import pathlib
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Straggler(NamedTuple):
    """A model of times.

    Attributes:
      draw: `(key, step, (workers, count)) -> float32[workers, count]`, seconds of each mini-batch.
      means: `workers -> float64[workers]`, the expected seconds of a mini-batch of each.
      order_statistic: `(workers, k) -> seconds`, expected until the first k of them have done one
        mini-batch; `None` where no closed form is known.
      minimum: Seconds that any mini-batch of any worker takes at least.
      period: After how many windows times begin anew, 1 where they are always the same; `None`
        where they are drawn.
    """

    draw: Callable[[jax.Array, jax.Array, tuple[int, int]], jax.Array]
    means: Callable[[int], np.ndarray]
    order_statistic: Callable[[int, int], float] | None
    minimum: float = 0.0
    period: int | None = None


def _require_positive(**numbers: float) -> None:
    for name, value in numbers.items():
        if not 0 < value < math.inf:
            raise ValueError(f"`{name}` must be positive and finite, got {value!r}.")


def _require_all(times: np.ndarray, workers: int) -> None:
    if len(times) != workers:
        raise ValueError(f"There are times of {len(times)} workers, and {workers} workers.")


def deterministic(seconds: Sequence[float]) -> Straggler:
    """Each worker always takes its own time.

    Args:
      seconds: A mini-batch of each worker.

    Returns:
      The times, for :func:`windows` and :func:`run_time`.

    Raises:
      ValueError: If one is not positive, or there is none; when used, if there are not as many as
        workers.

    Example:
      >>> from jaxcomm.synchronization import deterministic
      >>> deterministic([1.0, 1.0, 3.0]).order_statistic(3, 3)
      3.0
    """
    times = np.asarray(seconds, np.float64)
    if times.ndim != 1 or not len(times):
        raise ValueError(f"`seconds` must be a list of a number a worker, got {seconds!r}.")
    for value in times:
        _require_positive(seconds=float(value))

    def draw(key: jax.Array, step: jax.Array, shape: tuple[int, int]) -> jax.Array:
        del key, step
        _require_all(times, shape[0])
        return jnp.broadcast_to(jnp.asarray(times, jnp.float32)[:, None], shape)

    def means(workers: int) -> np.ndarray:
        _require_all(times, workers)
        return times

    def order_statistic(workers: int, k: int) -> float:
        return float(np.sort(means(workers))[k - 1])

    return Straggler(draw, means, order_statistic, float(times.min()), period=1)


def exponential(mean: float, shift: float = 0.0) -> Straggler:
    r"""Exponential times, beyond a shift that each takes at least.

    .. math:: T = s + \mathrm{Exp}(\mu), \qquad
              \mathbb{E}\, T_{(k:n)} = s + \frac{H_n - H_{n-k}}{\mu}, \quad
              H_n = \sum_{j \le n} \frac{1}{j}

    Args:
      mean: :math:`1 / \mu`, seconds.
      shift: :math:`s`, seconds, at least 0.

    Returns:
      The times, for :func:`windows` and :func:`run_time`.

    Raises:
      ValueError: If `mean` is not positive or `shift` negative.

    Example:
      >>> from jaxcomm.synchronization import exponential
      >>> round(exponential(mean=1.0).order_statistic(8, 8), 3)
      2.718
    """
    _require_positive(mean=mean)
    if not 0 <= shift < math.inf:
        raise ValueError(f"`shift` must be at least 0, got {shift!r}.")

    def draw(key: jax.Array, step: jax.Array, shape: tuple[int, int]) -> jax.Array:
        drawn = jax.random.exponential(jax.random.fold_in(key, step), shape, jnp.float32)
        return shift + mean * drawn

    def order_statistic(workers: int, k: int) -> float:
        return shift + mean * sum(1 / j for j in range(workers - k + 1, workers + 1))

    return Straggler(draw, lambda workers: np.full(workers, shift + mean), order_statistic, shift)


def pareto(scale: float, shape: float) -> Straggler:
    r"""Pareto times, whose tail is heavy.

    .. math:: P(T > t) = (m / t)^{a} \text{ for } t \ge m, \qquad
              \mathbb{E}\, T_{(k:n)} = m \frac{\Gamma(n + 1)\, \Gamma(n - k + 1 - 1/a)}
              {\Gamma(n - k + 1)\, \Gamma(n + 1 - 1/a)}

    Args:
      scale: :math:`m`, the least seconds.
      shape: :math:`a` above 1, where the mean is finite.

    Returns:
      The times, for :func:`windows` and :func:`run_time`.

    Raises:
      ValueError: If `scale` is not positive or `shape` not above 1.

    Example:
      >>> from jaxcomm.synchronization import pareto
      >>> round(pareto(scale=1.0, shape=2.0).order_statistic(1, 1), 3)
      2.0
    """
    _require_positive(scale=scale)
    if not 1 < shape < math.inf:
        raise ValueError(f"`shape` must be above 1, where the mean is finite, got {shape!r}.")

    def draw(key: jax.Array, step: jax.Array, size: tuple[int, int]) -> jax.Array:
        return scale * jax.random.pareto(jax.random.fold_in(key, step), shape, size, jnp.float32)

    def order_statistic(workers: int, k: int) -> float:
        slower, log = workers - k + 1, math.lgamma
        return scale * math.exp(
            log(workers + 1) + log(slower - 1 / shape) - log(slower) - log(workers + 1 - 1 / shape)
        )

    mean = scale * shape / (shape - 1)
    return Straggler(draw, lambda workers: np.full(workers, mean), order_statistic, scale)


def bernoulli_sleep(base: float, sleep: float, probability: float) -> Straggler:
    r"""A fixed time, and now and then a sleep.

    .. math:: T = b + z \cdot \mathrm{Bernoulli}(p), \qquad
              \mathbb{E}\, T_{(k:n)} = b + z\, P(\mathrm{Bin}(n, p) \ge n - k + 1)

    Args:
      base: :math:`b`, seconds.
      sleep: :math:`z`, seconds.
      probability: :math:`p` in [0, 1].

    Returns:
      The times, for :func:`windows` and :func:`run_time`.

    Raises:
      ValueError: If a time is not positive or `probability` out of range.

    Example:
      >>> from jaxcomm.synchronization import bernoulli_sleep
      >>> bernoulli_sleep(base=1.0, sleep=10.0, probability=0.5).order_statistic(1, 1)
      6.0
    """
    _require_positive(base=base, sleep=sleep)
    if not 0 <= probability <= 1:
        raise ValueError(f"`probability` must be in [0, 1], got {probability!r}.")

    def draw(key: jax.Array, step: jax.Array, shape: tuple[int, int]) -> jax.Array:
        asleep = jax.random.bernoulli(jax.random.fold_in(key, step), probability, shape)
        return jnp.where(asleep, base + sleep, base).astype(jnp.float32)

    def order_statistic(workers: int, k: int) -> float:
        enough = range(workers - k + 1, workers + 1)
        return base + sleep * sum(
            math.comb(workers, j) * probability**j * (1 - probability) ** (workers - j)
            for j in enough
        )

    mean = base + sleep * probability
    return Straggler(draw, lambda workers: np.full(workers, mean), order_statistic, base)


def trace(file: str | pathlib.Path) -> Straggler:
    """Times that were measured: a step a line, over and over.

    Args:
      file: Numbers of seconds separated by commas, a column a worker; all mini-batches of a step
        take as long.

    Returns:
      The times, for :func:`windows` and :func:`run_time`.

    Raises:
      ValueError: If the file is not a table of positive numbers that float32 holds; when used, if
        it has not as many columns as there are workers.

    Example:
      >>> import pathlib, tempfile
      >>> from jaxcomm.synchronization import trace
      >>> file = pathlib.Path(tempfile.mkdtemp()) / "times.csv"
      >>> _ = file.write_text("1.0,3.0\\n1.0,5.0\\n")
      >>> print(trace(file).means(2))
      [1. 4.]
    """
    try:
        lines = pathlib.Path(file).read_text(encoding="utf-8").splitlines()
        with warnings.catch_warnings(action="ignore"):  # Of an empty file, an error below.
            times = np.loadtxt(lines, delimiter=",", ndmin=2)
    except ValueError as error:
        raise ValueError(f"{file} is no table of numbers separated by commas: {error}.") from error
    if not times.size:
        raise ValueError(f"{file} must hold numbers of seconds, a column a worker; it is empty.")
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        drawn = times.astype(np.float32)
    if (wrong := ~((drawn >= np.finfo(np.float32).tiny) & (drawn < np.inf))).any():
        step, worker = np.argwhere(wrong)[0]
        raise ValueError(
            f"{file} must hold positive numbers of seconds that float32 can tell from 0 and "
            f"infinity, a column a worker; step {step + 1} of worker {worker} is "
            f"{times[step, worker]}."
        )

    def draw(key: jax.Array, step: jax.Array, shape: tuple[int, int]) -> jax.Array:
        del key
        _require_all(times.T, shape[0])
        row = jnp.asarray(drawn)[step % len(drawn)]
        return jnp.broadcast_to(row[:, None], shape)

    def means(workers: int) -> np.ndarray:
        _require_all(times.T, workers)
        return times.mean(axis=0)

    def order_statistic(workers: int, k: int) -> float:
        _require_all(times.T, workers)
        return float(np.sort(times, axis=1)[:, k - 1].mean())

    return Straggler(draw, means, order_statistic, float(times.min()), period=len(times))
