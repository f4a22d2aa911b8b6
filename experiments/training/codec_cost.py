"""The cost of the sparse leaves: their bytes, and the time of the codec."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import jaxcomm
from experiments.cli.errors import ExperimentError
from experiments.methods.sparse import SPARSE_METHODS, SparseVariant
from experiments.training.timing import medians


def count_sparse_bytes(
    variant: SparseVariant, leaves: Mapping[str, tuple[int, ...]], mesh: Mesh
) -> float:
    """The bytes that a worker sends in one step for the sparse leaves.

    Args:
      variant: The method.
      leaves: The shapes of the sparse leaves, by path.
      mesh: The workers.

    Raises:
      ExperimentError: If the method does not support the number of workers.
    """
    aggregator = variant.build(0)
    params = {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in leaves.items()}
    gradients = {
        path: jax.ShapeDtypeStruct((mesh.size, *shape), jnp.float32)
        for path, shape in leaves.items()
    }

    def on_worker(params: Any, state: Any, gradients: Any) -> Any:
        gradients = jax.tree.map(lambda x: x[0], gradients)
        return aggregator.update(gradients, state, params)[0]

    try:
        state = jax.eval_shape(lambda params: jaxcomm.init(aggregator, params, mesh), params)
        specs = PartitionSpec(), jaxcomm.state_specs(state), PartitionSpec("data")
        update = jax.shard_map(on_worker, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())
        return jaxcomm.wire.account(update, params, state, gradients).bytes_per_worker
    except ValueError as error:
        raise ExperimentError(str(error)) from error


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
