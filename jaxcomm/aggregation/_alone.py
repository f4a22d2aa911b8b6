"""A codec whose sender agrees with nobody: statistics travel with the payload."""

import jax

from jaxcomm._base import Codec, Coins, Memory, PyTree


def own_memory(codec: Codec, x: jax.Array, aggregator: str, knows: str) -> PyTree:
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


def observing_alone(codec: Codec) -> Codec:
    """The codec, of which nothing is told that is of all workers: their bitmaps are no union."""

    def observe(
        public: jax.Array, own: PyTree, x: jax.Array
    ) -> dict[str, tuple[jax.Array, jax.Array]]:
        seen = codec.observe(public, own, x)
        return {name: parts for name, parts in seen.items() if name != "union_density"}

    return codec._replace(observe=observe)


def encode_alone(
    codec: Codec, coins: Coins, own: PyTree, x: jax.Array
) -> tuple[tuple[PyTree, PyTree], PyTree]:
    """Payload and statistics, and what the worker then remembers."""
    memory = Memory(own, ())
    measured = codec.measure(coins, memory, x)
    payload, after = codec.encode(coins, memory, x, measured, 1)
    return (payload, measured), after.own
