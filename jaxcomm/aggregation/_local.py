"""A codec whose sender agrees with nobody: statistics travel with the payload."""

import jax

from jaxcomm._base import Codec, Context, Diagnostics, Memory, PyTree


def local_memory(codec: Codec, x: jax.Array, aggregator: str, knows: str) -> PyTree:
    """What a worker remembers of `x`.

    Raises:
      ValueError: If the codec also has memory that all workers share, of which `knows` says who
        alone would know it in the `aggregator`.
    """
    memory = codec.init(x)
    if jax.tree.leaves(memory.shared):
        raise ValueError(
            f"`{aggregator}` takes codecs whose memory is each worker's own, such as "
            f"`error_feedback`: what this one shares, only {knows} would know."
        )
    return memory.own


def without_global_diagnostics(codec: Codec) -> Codec:
    """The codec, of which nothing is told that is of all workers: their bitmaps are no union."""

    def diagnose(context: Context, x: jax.Array, after: Memory) -> Diagnostics:
        told = codec.diagnose(context, x, after)
        own = {name: ratio for name, ratio in told.ratios.items() if name != "union_density"}
        return told._replace(ratios=own)

    return codec._replace(diagnose=diagnose)


def encode_local(
    codec: Codec, context: Context, x: jax.Array
) -> tuple[tuple[PyTree, PyTree], Memory]:
    """Payload and statistics, and what the worker then remembers."""
    measured = codec.measure(context, x)
    payload, after = codec.encode(context.replace(statistics=measured), x)
    return (payload, measured), after


def decode_local(codec: Codec, context: Context, content: tuple[PyTree, PyTree]) -> jax.Array:
    """What one worker's payload and statistics decode to."""
    payload, measured = content
    return codec.decode(context.received().replace(statistics=measured), payload)
