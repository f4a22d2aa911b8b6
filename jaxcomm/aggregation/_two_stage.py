"""The mean in two stages: float32 sums between two coded exchanges."""

import functools
from collections.abc import Callable
from typing import NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from jaxcomm import _axis, _buckets
from jaxcomm._base import AxisName, Codec, Coins, Memory, PyTree, settled
from jaxcomm._message import from_message, to_message
from jaxcomm._require import checked
from jaxcomm.aggregation._agreement import agree, all_finite, nan_unless_all_fit
from jaxcomm.aggregation._alone import encode_alone, observing_alone, own_memory
from jaxcomm.aggregation._coded import Exchanged, coded_mean
from jaxcomm.aggregation._gathered import decoded_mean
from jaxcomm.aggregation._info import Observations, add_observations
from jaxcomm.aggregation._rows import CUTS, Cut, Ownership


class TwoStageMemory(NamedTuple):
    """What a worker remembers of one unit: feedback at both ends."""

    sent: PyTree  # of the rows that it sends, [workers, ...]
    mean: PyTree  # of the mean of the row that it owns


class TwoStageStatistics(NamedTuple):
    """What is known of one unit beside its payloads, for `info`."""

    row_coins: jax.Array  # key[workers], public
    rows: PyTree  # the statistics of the rows that a worker sends, [workers, ...]
    mean_coin: jax.Array  # key[], public
    means: PyTree  # the statistics of the means of all owners, [workers, ...]


def _send(codec: Codec, coins: Coins, own: PyTree, row: jax.Array) -> tuple[jax.Array, PyTree]:
    content, after = encode_alone(codec, coins, own, row)
    return to_message(content), after


def _receiver(
    codec: Codec, coins: Coins, own: PyTree, row: jax.Array
) -> Callable[[jax.Array], tuple[PyTree, PyTree]]:
    """From messages, [workers, bytes], to the payloads and statistics that they hold."""
    like, _ = jax.eval_shape(functools.partial(encode_alone, codec), coins, own, row)
    return jax.vmap(lambda message: from_message(message, like))


def _mean_of_rows(
    axis_name: AxisName,
    codec: Codec,
    mean_codec: Codec,
    coins: Coins,
    memory: TwoStageMemory,
    rows: jax.Array,
) -> tuple[jax.Array, TwoStageMemory, jax.Array, Callable[[], jax.Array], TwoStageStatistics]:
    """The mean over workers of `[workers, ...]`, in two stages, of which worker k owns row k.

    Beside it what is remembered, the row that this worker owns before it is encoded again, a
    function that decodes the rows that this worker has sent, and all statistics.
    """
    workers, shape = rows.shape[0], rows.shape[1:]
    # Rows are encoded with coins of their own, and the owner's means with those of a row beyond.
    of_rows = Coins(*(jax.random.split(each, workers) for each in coins))
    of_means = Coins(*(jax.random.fold_in(each, workers) for each in coins))
    first = jax.tree.map(lambda x: x[0], memory.sent)
    receive = _receiver(codec, of_means, first, rows[0])
    receive_means = _receiver(mean_codec, of_means, memory.mean, rows[0])

    sent, sent_memory = jax.vmap(functools.partial(_send, codec))(of_rows, memory.sent, rows)
    public = of_rows.public[_axis.index(axis_name)]
    owned = decoded_mean(codec, public, *receive(_axis.exchange(sent, axis_name)), shape)
    message, mean_memory = _send(mean_codec, of_means, memory.mean, owned)
    payloads, own = receive_means(_axis.gather(message, axis_name))

    def decode(codec: Codec, public: jax.Array, payload: PyTree, own: PyTree) -> jax.Array:
        return codec.decode(public, payload, own, 1, 1, shape)

    decode_rows = jax.vmap(functools.partial(decode, codec))
    decode_means = jax.vmap(functools.partial(decode, mean_codec), in_axes=(None, 0, 0))
    return (
        decode_means(of_means.public, payloads, own),
        TwoStageMemory(sent_memory, mean_memory),
        owned,
        lambda: decode_rows(of_rows.public, *receive(sent)),
        TwoStageStatistics(of_rows.public, receive(sent)[1], of_means.public, own),
    )


def _codec_of_units(axis_name: AxisName, codec: Codec, mean_codec: Codec, cut: Cut) -> Codec:
    """What the codecs of rows remember, aim at and tell of a whole unit."""

    def init(x: jax.Array) -> Memory:
        of_row = [
            own_memory(each, jnp.zeros(1), "two_stage_mean", "the owner of a row")
            for each in (codec, mean_codec)
        ]
        if not jax.tree.leaves(of_row):
            return Memory(TwoStageMemory((), ()), ())
        _axis.require_bound(axis_name)
        rows = cut.apart(x, _axis.size(axis_name))
        return Memory(
            TwoStageMemory(jax.vmap(codec.init)(rows).own, mean_codec.init(rows[0]).own), ()
        )

    def target(memory: Memory, x: jax.Array) -> jax.Array:
        rows = cut.apart(x, _axis.size(axis_name))
        aims = jax.vmap(lambda own, row: codec.target(Memory(own, ()), row))(memory.own.sent, rows)
        return cut.together(aims, x.shape)

    def tell(memory: Memory) -> dict[str, jax.Array]:
        of_mean = mean_codec.tell(Memory(memory.own.mean, ()))
        of_rows: dict[str, jax.Array] = {}
        if jax.tree.leaves(memory.own.sent):
            of_rows = jax.vmap(lambda own: codec.tell(Memory(own, ())))(memory.own.sent)
        news = {name: jnp.sum(told) for name, told in of_rows.items()}
        return news | {name: told + news.get(name, 0) for name, told in of_mean.items()}

    def measure(coins: Coins, memory: Memory, x: jax.Array) -> TwoStageStatistics:
        """As of one worker alone, for the names that `observe` tells."""
        del memory
        rows = cut.apart(x, 1)

        def of_row(codec: Codec) -> PyTree:
            measured = codec.measure(coins, codec.init(rows[0]), rows[0])
            return jax.tree.map(lambda statistic: statistic[None], measured)

        public = coins.public
        return TwoStageStatistics(public[None], of_row(codec), public, of_row(mean_codec))

    def observe(public: jax.Array, agreed: TwoStageStatistics, x: jax.Array) -> Observations:
        del public
        rows = cut.apart(x, len(agreed.row_coins))
        of_rows = jax.vmap(observing_alone(codec).observe)(agreed.row_coins, agreed.rows, rows)
        of_means = jax.vmap(observing_alone(mean_codec).observe, in_axes=(None, 0, 0))(
            agreed.mean_coin, agreed.means, rows
        )
        return add_observations(jax.tree.map(jnp.sum, each) for each in (of_rows, of_means))

    return codec._replace(
        init=init,
        measure=measure,
        target=target,
        tell=tell,
        observe=observe,
        settle=settled,
        dropping=codec.dropping or mean_codec.dropping,
    )


@checked()
def two_stage_mean(
    axis_name: AxisName,
    codec: Codec,
    *,
    mean_codec: Codec | None = None,
    cut: Ownership = "runs",
    scope: _buckets.Scope | None = None,
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

    A codec with memory has it at both ends: of the rows that a worker sends, and of the mean that
    it owns. With :func:`jaxcomm.compression.feedback.error_feedback` nothing is lost:
    :math:`\sum_t \bar x^t` falls short of the sum of the means by what both ends still hold.

    Args:
      axis_name: The mesh axis, or axes, that number the workers.
      codec: A codec; it encodes rows, each with its own statistics. What it remembers must be each
        worker's own.
      mean_codec: Of the mean of the row that a worker owns. Default: `codec`.
      cut: Into `"runs"` of coordinates, or `"turns"`: worker k owns every n-th part of the unit
        along its first axis, from the k-th on. Where neighbours are alike, as the rows of frequent
        words are, this gives all workers as much to send.
      scope: What is cut into rows: each `"leaf"`, or a `"bucket"` of leaves (`"tree"` likewise).
        Default: what the codec asks for, `codec.scope`.
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
      >>> average = jax.vmap(lambda x: tx.update(x, tx.init(x))[0], axis_name="data")
      >>> print(jax.jit(average)(jnp.array([[3.0, 0.0], [1.0, 5.0]])))
      [[2.  2.5]
       [2.  2.5]]
    """

    if cut not in get_args(Ownership):
        raise ValueError(f"`cut` must be one of {get_args(Ownership)}, got {cut!r}.")
    of_mean, by = codec if mean_codec is None else mean_codec, CUTS[cut]
    of_units = _codec_of_units(axis_name, codec, of_mean, by)

    def exchange(coins: list[Coins], memories: list[Memory], units: list[jax.Array]) -> Exchanged:
        workers = _axis.size(axis_name)
        _, finite = agree(axis_name, (), [()] * len(units), all_finite(units))
        means, after, owned, sent, common = [], [], [], [], []
        for coin, memory, x in zip(coins, memories, units, strict=True):
            rows = by.apart(x, workers)
            mean, own, row, decode_own, known = (
                _mean_of_rows(axis_name, codec, of_mean, coin, memory.own, rows)
                if x.size
                else (rows, memory.own, rows, None, of_units.measure(coin, memory, x))
            )
            means.append(by.together(mean, x.shape))
            after.append(Memory(own, ()))
            owned.append(row)
            sent.append((x, decode_own))
            common.append((coin.public, known))
        if codec.dropping is not None:  # The codec of the mean may not keep a NaN.
            means = nan_unless_all_fit(axis_name, owned, means)
        return Exchanged(
            means,
            after,
            finite,
            lambda: [
                by.together(decode_own(), x.shape) if decode_own else x for x, decode_own in sent
            ],
            common,
        )

    return coded_mean(
        axis_name,
        of_units,
        exchange,
        scope=scope,
        bucket_bytes=bucket_bytes,
        seed=seed,
        key=key,
        info=info,
    )
