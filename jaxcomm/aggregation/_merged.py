"""The mean of payloads that are merged pairwise, in a tree."""

from collections.abc import Callable
from typing import Unpack

import jax
import jax.numpy as jnp
import optax

from jaxcomm import _axis
from jaxcomm._collectives import exchange_rows, gather_contents
from jaxcomm._contract import AxisName, Codec, Coins, PyTree
from jaxcomm._require import checked, combine_of
from jaxcomm.aggregation._coded import coded_mean
from jaxcomm.aggregation._combined import combine_payloads
from jaxcomm.aggregation._exchange import Part
from jaxcomm.aggregation._options import AggregatorOptions, takes_options
from jaxcomm.aggregation._rows import from_rows, to_rows


def _tree(
    merge: Callable[[Coins, PyTree, PyTree], PyTree], coins: Coins, payloads: PyTree, count: int
) -> PyTree:
    """Merges `[count, ...]` payloads pairwise, in worker order, to one payload."""
    for depth in range((count - 1).bit_length()):
        pairs, odd = count // 2, count % 2
        first = jax.tree.map(lambda x, n=pairs: x[0 : 2 * n : 2], payloads)
        second = jax.tree.map(lambda x, n=pairs: x[1 : 2 * n : 2], payloads)
        # Counts down: from 0 up, these would be the keys that a blockwise codec splits off.
        drawn = Coins(coins.public, jax.random.fold_in(coins.private, 2**32 - 1 - depth))
        merged = merge(drawn, first, second)
        payloads = jax.tree.map(
            lambda new, x, n=odd: jnp.concatenate([new, x[-1:]]) if n else new,
            merged,
            payloads,
        )
        count = pairs + odd
    return jax.tree.map(lambda x: x[0], payloads)


@checked()
@takes_options
def merged_mean(
    axis_name: AxisName,
    codec: Codec,
    **options: Unpack[AggregatorOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""Reduces statistics, merges the payloads of all workers pairwise, and decodes once.

    Each worker owns a row of the vector. It receives the payloads of this row from all workers
    (all-to-all), merges them in a tree of depth :math:`\lceil \log_2 n \rceil`, and sends the
    result to all workers (all-gather). A worker sends :math:`2 (n-1)/n` payloads for any :math:`n`,
    as in recursive halving. If each merge rounds again, a tree has the smallest error.

    Args:
      axis_name: The mesh axis, or axes, of the workers.
      codec: A codec whose `combine` is a function and whose payload has one entry per coordinate.
      **options: See :class:`jaxcomm.aggregation.AggregatorOptions`.

    Returns:
      A transformation to place before the optimizer, with the guarantees of
      :func:`jaxcomm.all_reduce_mean`.

    Raises:
      ValueError: If the codec's payloads cannot be merged, or an option is out of range; in
        `update`, if `axis_name` is not bound or an update is already summed.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxcomm.aggregation import merged_mean
      >>> from jaxcomm.compression.quantizers import exponential_dither
      >>> tx = merged_mean("data", exponential_dither())
      >>> average = jax.vmap(lambda x: tx.update(x, tx.init(x))[0], axis_name="data")
      >>> print(jax.jit(average)(jnp.array([[4.0, 0.0], [4.0, 2.0]])))
      [[4. 1.]
       [4. 1.]]
    """
    merge = codec.combine
    if not callable(merge):
        raise ValueError(
            "`merged_mean` needs a codec whose payloads can be merged (`combine` a function), got "
            f"{combine_of(codec)}. Use `all_reduce_mean` or `all_gather_mean`."
        )

    def merge_rows(parts: list[Part], payloads: list[PyTree]) -> list[PyTree]:
        workers = _axis.size(axis_name)
        rows = jax.tree.map(lambda codes: to_rows(codes, workers), payloads)
        mine = exchange_rows(axis_name, rows)
        merged = [
            _tree(merge, part.context.coins, codes, workers)
            for part, codes in zip(parts, mine, strict=True)
        ]
        merged_rows = gather_contents(axis_name, merged)
        return jax.tree.map(
            lambda rows, codes: from_rows(rows, codes.size).reshape(codes.shape),
            merged_rows,
            payloads,
        )

    return coded_mean(axis_name, codec, combine_payloads(axis_name, codec, merge_rows), options)
