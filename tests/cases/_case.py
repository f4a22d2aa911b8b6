"""The claims of a row of the table, and helpers for rows."""

from collections.abc import Callable
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
import optax

import jaxcomm
from jaxcomm.catalogue import METHODS, TINY
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.testing import AggregatorTrial

# Why layers of different magnitude do not get updates in proportion.
LARGEST_OF_ALL = "the largest coordinates of all layers together are sent, by design"
COMMON_NOISE = "levels or cells that layers share make noise of one size in all of them"
COMMON_THRESHOLD = "the threshold is one for all layers, in units of the update"
NO_MAGNITUDE = "votes have no magnitude"
COMMON_MEANS = "the row is of a bucket, which is not the default"

Sizes = list[int]  # coordinates of each leaf, in the order of the tree


class Case(NamedTuple):
    """A method of the catalogue and its claims, of which :func:`row` takes some from there.

    Attributes:
      name: Shown in test ids.
      make: `(axis_name, seed) -> transformation`, cached so that tests share compiled programs.
      bytes: `(sizes, workers) -> bytes` that a worker sends for one update.
      dtypes: `workers -> dtypes` of payloads in the compiled program; of
        messages, unsigned words as wide as the narrowest array in them.
      unbiased: The expectation of the result is the mean.
      variance: `(coordinates of the tree, workers) -> theta`, with
        `E|G - mean|^2 <= theta / n * sum |x_i|^2`; `None` without a claim.
      resolution: `(workers, coordinates) -> r`: no coordinate of the result is farther from the
        mean than `r` times the largest magnitude on any worker. 0 claims exactness to float32
        rounding; `None` if the result is no mean.
      integer_sum: Workers' contributions are added as integers: all modes agree bit for bit.
      random: Rounds stochastically.
      codec: The codec, where the method is one aggregator of one codec.
      rerounds: Sums are rounded again on the way, to few values.
      weighted: Takes `update(..., weight=)`.
      compressor: The codec without feedback, to which the next two apply.
      contraction: `coordinates -> delta`, with `E|C(x) - x|^2 <= (1 - delta) |x|^2`.
      moment: `x -> E|Q(x) - x|^2`, exactly, of one worker's float64 vector.
      feedback: The sent and the kept array of `codec` add up to its input.
      common_draws: Workers draw the same numbers.
      zeros_drawn: A private random number decides on a coordinate that is zero.
      spreads: Coordinates that are zero on all workers need not be so in the result.
      alien: Why a small layer beside a large one does not get an update of its own magnitude, in
        the scope that the row takes by default; empty where it does.
      fitted: Easy input is represented exactly, and nothing is drawn.
      extremes: `coordinates -> number` of the largest ones, which are sent exactly; the others are
        rounded to levels of their own.
      discount: The factor by which a step of feedback multiplies the earlier error.
      aim: `updates [steps, n, d] -> [steps, d]`, in NumPy, whose mean over time results have in
        the long run, of updates that do not change; `None` for the mean of workers.
      shares: The relative error that each worker's local part may have there.
      counted: The results whose mean holds every worker's part so well, where they differ.
      converges: The error vanishes if updates do not change.
      result: `updates [steps, n, d] -> results [steps, d]`, exactly, if it is no mean.
      nonfinite: Whether a NaN makes the whole update NaN, or its coordinate only.
      staged: May be any stage of `hierarchical`: one aggregator, without memory.
    """

    name: str
    make: Callable[..., optax.GradientTransformationExtraArgs]
    bytes: Callable[[Sizes, int], float]
    dtypes: Callable[[int], set[str]]
    unbiased: bool
    variance: Callable[[int, int], float] | None
    resolution: Callable[[int, int], float] | None = None
    integer_sum: bool = False
    random: bool = True
    codec: jaxcomm.Codec | None = None
    rerounds: bool = False
    weighted: bool = True
    compressor: jaxcomm.Codec | None = None
    contraction: Callable[[int], float] | None = None
    moment: Callable[[np.ndarray], float] | None = None
    feedback: bool = False
    common_draws: bool = False
    fitted: bool = False
    extremes: Callable[[int], int] = lambda d: 0
    spreads: bool = False
    discount: float = 1.0
    aim: Callable[[np.ndarray], np.ndarray] | None = None
    shares: float = 0.5
    counted: int = 24
    converges: bool = False
    result: Callable[[np.ndarray], np.ndarray] | None = None
    staged: bool = True
    zeros_drawn: bool = False
    nonfinite: Literal["all", "coordinate"] = "all"
    alien: str = ""

    def trial(self, workers: int = 4) -> AggregatorTrial:
        """The method and its claims, for the laws of `jaxcomm.testing`."""
        return AggregatorTrial(
            self.make(),
            workers,
            resolution=self.resolution,
            unbiased=self.unbiased,
            variance=self.variance,
            weighted=self.weighted and self.resolution is not None,
            silent=not (self.zeros_drawn or self.spreads),
            nonfinite=self.nonfinite,
            integers=self.integer_sum,
            random=self.random,
            draws=4000 if self.random else 2,
        )

    def __repr__(self) -> str:
        return self.name


def all_reduce(size_in_bytes: float, workers: int) -> float:
    return 2 * (workers - 1) / workers * size_in_bytes


def row_size(size: int, workers: int) -> int:
    """The elements per worker, of `size` over n workers: the last row is padded."""
    return -(-size // workers)


def root(d: int) -> float:
    """The largest ratio of the l2 norm of d coordinates to their largest magnitude."""
    return d**0.5


def twice(omega: float, n: int) -> float:
    """theta of two roundings of relative variance omega, of each update and of their mean."""
    return omega / n + omega * (1 + omega / n)


def zero(*_: int) -> float:
    """The error of an exact mean."""
    return 0.0


def each_alone(sizes: Sizes) -> Sizes:
    return sizes


def word_bytes(bits: int) -> int:
    """Bytes of the bits in whole words of 32."""
    return 4 * -(-bits // 32)


def row(
    name: str,
    *,
    bytes: Callable[[Sizes, int], float],
    dtypes: str | Callable[[int], set[str]] = "uint32",
    with_codec: bool = True,
    with_compressor: bool = False,
    **claims: Any,
) -> Case:
    """A method of the catalogue, at its size for tests, with claims that are written by hand.

    A compressor goes with the claims that are about it. `with_codec` says whether the laws of
    codecs hold the codec of the row, too.
    """
    method = METHODS[name]
    alone = method.codec(TINY) if method.codec else None
    whole = method.feedback(alone) if alone and method.feedback else alone
    about_it = with_compressor or "contraction" in claims or "moment" in claims
    return Case(
        name,
        cache(lambda axis_name="data", seed=0: method.build(TINY, axis_name=axis_name, seed=seed)),
        bytes,
        (lambda n: {dtypes}) if isinstance(dtypes, str) else dtypes,
        method.is_unbiased,
        claims.pop("variance", None),
        codec=whole if with_codec else None,
        compressor=alone if about_it else None,
        **{"feedback": method.feedback is error_feedback} | claims,
    )


def feedback_row(
    name: str,
    *,
    bytes: Callable[[int], int],
    contraction: Callable[[int], float] | None,
    statistics: int = 0,
    in_one: bool | None = None,
    random: bool = False,
    **claims: Any,
) -> Case:
    """A row of a biased codec under error feedback, gathered; `bytes` are those of one unit."""
    codec = METHODS[name].codec(TINY)
    one = codec.scope != "leaf" if in_one is None else in_one
    units = (lambda sizes: [sum(sizes)]) if one else each_alone
    return row(
        name,
        bytes=lambda sizes, n: (
            (n - 1) * (sum(bytes(size) + 4 * statistics for size in units(sizes)) + 4)
        ),
        with_compressor=True,
        contraction=contraction,
        random=random,
        **claims,
    )
