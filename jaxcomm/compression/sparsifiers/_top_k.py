"""Sends the coordinates of largest magnitude."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm._contract import Claims, Codec, Context, Entries, Fast, Memory, scattered
from jaxcomm.compression._bits import require_countable
from jaxcomm.compression.sparsifiers._indices import (
    IndexCode,
    Selection,
    choose_layout,
    integers_of_indices,
    unpack_indices,
)
from jaxcomm.compression.sparsifiers._largest import largest
from jaxcomm.compression.sparsifiers._selection import places
from jaxcomm.compression.sparsifiers._sparse import (
    SparsePayload,
    make_count,
    require_value_dtype,
    to_payload,
)


def _by_sample(magnitudes: jax.Array, count: int, sample: float) -> jax.Array:
    """The `count` largest, or at least half as many of them, by a threshold from a sample.

    If too few or too many coordinates reach the threshold, the selection is exact.
    """
    size = magnitudes.size
    stride = max(int(1 / sample), 1)
    sampled = magnitudes[::stride]
    threshold = lax.top_k(sampled, max(min(round(count / stride), sampled.size), 1))[0][-1]
    above = (magnitudes >= threshold) & (magnitudes > 0)
    passed = jnp.sum(above, dtype=jnp.int32)
    room = min(2 * count, size)

    def among_those_above() -> jax.Array:
        found = places(above, room)
        _, best = lax.top_k(magnitudes.at[found].get(mode="fill", fill_value=-1), count)
        # Unused entries have the index `size`, which sorts last.
        return jnp.sort(found[best]).astype(jnp.uint32)

    close = (passed >= count // 2) & (passed >= 1) & (passed <= room)
    return lax.cond(close, among_those_above, lambda: largest(magnitudes, count))


def top_k(
    *,
    ratio: float | None = None,
    k: int | None = None,
    block_size: int | None = None,
    sample_ratio: float | None = None,
    value_dtype: Any = jnp.float32,
) -> Codec:
    r"""Sends the :math:`k` coordinates of largest magnitude.

    .. math:: C(x)_j = \begin{cases} x_j & j \in \mathrm{top}_k |x| \\ 0 & \text{otherwise}
              \end{cases}, \qquad \|C(x) - x\|^2 \le \Big(1 - \frac{k}{d}\Big) \|x\|^2

    Biased: use it inside :func:`jaxcomm.compression.feedback.error_feedback`. Payloads of different
    workers contain different coordinates, so they are gathered. An index takes about :math:`2 +
    \log_2 (d / k)` bits (8.6 at 1 %), and a value takes 32 or 16.

    Args:
      ratio: :math:`k / d`, in (0, 1]; at least one coordinate is sent.
      k: The number of coordinates, instead of `ratio`.
      block_size: Coordinates of a block. Each block sends its own :math:`k`; the last block is
        padded with zeros. Default: one block.
      sample_ratio: The fraction of the coordinates, such as 0.01, from which a threshold is
        estimated. This takes one pass instead of a sort (Lin et al., 2018). It sends between
        :math:`k / 2` and :math:`k` coordinates. If the estimated number is off by more than a
        factor of 2, it selects exactly the :math:`k` largest.
      value_dtype: float32, or bfloat16; feedback compensates its rounding.

    Returns:
      A codec that states its `contraction`. `combine` is `None`. Its derivative is that of the sent
      values, for the selection that it made.

    Raises:
      ValueError: If an option is out of range, or both `block_size` and `sample_ratio` are set.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.sparsifiers import top_k
      >>> codec, x = top_k(k=2), jnp.array([1.0, -4.0, 0.5, 2.0])
      >>> payload, _ = codec.encode(Context.of(x), x)
      >>> print(codec.decode(Context.of(x), payload))
      [ 0. -4.  0.  2.]

    References:
      Aji and Heafield, `Sparse Communication for Distributed Gradient Descent
      <https://arxiv.org/abs/1704.05021>`_, 2017.
      Stich et al., `Sparsified SGD with Memory <https://arxiv.org/abs/1809.07599>`_, 2018.
    """
    kept, dtype = make_count(ratio, k), require_value_dtype(value_dtype)
    if block_size is not None and (not isinstance(block_size, int) or block_size < 1):
        raise ValueError(f"`block_size` must be a Python int of at least 1, got {block_size!r}.")
    if sample_ratio is not None and (block_size is not None or not 0 < sample_ratio <= 1):
        raise ValueError(
            "`sample_ratio` must be in (0, 1] and cannot be combined with `block_size`, got "
            f"`sample_ratio`={sample_ratio} and `block_size`={block_size}."
        )

    def blocks_of(size: int) -> tuple[int, int]:
        """The number of blocks, and the size of each."""
        width = min(block_size or size, require_countable(size))
        return (math.ceil(size / width), width) if size else (1, 0)

    def layout_of(size: int) -> IndexCode:
        blocks, width = blocks_of(size)
        count = blocks * kept(width)
        # With `sample_ratio` an unused entry has the index `size`, one past the last coordinate.
        return choose_layout(
            count,
            blocks * width + (sample_ratio is not None),
            block=width if blocks > 1 else None,
            distinct=sample_ratio is None,
        )

    def choose(flat: jax.Array) -> jax.Array:
        blocks, width = blocks_of(flat.size)
        if sample_ratio is not None and flat.size:
            return _by_sample(jnp.abs(flat), kept(flat.size), sample_ratio)
        filled = jnp.pad(flat, (0, blocks * width - flat.size)).reshape(blocks, width)
        first = jnp.arange(blocks, dtype=jnp.uint32)[:, None] * jnp.uint32(width)
        return (largest(filled, kept(width), jnp.abs) + first).ravel()

    def encode(context: Context, x: jax.Array) -> tuple[SparsePayload, Memory]:
        # Otherwise XLA computes it again, in another layout, for each use in the selection.
        flat = lax.optimization_barrier(x.ravel())
        return to_payload(flat, choose(flat), layout_of(x.size), dtype), context.memory

    def entries(context: Context, payload: SparsePayload) -> Entries:
        layout = layout_of(math.prod(context.shape))
        values = payload.values.astype(jnp.float32) / context.count
        return Entries(unpack_indices(payload.indices, layout), values)

    def contraction(size: int, workers: int) -> float:
        _, width = blocks_of(size)
        least = kept(width) if sample_ratio is None else max(kept(width) // 2, 1)
        # A bfloat16 keeps 8 bits of each value.
        return least / width * (1 - 2.0**-16 if dtype == jnp.bfloat16 else 1)

    are_distinct = block_size is None and sample_ratio is None
    return Codec(
        encode=encode,
        decode=scattered(entries),
        claims=Claims(contraction=contraction),
        fast=Fast(
            entries=entries,
            integers=integers_of_indices(kept, layout_of) if are_distinct else None,
            selection=Selection(
                choose=lambda public, flat: choose(flat),
                layout=layout_of,
                drawn=False,
                value_dtype=dtype,
            ),
        ),
    )
