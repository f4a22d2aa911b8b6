"""The methods of the comparison of outer steps: local steps, with exchanges that send little."""

from collections.abc import Callable
from typing import Any, NamedTuple

import optax

import jaxcomm
from jaxcomm import gossip
from jaxcomm.compression import blockwise
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.quantizers import dither, e3m0
from jaxcomm.synchronization import diloco, eager_diloco, sparseloco, streaming_diloco
from jaxcomm.wire._account import Account

ADAM, MUON = "adam", "muon"
INNERS: dict[str, Callable[[Any], optax.GradientTransformation]] = {
    ADAM: optax.adam,
    MUON: optax.contrib.muon,
}
BASELINE = "synchronous"


class OuterMethod(NamedTuple):
    """A method.

    Attributes:
      build: `(inner, period, workers, scale) -> transformation`; the outer rate is multiplied by
        `scale`.
      sends: What a worker sends.
      inners: The inner optimizers with which it is compared.
      is_local: Whether workers take local steps; otherwise they average every gradient.
      is_static: Whether the program depends on the period.
      mean_bytes: `(account, period) -> bytes` that a worker sends in a step, on average.
    """

    build: Callable[[Any, Any, int, Any], optax.GradientTransformation]
    sends: str
    inners: tuple[str, ...] = (ADAM,)
    is_local: bool = True
    is_static: bool = False
    mean_bytes: Callable[[Account, int], float] = lambda account, period: (
        account.amortized_bytes_per_worker(1 / period)
    )


def _outer(rate: Any) -> optax.GradientTransformation:
    return optax.sgd(rate, momentum=0.9, nesterov=True)


def _few_bits() -> Any:
    return jaxcomm.all_gather_mean(error_feedback(blockwise(dither(bits=4), 32)))


def _four_bit_floats() -> Any:
    return jaxcomm.all_gather_mean(blockwise(e3m0(), 256))


METHODS: dict[str, OuterMethod] = {
    BASELINE: OuterMethod(
        lambda inner, period, workers, scale: optax.chain(jaxcomm.mean(), inner),
        "gradients in every step, float32",
        (ADAM, MUON),
        is_local=False,
    ),
    "synchronous_bfloat16": OuterMethod(
        lambda inner, period, workers, scale: optax.chain(
            jaxcomm.mean(wire_dtype="bfloat16"), inner
        ),
        "gradients in every step, bfloat16",
        is_local=False,
    ),
    "diloco": OuterMethod(
        lambda inner, period, workers, scale: diloco(inner, _outer(0.7 * scale), period),
        "displacements, float32",
        (ADAM, MUON),
    ),
    "muloco": OuterMethod(
        lambda inner, period, workers, scale: diloco(
            inner, _outer(0.7 * scale), period, aggregator=_few_bits()
        ),
        "displacements in 4 bits, in blocks of 32, with feedback",
        (MUON,),
    ),
    "sparseloco": OuterMethod(
        lambda inner, period, workers, scale: sparseloco(inner, period, learning_rate=scale),
        "the largest 64 of each 4096 coordinates of the residual, in 2 bits",
    ),
    "streaming_4_bits": OuterMethod(
        lambda inner, period, workers, scale: streaming_diloco(
            inner,
            _outer(0.4 * scale),
            period,
            fragments=2,
            overlap=min(5, period - 1),
            mixing_factor=0.5,
            aggregator=_four_bit_floats(),
        ),
        "displacements of half of the leaves in E3M0, in blocks of 256, merged 5 steps later",
        is_static=True,
        # A branch per fragment; each runs once in a period.
        mean_bytes=lambda account, period: account.bytes_of_branches / period,
    ),
    "eager": OuterMethod(
        lambda inner, period, workers, scale: eager_diloco(inner, _outer(0.7 * scale), period),
        "displacements of the last period, float32",
    ),
    "delayed": OuterMethod(
        lambda inner, period, workers, scale: eager_diloco(
            inner, _outer(0.7 * scale), period, eager=False
        ),
        "the same, without the worker's own part of this period",
    ),
    "noloco": OuterMethod(
        lambda inner, period, workers, scale: optax.chain(
            jaxcomm.per_worker(inner),
            gossip.noloco(
                gossip.random_pairs(workers), period, learning_rate=0.7 * scale, pull=0.7
            ),
        ),
        "parameters and displacement to one other worker, as one float32 array",
        is_static=True,
    ),
}
