"""The mean in two stages: float32 sums between two coded exchanges."""

from collections.abc import Callable

import jax
import optax

from jaxcomm import _axis, _buckets
from jaxcomm._base import AxisName, Codec, Coins, Memory, PyTree
from jaxcomm.aggregation._agreement import agree, all_finite
from jaxcomm.aggregation._coded import Exchanged, coded_mean
from jaxcomm.aggregation._gathered import decoded_mean
from jaxcomm.aggregation._message import from_message, to_message
from jaxcomm.aggregation._rows import from_rows, to_rows


def _mean_of_rows(
    axis_name: AxisName, codec: Codec, coins: Coins, memory: Memory, rows: jax.Array
) -> tuple[jax.Array, Callable[[], jax.Array]]:
    """The mean over workers of `[workers, columns]`, in two stages, of which worker k owns row k.

    Beside it a function that decodes the rows that this worker has sent.
    """
    workers, columns = rows.shape

    def encode(coins: Coins, row: jax.Array) -> tuple[PyTree, PyTree]:
        own = codec.measure(coins, memory, row)
        return codec.encode(coins, memory, row, own, 1)[0], own

    def send(coins: Coins, row: jax.Array) -> jax.Array:
        return to_message(encode(coins, row))

    # Rows are encoded with coins of their own, and the owner's means with those of a row beyond.
    of_rows = Coins(*(jax.random.split(each, workers) for each in coins))
    of_means = Coins(*(jax.random.fold_in(each, workers) for each in coins))
    like = jax.eval_shape(encode, of_means, rows[0])
    receive = jax.vmap(lambda message: from_message(message, like))

    sent = jax.vmap(send)(of_rows, rows)
    public = of_rows.public[_axis.index(axis_name)]
    payloads, own = receive(_axis.exchange(sent, axis_name))
    owned = decoded_mean(codec, public, payloads, own, (columns,))

    payloads, own = receive(_axis.gather(send(of_means, owned), axis_name))

    def decode(public: jax.Array, payload: PyTree, own: PyTree) -> jax.Array:
        return codec.decode(public, payload, own, 1, 1, (columns,))

    return (
        jax.vmap(decode, in_axes=(None, 0, 0))(of_means.public, payloads, own),
        lambda: jax.vmap(decode)(of_rows.public, *receive(sent)),
    )


def two_stage_mean(
    axis_name: AxisName,
    codec: Codec,
    *,
    scope: _buckets.Scope = "bucket",
    bucket_bytes: int | None = None,
    seed: int = 0,
    key: jax.Array | None = None,
    info: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Encodes, exchanges rows, adds in float32, encodes the mean, and gathers it.

    .. math:: r_k = \frac{1}{n} \sum_i \mathrm{decode}(\mathrm{encode}(x_{i,k})), \qquad
              \bar x \approx (\mathrm{decode}(\mathrm{encode}(r_1)), \ldots,
              \mathrm{decode}(\mathrm{encode}(r_n)))

    Worker :math:`k` owns row :math:`k` of the vector. No sum of codes can overflow, any codec will
    do, and the bytes do not depend on :math:`n`: a worker sends :math:`2 (n-1)/n` payloads,
    statistics beside them in the same message of bytes, and one float32 flag. The price is a
    second rounding.

    Args:
      axis_name: The mesh axis, or axes, that number the workers.
      codec: A codec without memory; it encodes rows, each with its own statistics.
      scope: What is cut into rows: each `"leaf"`, or a `"bucket"` of leaves (`"tree"` likewise).
      bucket_bytes: The most float32 bytes joined in a bucket. Default: 32 MiB.
      seed: Seed of the randomness; may be traced.
      key: A typed threefry key, in place of `seed`.
      info: Whether the state's field `info` tells of the step: `compression_error`, `density`,
        `residual_norm`; see :func:`jaxcomm.global_qsgd`.

    Returns:
      A transformation to place before the optimizer, with the guarantees of
      :func:`jaxcomm.summed_mean`. Unbiased if the codec is.

    Raises:
      ValueError: If an option is out of range; in `init`, if the codec has memory; in `update`, if
        `axis_name` is not bound or an update is already summed.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxcomm.aggregation import two_stage_mean
      >>> from jaxcomm.compression.quantizers import dither
      >>> tx = two_stage_mean("data", dither(levels=1))
      >>> average = lambda x: tx.update(x, tx.init(x))[0]
      >>> print(jax.vmap(average, axis_name="data")(jnp.array([[3.0, 0.0], [1.0, 5.0]])))
      [[2.  2.5]
       [2.  2.5]]
    """

    def exchange(coins: list[Coins], memories: list[Memory], units: list[jax.Array]) -> Exchanged:
        workers = _axis.size(axis_name)
        _, finite = agree(axis_name, (), [()] * len(units), all_finite(units))
        means, sent = [], []
        for coin, memory, x in zip(coins, memories, units, strict=True):
            rows = to_rows(x, workers)
            mean, decode_own = (
                _mean_of_rows(axis_name, codec, coin, memory, rows) if x.size else (rows, None)
            )
            means.append(from_rows(mean, x.size).reshape(x.shape))
            sent.append((x, decode_own))
        return Exchanged(
            means,
            memories,
            finite,
            lambda: [
                from_rows(decode_own(), x.size).reshape(x.shape) if decode_own else x
                for x, decode_own in sent
            ],
        )

    def refuse_memory(x: jax.Array) -> Memory:
        memory = codec.init(x)
        if jax.tree.leaves(memory):
            raise ValueError("`two_stage_mean` takes codecs without memory.")
        return memory

    return coded_mean(
        axis_name,
        codec._replace(init=refuse_memory),
        exchange,
        scope=scope,
        bucket_bytes=bucket_bytes,
        seed=seed,
        key=key,
        info=info,
    )
