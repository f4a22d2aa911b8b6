"""The mean of codes that are merged pairwise, in a tree."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from jaxcomm import _axis, _buckets
from jaxcomm._base import AxisName, Codec, Coins, PyTree
from jaxcomm._require import checked
from jaxcomm.aggregation._coded import coded_mean
from jaxcomm.aggregation._joined import join_payloads
from jaxcomm.aggregation._rows import from_rows, to_rows


def _tree(
    merge: Callable[[Coins, PyTree, PyTree], PyTree], coins: Coins, payloads: PyTree, count: int
) -> PyTree:
    """Merges `[count, ...]` payloads pairwise, in the workers' order, until one is left."""
    for depth in range((count - 1).bit_length()):
        pairs, odd = count // 2, count % 2
        first = jax.tree.map(lambda x, n=pairs: x[0 : 2 * n : 2], payloads)
        second = jax.tree.map(lambda x, n=pairs: x[1 : 2 * n : 2], payloads)
        # Counted down: from 0 up, these would be the keys that a codec of blocks splits off.
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
def merged_mean(
    axis_name: AxisName,
    codec: Codec,
    *,
    scope: _buckets.Scope | None = None,
    bucket_bytes: int | None = None,
    seed: int = 0,
    key: jax.Array | None = None,
    info: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Agrees on statistics, merges the codes of all workers pairwise, and decodes the result once.

    Each worker owns a row of the vector: it receives that row's codes of all workers (all-to-all),
    merges them in a tree of depth :math:`\lceil \log_2 n \rceil`, and sends the result to all
    (all-gather). The bytes are those of recursive halving, :math:`2 (n-1)/n` payloads, at any
    :math:`n`; codes that are re-rounded as they are added lose least in a tree.

    Args:
      axis_name: The mesh axis, or axes, that number the workers.
      codec: A codec whose `combine` is a function and whose payload has one entry a coordinate.
      scope: What shares a norm: a `"leaf"`, a `"bucket"` of leaves, or the whole `"tree"`. Default:
        what the codec asks for, `codec.scope`.
      bucket_bytes: The most float32 bytes joined in a bucket. Default: 32 MiB.
      seed: Seed of the randomness; may be traced.
      key: A typed threefry key, in place of `seed`.
      info: Whether the state's field `info` tells of the step: `compression_error`, `density`,
        `residual_norm`; see :func:`jaxcomm.global_qsgd`.

    Returns:
      A transformation to place before the optimizer, with the guarantees of
      :func:`jaxcomm.summed_mean`.

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
            f"`combine`={merge!r}. Use `summed_mean` or `gathered_mean`."
        )

    def merge_rows(coins: Coins, payload: PyTree) -> PyTree:
        workers = _axis.size(axis_name)
        rows = jax.tree.map(lambda codes: to_rows(codes, workers), payload)
        mine = jax.tree.map(lambda rows: _axis.exchange(rows, axis_name), rows)
        return jax.tree.map(
            lambda row, codes: from_rows(_axis.gather(row, axis_name), codes.size).reshape(
                codes.shape
            ),
            _tree(merge, coins, mine, workers),
            payload,
        )

    return coded_mean(
        axis_name,
        codec,
        join_payloads(axis_name, codec, merge_rows, scope),
        scope=scope,
        bucket_bytes=bucket_bytes,
        seed=seed,
        key=key,
        info=info,
    )
