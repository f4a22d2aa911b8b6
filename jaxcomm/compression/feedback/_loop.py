"""What all feedback has in common: an array is kept beside the codec, and what was sent changes it.

Only the codec knows what *this* worker sent, so feedback is a function from codec to codec.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm._base import Codec, Coins, Memory, PyTree


class FeedbackMemory(NamedTuple):
    """`Memory.own` of a codec in a feedback loop."""

    kept: Any  # a residual, a shift, a momentum, ...
    inner: PyTree  # the `Memory.own` of the codec inside


def _inner(memory: Memory) -> Memory:
    return Memory(memory.own.inner, memory.shared)


def _as_sent(words: jax.Array) -> jax.Array:
    """The same; XLA on GPU would leave a float's way to a narrower one and back out."""
    narrow = jnp.issubdtype(words.dtype, jnp.floating) and words.dtype.itemsize < 4
    return lax.optimization_barrier(words) if narrow else words


def feedback_loop(
    codec: Codec,
    *,
    start: Callable[[jax.Array], Any],
    given: Callable[[Any, jax.Array], jax.Array],
    keep: Callable[[Any, jax.Array, jax.Array], Any],
    require: Callable[[int, int], None] = lambda size, workers: None,
    returns: bool = False,
) -> Codec:
    r"""Hands :math:`y = \mathrm{given}(s, x)` to the codec; then :math:`s \gets \mathrm{keep}`.

    What :func:`error_feedback`, :func:`ef21` and others are made of. Sends what `codec` sends.

    Args:
      codec: The codec inside.
      start: `x -> s`, what is kept before the first step, of an array like `x`.
      given: `(s, x) -> y`, what the codec is given.
      keep: `(s, x, sent) -> s`, `sent` being what others decode of this worker's payload.
      require: `(size, workers)`, raises where the codec will not do.
      returns: Whether what the codec leaves out comes back. It may then drop what finds no room.

    Returns:
      A codec with one more memory of each worker's own. It claims no bound on its error.

    Raises:
      ValueError: When encoding, whatever `require` raises.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxcomm import Coins
      >>> from jaxcomm.compression.feedback import feedback_loop
      >>> from jaxcomm.compression.sparsifiers import top_k
      >>> codec = feedback_loop(  # error_feedback
      ...     top_k(k=1),
      ...     start=jnp.zeros_like,
      ...     given=lambda residual, x: x + residual,
      ...     keep=lambda residual, x, sent: x + residual - sent,
      ... )
      >>> coins, x = Coins(jax.random.key(0), jax.random.key(1)), jnp.array([3.0, 1.0])
      >>> payload, memory = codec.encode(coins, codec.init(x), x, (), 1)
      >>> print(memory.own.kept)
      [0. 1.]
    """
    if returns:
        codec = codec.dropping or codec

    def init(x: jax.Array) -> Memory:
        memory = codec.init(x)
        return Memory(FeedbackMemory(start(x), memory.own), memory.shared)

    def measure(coins: Coins, memory: Memory, x: jax.Array) -> PyTree:
        return codec.measure(coins, _inner(memory), given(memory.own.kept, x))

    def encode(
        coins: Coins, memory: Memory, x: jax.Array, agreed: PyTree, workers: int
    ) -> tuple[PyTree, Memory]:
        require(x.size, workers)
        y = given(memory.own.kept, x)
        payload, after = codec.encode(coins, _inner(memory), y, agreed, workers)
        words = jax.tree.map(_as_sent, payload)
        sent = codec.decode(coins.public, words, agreed, workers, 1, y.shape)
        kept = keep(memory.own.kept, x, sent.astype(y.dtype))
        return payload, Memory(FeedbackMemory(kept, after.own), after.shared)

    def settle(memory: Memory, mean: jax.Array) -> tuple[jax.Array, Memory]:
        update, after = codec.settle(_inner(memory), mean)
        return update, Memory(FeedbackMemory(memory.own.kept, after.own), after.shared)

    return codec._replace(
        init=init,
        measure=measure,
        encode=encode,
        settle=settle,
        target=lambda memory, x: codec.target(_inner(memory), given(memory.own.kept, x)),
        tell=lambda memory: codec.tell(_inner(memory)),
        variance=None,
        contraction=None,
        bounded=False,
        dropping=codec.dropping
        and feedback_loop(codec.dropping, start=start, given=given, keep=keep, require=require),
    )
