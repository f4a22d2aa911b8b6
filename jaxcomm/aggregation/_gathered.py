"""The mean of codes that every worker has to decode by itself."""

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomm import _axis, _buckets
from jaxcomm._base import AxisName, Codec, Coins, Memory, PyTree
from jaxcomm._require import checked
from jaxcomm.aggregation._agreement import agree, all_finite, over_units, to_vector
from jaxcomm.aggregation._alone import observing_alone
from jaxcomm.aggregation._coded import Exchanged, coded_mean, require_own_statistics


def decoded_mean(
    codec: Codec, public: jax.Array, payloads: PyTree, statistics: PyTree, shape: tuple[int, ...]
) -> jax.Array:
    """The mean of payloads `[workers, ...]`, decoded and added in the workers' order."""
    workers = jax.tree.leaves(payloads)[0].shape[0]

    def add(total: jax.Array, one: tuple[PyTree, PyTree]) -> tuple[jax.Array, None]:
        payload, own = one
        # Divided before it is added: the sum of huge updates may overflow, their mean not.
        return total + codec.decode(public, payload, own, 1, 1, shape) / workers, None

    zeros = _axis.varying_like(jnp.zeros(shape, jnp.float32), (public, payloads, statistics))
    total, _ = lax.scan(add, zeros, (payloads, statistics))
    return total


def _to_words(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint32)


def _own_statistics(
    axis_name: AxisName, kinds: PyTree, measured: list[PyTree], finite: jax.Array
) -> tuple[list[PyTree], list[PyTree], jax.Array]:
    """This worker's statistics, those of all `[workers, ...]`, and whether all are finite."""
    del kinds
    statistics, treedef = jax.tree.flatten(measured)
    flag = jnp.where(finite, 0.0, 1.0).astype(jnp.float32)
    # As words, since some are packed bits.
    words, apart = to_vector([_to_words(x) for x in (*statistics, flag)])
    received = jax.vmap(apart)(_axis.gather(words, axis_name))
    *statistics, flags = (
        lax.bitcast_convert_type(x, like.dtype)
        for x, like in zip(received, (*statistics, flag), strict=True)
    )
    return measured, jax.tree.unflatten(treedef, statistics), jnp.all(flags == 0)


def _agreed_statistics(
    axis_name: AxisName, kinds: PyTree, measured: list[PyTree], finite: jax.Array
) -> tuple[list[PyTree], list[PyTree], jax.Array]:
    """The same, of statistics on which workers agree first."""
    common, all_are = agree(axis_name, kinds, measured, finite)
    workers = _axis.size(axis_name)
    of_all = jax.tree.map(lambda s: jnp.broadcast_to(s, (workers, *s.shape)), common)
    return common, of_all, all_are


@checked()
def gathered_mean(
    axis_name: AxisName,
    codec: Codec,
    *,
    agreed: bool = False,
    scope: _buckets.Scope | None = None,
    bucket_bytes: int | None = None,
    seed: int = 0,
    key: jax.Array | None = None,
    info: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Gathers every worker's payload, decodes each, and averages.

    .. math:: \bar x \approx \frac{1}{n} \sum_i \mathrm{decode}(\mathrm{encode}(x_i, a_i), a_i),
              \qquad a_i = \mathrm{measure}(x_i)

    Any codec will do, since workers need not agree. A worker sends :math:`n - 1` payloads (it
    passes on those of the others), so the saving shrinks with :math:`n`: against a float32
    all-reduce, one byte a coordinate saves nothing at :math:`n = 8`. Statistics of all units
    travel in one gather of words with one flag. Decoded one at a time, in the workers' order:
    replicas stay bit-equal, and memory does not grow with :math:`n` but for the payloads.

    Args:
      axis_name: The mesh axis, or axes, that number the workers.
      codec: Any codec.
      agreed: Whether workers agree on statistics first, as for :func:`summed_mean`, in place of
        sending each its own.
      scope: What shares a norm and is sent as one: `"leaf"`; `"bucket"`, leaves joined up to
        `bucket_bytes`; or `"tree"`, buckets that share the statistics of the whole tree. Default:
        what the codec asks for, `codec.scope`.
      bucket_bytes: The most float32 bytes joined in a bucket. Default: 32 MiB.
      seed: Seed of the randomness; may be traced.
      key: A typed threefry key, in place of `seed`.
      info: Whether the state's field `info` tells of the step: `compression_error`, `density`,
        `residual_norm`; see :func:`jaxcomm.global_qsgd`.

    Returns:
      A transformation to place before the optimizer. Updates come back equal on all workers, in
      their shape and dtype; a non-finite coordinate on any worker makes them NaN on all.
      `update(..., weight=w)` makes the mean a weighted one.

    Raises:
      ValueError: If an option is out of range; in `update`, if `axis_name` is not bound or an
        update is already summed.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxcomm.aggregation import gathered_mean
      >>> from jaxcomm.compression.quantizers import dither
      >>> tx = gathered_mean("data", dither(levels=1))
      >>> average = lambda x: tx.update(x, tx.init(x))[0]
      >>> print(jax.vmap(average, axis_name="data")(jnp.array([[3.0, 0.0], [0.0, 5.0]])))
      [[1.5 2.5]
       [1.5 2.5]]
    """

    def exchange(coins: list[Coins], memories: list[Memory], units: list[jax.Array]) -> Exchanged:
        measured = [*map(codec.measure, coins, memories, units)]
        if scope == "tree":
            measured = over_units(codec.agree, measured)
        share = _agreed_statistics if agreed else _own_statistics
        mine, theirs, finite = share(axis_name, codec.agree, measured, all_finite(units))
        means, after, sent, common = [], [], [], []
        for coin, memory, x, own, of_all in zip(coins, memories, units, mine, theirs, strict=True):
            payload, memory = codec.encode(coin, memory, x, own, 1)
            received = jax.tree.map(lambda words: _axis.gather(words, axis_name), payload)
            means.append(decoded_mean(codec, coin.public, received, of_all, x.shape))
            after.append(memory)
            common.append((coin.public, own))
            sent.append((coin.public, payload, own, 1, 1, x.shape))
        decoded = lambda: [codec.decode(*each) for each in sent]  # noqa: E731
        return Exchanged(means, after, finite, decoded, common)

    return coded_mean(
        axis_name,
        require_own_statistics(codec, "`agreed`=True") if agreed else observing_alone(codec),
        exchange,
        scope=scope,
        bucket_bytes=bucket_bytes,
        seed=seed,
        key=key,
        info=info,
    )
