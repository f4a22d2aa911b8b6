"""Ranks the recommended methods for a model, a number of workers and a link."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxcomm._contract import PyTree
from jaxcomm._workers import worker_axes
from jaxcomm.compression.quantizers._dither import DEFAULT_LEVELS, choose_field, most_levels
from jaxcomm.perf import Calibration, Device, predict
from jaxcomm.perf._calibrate import median, seconds_of
from jaxcomm.perf._link import SECONDS, quantity, to_device, to_link
from jaxcomm.perf._predict import BACKWARD, LinkLike, Prediction, shapes_of, size_of
from jaxcomm.perf._recommended import Method, error_of, recommended
from jaxcomm.wire._program import table

TIMED = 5  # Steps, of which the median counts.
NEAR = 1.05
"""Within this factor of the best, the method that is assumed to need fewer steps wins."""

STALE = 1.4
"""How many times as many examples stale gradients may need.

In the record 2026-11-25_stragglers, an asynchronous server with 8 workers took 0.57 of the time of
a synchronous one to the same loss, with half of the workers three times slower. By the times of
mini-batches, it used 2 times the examples per second, so it needed 1.14 times as many. It was 1.36
times with exponential times (0.50, 2.72), and 1.08 with pauses. With one worker 100 times slower it
was 1.86 times, of 87.6 times per second.
"""

LAYERS = 12
MOST = 10**12
MOST_OF_LEAF = 2**31 - 1
"""The coordinates of a leaf that codecs support."""

_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row(Method):
    """A method of the table: its `code`, assumed `steps`, `risk`, and what to `paste`.

    Attributes:
      prediction: The predicted step.
    """

    prediction: Prediction

    @property
    def cost(self) -> float:
        """The seconds of a step times the assumed factor on the steps."""
        own = self.prediction.overlapped if self.overlaps else self.prediction.seconds
        return math.inf if self.steps is None else own * self.steps


@dataclasses.dataclass(frozen=True)
class Advice:
    """What :func:`jaxcomm.advise` returns; print it.

    Attributes:
      rows: The methods, by seconds per step times the assumed factor on the number of steps.
      assumptions: What the predictions assume, a line each.
    """

    rows: tuple[Row, ...]
    assumptions: tuple[str, ...]

    @property
    def recommended(self) -> Row:
        """The row with the fewest assumed steps among those within 5 % of the first."""
        near = [row for row in self.rows if row.cost <= NEAR * self.rows[0].cost]
        return min(near, key=lambda row: (row.steps or math.inf, row.cost))

    @property
    def compress(self) -> bool:
        """Whether the recommendation is neither exact nor rounds to 16 bits."""
        return not self.recommended.overlaps

    @property
    def line(self) -> str:
        """The line of code to paste."""
        return self.recommended.line

    @property
    def verdict(self) -> str:
        """Whether to compress, in a sentence."""
        best = self.recommended
        exact = next(row for row in self.rows if row.steps == 1)
        if not self.compress:
            return "Do not compress" + ("." if best is exact else " further than to 16 bits.")
        gain = exact.cost / best.cost
        return f"Compress: {gain:.2f} x as fast as the exact mean, with overlap and assumed steps."

    def __str__(self) -> str:
        best = self.recommended
        cells: list[tuple[str, ...]] = [
            ("", "ms/step", "overlap", "MB sent", "MB state", "steps x", "risk", "method")
        ]
        for row in self.rows:
            seen = row.prediction
            milliseconds = [1e3 * seen.seconds, 1e3 * seen.overlapped]
            megabytes = [1e-6 * seen.bytes_per_worker, 1e-6 * seen.state_bytes]
            numbers = [f"{number:,.1f}" for number in (*milliseconds, *megabytes)]
            steps = "?" if row.steps is None else f"{row.steps:g}"
            risk = row.risk.partition(":")[0]
            cells.append(("->" if row is best else "", *numbers, steps, risk, row.code))
        lines = [*table(cells), "", *self.assumptions]
        lines += [f"Risk: {best.risk}.", f"Error: {best.prediction.error}."]
        return "\n".join([*lines, self.verdict, self.line])


def shapes_of_count(params: float | str) -> dict[str, jax.ShapeDtypeStruct]:
    """Square float32 matrices, and a vector of what is left, for a number such as 125M or 1.3B.

    Raises:
      ValueError: If it is no such number.
    """
    number = quantity(str(params).lower(), _FACTORS)
    if not 1 <= number <= MOST:
        raise ValueError(f"`params` must be a number such as 125M or 1.3B, got {str(params)!r}.")
    count = round(number)
    layers = max(LAYERS, math.ceil(count / MOST_OF_LEAF))
    side = math.isqrt(count // layers)
    shapes: dict[str, tuple[int, ...]] = {
        f"matrix_{i}": (side, side) for i in range(layers if side else 0)
    }
    if left := count - len(shapes) * side**2:
        shapes["vector"] = (left,)
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


def advise(
    params: PyTree | float | str,
    workers: int | Mesh,
    *,
    link: LinkLike,
    step_seconds: float | str | Callable[[], Any],
    axis_name: str = "data",
    device: Device | str = "a100",
    slowest: float = 1.0,
    failures_per_hour: float = 0.0,
) -> Advice:
    r"""Recommends a method, or not to compress, from predicted times.

    Nine methods are predicted with :func:`jaxcomm.perf.predict`. They are ranked by the seconds of
    a step, times a factor on the number of steps that the table states: what our records measured
    for a model of their own, or else an assumption. The exact mean and that in 16 bits are ranked
    by their time with overlap, all others by the sum of their parts. This favors not to compress.
    Of the methods within 5 % of the first, the one with the smallest factor is recommended. One
    takes local steps, of which every eighth exchanges displacements in 4 bits: its row has the
    average step, and its `line` needs parameters that :func:`jaxcomm.replicate` has placed.

    If workers differ or fail, one of the assumptions says whether to use
    :func:`jaxcomm.asynchronous.train`. If one of n workers takes x times as long as each other,
    workers that do not wait use G times the examples per second. A synchronous step takes as
    long as its slowest worker:

    .. math:: G = \frac{x}{n} \left( n - 1 + \frac{1}{x} \right) = \frac{(n - 1) x + 1}{n}

    Stale gradients need more examples. In a record of slow workers it was 1.1 to 1.4 times as many,
    and 1.9 if one worker is 100 times slower. So not to wait is recommended for G > 1.4, that is
    x > 1.46 for 8 workers and x > 1.8 for 2. A failure stops all workers of a synchronous program
    for some time, but only one of n that do not wait. The advice has the time from which this
    decides.

    Args:
      params: The parameters, arrays or `jax.ShapeDtypeStruct`; or their number, such as 125_000_000
        or "125M", which is taken as 12 or more square matrices. If the devices of a worker shard
        them, those of one device, and `link` is then the link of each device.
      workers: The number of workers, or the mesh that trains.
      link: A :class:`jaxcomm.perf.Link`, a bandwidth such as "10Gbit", a preset's name, or a
        :class:`jaxcomm.perf.Calibration`. If it has timed codecs, only these methods and the exact
        mean are compared.
      step_seconds: The seconds of a step that does not communicate, such as 0.3 or "300ms"; or a
        function that takes such a step and returns its arrays, which is timed here.
      axis_name: The axis of the workers.
      device: The device whose memory limits codecs that are not calibrated.
      slowest: The time that the slowest worker needs for a step, over the median of workers.
      failures_per_hour: How often one of the workers fails.

    Returns:
      The advice; print it. It has `rows`, the methods by their `cost`; `recommended`, one of the
      rows; `compress`, whether it does more than round to 16 bits; `verdict`, a sentence; `line`,
      the code to paste; and `assumptions`, texts, which also name the methods that are omitted,
      e.g. since a leaf is too large for a codec, and why. A row has `code`, `tx`, the assumed
      factor `steps` or `None`, `risk`, the `prediction` of :func:`jaxcomm.perf.predict`, and
      `cost`, its seconds per step times `steps`.

    Raises:
      ValueError: If `step_seconds` is not positive; if there is no worker; if the link has no
        bandwidth; if a number of parameters cannot be read; if `slowest` is less than 1.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> params = {"w": jax.ShapeDtypeStruct((10_000, 10_000), jnp.float32)}
      >>> jaxcomm.advise(params, 64, link="1Gbit", step_seconds=0.3).recommended.code
      'jaxcomm.power_sgd("data", rank=4)'
      >>> jaxcomm.advise("100M", 64, link="100Gbit", step_seconds="300ms").compress
      False
    """
    if isinstance(params, int | float | str):
        params = shapes_of_count(params)
    shapes = shapes_of(params)
    count = workers.shape[axis_name] if isinstance(workers, Mesh) else workers
    worker_axes(count, axis_name)  # Raises for what is no number of workers.
    memory = to_device(device)
    if callable(step_seconds):
        seconds = median(functools.partial(seconds_of, step_seconds), TIMED)
    elif isinstance(step_seconds, str):
        seconds = quantity(step_seconds, {"": 1.0, **SECONDS})
    else:
        seconds = step_seconds
    if not 0 < seconds < math.inf:
        rule = '`step_seconds` must be a duration above 0, such as 0.3 or "300ms"'
        raise ValueError(f"{rule}, got {step_seconds!r}.")
    waiting = _waiting(count, slowest, failures_per_hour)
    methods = recommended(axis_name, count)
    codecs = link.codecs if isinstance(link, Calibration) else {}
    # Others would be of another device; the exact mean encodes nothing.
    timed = [method for method in methods if method.code in codecs]
    compared = [method for method in methods if not timed or method in timed or method.steps == 1]
    coordinates = size_of(shapes)[0]
    rows, omitted = [], []
    for method in compared:
        try:
            prediction = predict(
                method.tx,
                shapes,
                link=link,
                compute_seconds=seconds,
                workers=count,
                axis_name=axis_name,
                device=memory,
                method=method.code if method in timed else None,
                error=error_of(method.claims, coordinates, method.sharing),
            )
        except ValueError as error:
            if method.steps == 1:  # The exact mean has no limits of its own.
                raise
            omitted.append(f"Omitted: {method.code}: {error}")
        else:
            if method.period > 1:
                prediction = prediction.of_local_steps(method.period, coordinates)
            rows.append(Row(**vars(method), prediction=prediction))
    field = choose_field(DEFAULT_LEVELS, None, count)
    codec = f"a quarter of the memory bandwidth of {memory.name} ({memory.source}), which "
    codec += "`perf.calibrate` replaces"
    if timed:
        beside = " with the exact mean, which encodes nothing" * (len(compared) > len(timed))
        codec = f"calibrated; {len(timed)} of {len(methods)} methods were timed and are compared"
        codec += beside
    assumptions = (
        f"{coordinates:,} parameters, {count} workers, {1e3 * seconds:.4g} ms of computation "
        f"({'measured' if callable(step_seconds) else 'given'}); overlap: at most {BACKWARD:.0%} "
        "of it hide messages.",
        f"Link: {_described(link)}.",
        f"Levels: global_qsgd has {field.levels} in {field.width} bits for each of {count} "
        f"workers; bits=8 allows {most_levels(8, count) or 'none'}.",
        f"Codecs: {codec}.",
        *omitted,
        *waiting,
    )
    ranked = sorted(rows, key=lambda row: (row.cost, row.prediction.seconds))
    return Advice(tuple(ranked), assumptions)


def _waiting(workers: int, slowest: float, failures_per_hour: float) -> list[str]:
    """Whether to wait for workers that differ or fail, in a line; none if they are equal."""
    if not 1 <= slowest < math.inf:
        raise ValueError(f"`slowest` must be a number of at least 1, got {slowest!r}.")
    if not 0 <= failures_per_hour < math.inf:
        raise ValueError(f"`failures_per_hour` must be at least 0, got {failures_per_hour!r}.")
    if workers == 1 or (slowest == 1 and not failures_per_hour):
        return []
    gain = ((workers - 1) * slowest + 1) / workers
    line = f"Waiting: workers that do not wait use {gain:.2f} x the examples per second, and may "
    line += f"need {STALE:g} x as many. "
    if gain > STALE:
        return [line + "Do not wait: `jaxcomm.asynchronous`."]
    line += "Wait for the slowest."
    if failures_per_hour:
        # The part u of the time for which gain (1 - u / workers) = STALE (1 - u).
        stopped = (STALE - gain) / (STALE - gain / workers)
        line += " If each failure stops them all for more than "
        line += f"{3600 * stopped / failures_per_hour:.0f} s, do not: `jaxcomm.asynchronous`."
    return [line]


def _described(link: LinkLike) -> str:
    if isinstance(link, Calibration):
        given = {str(one) for each in link.links.values() for one in each.values()}
        return given.pop() if len(given) == 1 else f"calibrated on {link.device}"
    if isinstance(link, Mapping):
        return "; ".join(f"{axis}: {to_link(each)}" for axis, each in link.items())
    return str(to_link(link))
