"""The loop that all feedback shares: it keeps an array and updates it from what was sent.

Only the codec can compute what *this* worker sent, so feedback is a function from codec to codec.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm._contract import Claims, Codec, Context, Diagnostics, Entries, Memory, PyTree
from jaxcomm._require import checked


class FeedbackMemory(NamedTuple):
    """`Memory.own` of a codec in a feedback loop."""

    kept: Any  # a residual, a shift, a momentum, ...
    inner: PyTree  # the `Memory.own` of the inner codec


def _inner_memory(memory: Memory) -> Memory:
    return memory._replace(own=memory.own.inner)


def _inner_context(context: Context) -> Context:
    return context.replace(memory=_inner_memory(context.memory))


def _as_sent(words: jax.Array) -> jax.Array:
    """`words`; a barrier keeps XLA on GPU from removing the rounding to a narrower float."""
    narrow = jnp.issubdtype(words.dtype, jnp.floating) and words.dtype.itemsize < 4
    return lax.optimization_barrier(words) if narrow else words


def _keep_at(
    updated: Callable[[Any, jax.Array, jax.Array], Any], before: Any, x: jax.Array, sent: Entries
) -> Any:
    """Applies an elementwise `updated` to a `sent` that is zero except at the entries."""
    indices, values = sent
    before_at, x_at = jax.tree.map(
        lambda whole: whole.ravel().at[indices].get(mode="clip"), (before, x)
    )
    return jax.tree.map(
        lambda kept, kept_at: kept.ravel().at[indices].set(kept_at, mode="drop").reshape(x.shape),
        updated(before, x, jnp.zeros_like(x)),
        updated(before_at, x_at, values.astype(x.dtype)),
    )


@checked
def feedback_loop(
    codec: Codec,
    *,
    initial: Callable[[jax.Array], Any],
    corrected: Callable[[Any, jax.Array], jax.Array],
    updated: Callable[[Any, jax.Array, jax.Array], Any],
    require: Callable[[int, int], None] = lambda size, workers: None,
    compensates: bool = False,
    elementwise: bool = False,
    coefficient: float | jax.Array | None = None,
    is_residual: bool = False,
) -> Codec:
    r"""Compresses a corrected input, and updates the memory that corrects the next one.

    .. math:: y = \mathrm{corrected}(s, x), \qquad s \gets \mathrm{updated}(s, x, Q(y))

    :func:`error_feedback`, :func:`ef21` and others are built on it. Sends the same payload as
    `codec`.

    Args:
      codec: The inner codec.
      initial: `x -> s`, the initial memory for an array like `x`.
      corrected: `(s, x) -> y`, the input of the codec.
      updated: `(s, x, sent) -> s`. `sent` is what receivers decode from this worker's payload.
      require: `(size, workers) -> None`, raises if the codec is unsuitable.
      compensates: Whether a later step sends what this step omits. The codec may then drop what
        exceeds its capacity.
      elementwise: Whether each coordinate of `s` depends on the same coordinate only. If the codec
        decodes to few nonzeros, the loop then updates only these coordinates from `sent`.
      coefficient: The number c, if `corrected(s, x)` is `x + c * s` with an array `s`. A linear
        codec then encodes `x` and `s` separately, and their sum is not written to memory.
      is_residual: Whether `updated(s, x, sent)` is `x + s - sent`, in the dtype of `s`. A codec
        that encodes and subtracts in one pass over memory then does so.

    Returns:
      A codec that also keeps `s` on each worker. It states no bound on its error.

    Raises:
      ValueError: When encoding, if `require` raises it.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.feedback._loop import feedback_loop
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

    def looped(codec: Codec) -> Codec:
        def init(x: jax.Array) -> Memory:
            memory = codec.init(x)
            return memory._replace(own=FeedbackMemory(initial(x), memory.own))

        def by_terms(
            function: Callable[[Context, jax.Array], PyTree], context: Context, s: Any, x: jax.Array
        ) -> PyTree:
            """`function(context, x + coefficient * s)` of a linear function."""
            of_x, of_s = function(context, x), function(context, s.astype(x.dtype))
            return jax.tree.map(lambda a, b: a + jnp.asarray(coefficient, b.dtype) * b, of_x, of_s)

        def measure(context: Context, x: jax.Array) -> PyTree:
            s, inner = context.memory.own.kept, _inner_context(context)
            if coefficient is not None and "measure" in codec.fast.linear:
                return by_terms(codec.measure, inner, s, x)
            return codec.measure(inner, corrected(s, x))

        def encode(context: Context, x: jax.Array) -> tuple[PyTree, Memory]:
            require(context.size, context.workers)
            before, inner = context.memory.own.kept, _inner_context(context)
            with_residual = is_residual and x.dtype == jnp.float32 and codec.fast.with_residual
            if with_residual and before.dtype in (jnp.float32, jnp.bfloat16):
                payload, after, kept = with_residual(inner, x, before, 1.0)
                return payload, after._replace(own=FeedbackMemory(kept, after.own))
            is_by_terms = coefficient is not None and "encode" in codec.fast.linear
            if is_by_terms:
                payload = by_terms(lambda *args: codec.encode(*args)[0], inner, before, x)
                after = inner.memory
            else:
                payload, after = codec.encode(inner, corrected(before, x))
            received = context.received(), jax.tree.map(_as_sent, payload)
            entries = codec.fast.entries if elementwise else None
            if entries is None:
                # Computes the corrected input again. Otherwise it occupies memory until the
                # collective finite check completes.
                before, x = lax.optimization_barrier((before, x))
                kept = updated(before, x, codec.decode(*received).astype(x.dtype))
                if is_by_terms:
                    # The payload can be finite even if the sum of the terms overflows.
                    kept = jnp.where(kept - kept == 0, kept, before)
            else:
                kept = _keep_at(updated, before, x, entries(*received))
            return payload, after._replace(own=FeedbackMemory(kept, after.own))

        def finalize(
            context: Context, payload: PyTree, mean: jax.Array
        ) -> tuple[jax.Array, Memory]:
            update, after = codec.finalize(_inner_context(context), payload, mean)
            kept = context.memory.own.kept
            return update, after._replace(own=FeedbackMemory(kept, after.own))

        def diagnose(context: Context, x: jax.Array, after: Memory) -> Diagnostics:
            y = corrected(context.memory.own.kept, x)
            return codec.diagnose(_inner_context(context), y, _inner_memory(after))

        return codec.replace(
            init=init,
            measure=measure,
            encode=encode,
            finalize=finalize,
            diagnose=diagnose,
            claims=Claims(),
            drop_overflow=codec.drop_overflow and looped(codec.drop_overflow),
            # The same payload; decoding is that of the codec.
            fast=codec.fast._replace(
                linear=(), with_residual=None, selection=None, integers=None, bits=None
            ),
        )

    return looped((codec.drop_overflow if compensates else None) or codec)
