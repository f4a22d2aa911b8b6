"""The time of a codec on the sparse leaves."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import jaxcomm
from experiments.methods.sparse import SPARSE_METHODS, SparseVariant
from experiments.training.timing import medians

NOTE = (
    "Encoding includes measuring the statistics that are reduced over workers; decoding is of all "
    "payloads that a worker receives."
)
"""What is timed."""


class CodecTime(NamedTuple):
    """Median seconds of one worker in one step, summed over the sparse leaves."""

    encode: float
    decode: float


_REDUCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "sum": functools.partial(jnp.sum, axis=0),
    "max": functools.partial(jnp.max, axis=0),
    "or": lambda x: lax.reduce(x, x.dtype.type(0), lax.bitwise_or, (0,)),
}


def _time_leaf(codec: jaxcomm.Codec, gradients: jax.Array, repetitions: int) -> CodecTime:
    """Times the encoding of one worker's gradient, and the decoding of all payloads."""
    number, *shape = gradients.shape
    summed = codec.combine == "sum"
    workers = number if summed else 1
    public, private = jax.random.split(jax.random.key(0))
    context = jaxcomm.Context(jaxcomm.Coins(public, private), workers=workers, shape=tuple(shape))

    def encode(worker: jax.Array, x: jax.Array, statistics: Any) -> tuple[Any, Any]:
        coins = jaxcomm.Coins(public, jax.random.fold_in(private, worker))
        before = context.replace(coins=coins, memory=codec.init(x))
        measured = codec.measure(before, x)
        return codec.encode(before.replace(statistics=statistics if summed else measured), x)[
            0
        ], measured

    @jax.jit
    def prepare(gradients: jax.Array) -> tuple[Any, Any, Any]:
        """The reduced statistics, and the received payloads with their statistics."""
        measured = jax.vmap(lambda x: codec.measure(context.replace(memory=codec.init(x)), x))(
            gradients
        )
        statistics = jax.tree.map(
            lambda kind, x: _REDUCTIONS[kind](x), codec.reduce_statistics, measured
        )
        payloads, _ = jax.vmap(encode, in_axes=(0, 0, None))(
            jnp.arange(number), gradients, statistics
        )
        if summed:
            payloads = jax.tree.map(lambda x: jnp.sum(x, axis=0, dtype=x.dtype), payloads)
        return statistics, payloads, statistics if summed else measured

    @jax.jit
    def decode(payloads: Any, statistics: Any) -> jax.Array:
        if summed:
            return codec.decode(context.received(number).replace(statistics=statistics), payloads)

        def add(total: jax.Array, one: tuple[Any, Any]) -> tuple[jax.Array, None]:
            payload, measured = one
            received = context.received().replace(statistics=measured)
            return total + codec.decode(received, payload) / number, None

        return lax.scan(add, jnp.zeros(shape), (payloads, statistics))[0]

    statistics, payloads, statistics = prepare(gradients)
    first, encode_first = jax.block_until_ready(gradients[0]), jax.jit(encode)
    functions = {
        "encode": lambda: encode_first(jnp.int32(0), first, statistics),
        "decode": lambda: decode(payloads, statistics),
    }
    return CodecTime(**medians(functions, repetitions))


def time_codec(
    variant: SparseVariant, gradients: Mapping[str, jax.Array], repetitions: int
) -> CodecTime | None:
    """Times the codec of a method on one device; `None` if the method has no single codec.

    Args:
      variant: The method.
      gradients: The gradients of the sparse leaves, `[workers, ...]`, by path.
      repetitions: The number of timings.
    """
    make_codec = SPARSE_METHODS[variant.label].codec
    if make_codec is None:
        return None
    times = [
        _time_leaf(make_codec(variant.capacities[path]), gradient, repetitions)
        for path, gradient in gradients.items()
    ]
    return CodecTime(*map(sum, zip(*times, strict=True)))
