"""What all feedback has in common: an array is kept beside the codec, and what was sent changes it.

Only the codec knows what *this* worker sent, so feedback is a function from codec to codec.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm._base import Claims, Codec, Context, Diagnostics, Memory, PyTree
from jaxcomm._entries import Entries, entries_of


class FeedbackMemory(NamedTuple):
    """`Memory.own` of a codec in a feedback loop."""

    kept: Any  # a residual, a shift, a momentum, ...
    inner: PyTree  # the `Memory.own` of the codec inside


def _inner(memory: Memory) -> Memory:
    return Memory(memory.own.inner, memory.shared)


def _inside(context: Context) -> Context:
    return context.replace(memory=_inner(context.memory))


def _as_sent(words: jax.Array) -> jax.Array:
    """The same; XLA on GPU would leave a float's way to a narrower one and back out."""
    narrow = jnp.issubdtype(words.dtype, jnp.floating) and words.dtype.itemsize < 4
    return lax.optimization_barrier(words) if narrow else words


def _keep_at(
    updated: Callable[[Any, jax.Array, jax.Array], Any],
    before: Any,
    x: jax.Array,
    sent: Entries,
) -> Any:
    """`updated`, coordinate by coordinate, as of nothing sent but at the entries."""
    indices, values = sent
    before_there, x_there = jax.tree.map(
        lambda whole: whole.ravel().at[indices].get(mode="clip"), (before, x)
    )
    return jax.tree.map(
        lambda kept, here: kept.ravel().at[indices].set(here, mode="drop").reshape(x.shape),
        updated(before, x, jnp.zeros_like(x)),
        updated(before_there, x_there, values.astype(x.dtype)),
    )


def feedback_loop(
    codec: Codec,
    *,
    initial: Callable[[jax.Array], Any],
    corrected: Callable[[Any, jax.Array], jax.Array],
    updated: Callable[[Any, jax.Array, jax.Array], Any],
    require: Callable[[int, int], None] = lambda size, workers: None,
    compensates: bool = False,
    elementwise: bool = False,
) -> Codec:
    r"""Compresses a corrected input, and updates the memory that corrects the next one.

    .. math:: y = \mathrm{corrected}(s, x), \qquad s \gets \mathrm{updated}(s, x, Q(y))

    What :func:`error_feedback`, :func:`ef21` and others are made of. Sends what `codec` sends.

    Args:
      codec: The codec inside.
      initial: `x -> s`, what is kept before the first step, of an array like `x`.
      corrected: `(s, x) -> y`, what the codec is given.
      updated: `(s, x, sent) -> s`, `sent` being what others decode of this worker's payload.
      require: `(size, workers)`, raises where the codec will not do.
      compensates: Whether a later step sends what this one omits. It may then drop what finds no
        room.
      elementwise: Whether a coordinate of what is kept depends on the same coordinate alone. Of a
        codec that decodes to few values among zeros, only these are then touched.

    Returns:
      A codec with one more memory of each worker's own. It claims no bound on its error.

    Raises:
      ValueError: When encoding, whatever `require` raises.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.feedback import feedback_loop
      >>> from jaxcomm.compression.sparsifiers import top_k
      >>> codec = feedback_loop(  # error_feedback
      ...     top_k(k=1),
      ...     initial=jnp.zeros_like,
      ...     corrected=lambda residual, x: x + residual,
      ...     updated=lambda residual, x, sent: x + residual - sent,
      ... )
      >>> x = jnp.array([3.0, 1.0])
      >>> payload, memory = codec.encode(Context.of(x, memory=codec.init(x)), x)
      >>> print(memory.own.kept)
      [0. 1.]
    """
    if compensates:
        codec = codec.drop_overflow or codec

    def init(x: jax.Array) -> Memory:
        memory = codec.init(x)
        return Memory(FeedbackMemory(initial(x), memory.own), memory.shared)

    def measure(context: Context, x: jax.Array) -> PyTree:
        return codec.measure(_inside(context), corrected(context.memory.own.kept, x))

    def encode(context: Context, x: jax.Array) -> tuple[PyTree, Memory]:
        require(context.size, context.workers)
        before = context.memory.own.kept
        y = corrected(before, x)
        payload, after = codec.encode(_inside(context), y)
        received = context.received(), jax.tree.map(_as_sent, payload)
        entries = entries_of(codec) if elementwise else None
        if entries is None:
            # Worked out anew from what is there anyway: `y` would lie in memory until workers have
            # told each other whether all is finite.
            before, x = lax.optimization_barrier((before, x))
            kept = updated(before, x, codec.decode(*received).astype(y.dtype))
        else:
            kept = _keep_at(updated, before, x, entries(*received))
        return payload, Memory(FeedbackMemory(kept, after.own), after.shared)

    def finalize(context: Context, payload: PyTree, mean: jax.Array) -> tuple[jax.Array, Memory]:
        update, after = codec.finalize(_inside(context), payload, mean)
        kept = context.memory.own.kept
        return update, Memory(FeedbackMemory(kept, after.own), after.shared)

    def diagnose(context: Context, x: jax.Array, after: Memory) -> Diagnostics:
        y = corrected(context.memory.own.kept, x)
        return codec.diagnose(_inside(context), y, _inner(after))

    return codec._replace(
        init=init,
        measure=measure,
        encode=encode,
        finalize=finalize,
        diagnose=diagnose,
        claims=Claims(),
        drop_overflow=codec.drop_overflow
        and feedback_loop(
            codec.drop_overflow,
            initial=initial,
            corrected=corrected,
            updated=updated,
            require=require,
            elementwise=elementwise,
        ),
    )
