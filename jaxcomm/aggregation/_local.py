"""Codecs with per-worker statistics, which travel with the payload."""

import jax

from jaxcomm._contract import Codec, Context, Diagnostics, Memory, PyTree


def local_memory(codec: Codec, x: jax.Array, aggregator: str, holders: str) -> PyTree:
    """The initial per-worker memory of a codec for `x`.

    Raises:
      ValueError: If the codec also has shared memory. The error says that in the `aggregator` only
        the `holders` would have it.
    """
    memory = codec.init(x)
    if jax.tree.leaves(memory.shared):
        raise ValueError(
            f"`{aggregator}` takes codecs whose memory is each worker's own, such as "
            "`error_feedback`. This codec also has memory that must be equal on all workers, but "
            f"only {holders} would update it. Use `all_gather_mean` for this codec."
        )
    return memory.own


def without_global_diagnostics(codec: Codec) -> Codec:
    """The codec without the metric `union_density`, since bitmaps are not reduced over workers."""

    def diagnose(context: Context, x: jax.Array, after: Memory) -> Diagnostics:
        metrics = codec.diagnose(context, x, after)
        local = {name: ratio for name, ratio in metrics.ratios.items() if name != "union_density"}
        return metrics._replace(ratios=local)

    return codec.replace(diagnose=diagnose)


def encode_local(
    codec: Codec, context: Context, x: jax.Array
) -> tuple[tuple[PyTree, PyTree], Memory]:
    """The payload and the statistics, and the memory after encoding."""
    measured = codec.measure(context, x)
    payload, after = codec.encode(context.replace(statistics=measured), x)
    return (payload, measured), after


def decode_local(codec: Codec, context: Context, content: tuple[PyTree, PyTree]) -> jax.Array:
    """Decodes the payload of one worker with its statistics."""
    payload, measured = content
    return codec.decode(context.received().replace(statistics=measured), payload)
