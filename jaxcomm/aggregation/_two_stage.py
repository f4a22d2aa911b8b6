"""The mean in two stages: float32 sums between two coded exchanges."""

import functools
from typing import NamedTuple, Unpack, get_args

import jax
import jax.numpy as jnp
import optax

from jaxcomm import _axis
from jaxcomm._base import (
    AxisName,
    Codec,
    Coins,
    Context,
    Diagnostics,
    Memory,
    PyTree,
    mean_is_update,
)
from jaxcomm._message import from_message, to_message
from jaxcomm._require import checked
from jaxcomm.aggregation._agreement import agree, all_finite, nan_unless_all_fit
from jaxcomm.aggregation._alone import decode_alone, diagnosing_alone, encode_alone, own_memory
from jaxcomm.aggregation._coded import Encoded, Exchanged, Part, coded_mean
from jaxcomm.aggregation._gathered import decoded_mean
from jaxcomm.aggregation._info import add_ratios, add_totals
from jaxcomm.aggregation._options import AggregatorOptions, takes_options
from jaxcomm.aggregation._rows import CUTS, Cut, Ownership
from jaxcomm.compression._diagnosed import diagnose_each


class TwoStageMemory(NamedTuple):
    """What a worker remembers of one unit: feedback at both ends."""

    sent: PyTree  # of the rows that it sends, [workers, ...]
    mean: PyTree  # of the mean of the row that it owns


class _Ends(NamedTuple):
    """The `agreed` of a unit's context: all that is needed to diagnose both ends."""

    rows: Context  # of the rows that a worker sends, [workers, ...]
    mean: Context  # of the mean of the row that it owns
    owned: jax.Array  # that mean, before it is encoded again


def _codec_of_units(axis_name: AxisName, codec: Codec, mean_codec: Codec, cut: Cut) -> Codec:
    """What the codecs of rows remember and tell of a whole unit."""

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

    def diagnose(context: Context, x: jax.Array, after: Memory) -> Diagnostics:
        ends, workers = context.agreed, _axis.size(axis_name)
        rows = diagnose_each(
            codec.diagnose, ends.rows, cut.apart(x, workers), Memory(after.own.sent, ())
        )
        mean = mean_codec.diagnose(ends.mean, ends.owned, Memory(after.own.mean, ()))
        # A worker sends a row to each, and one mean: both ends weigh the same.
        means = {name: (workers * a, workers * b) for name, (a, b) in mean.ratios.items()}
        both = rows.errors.keys() & mean.errors.keys()
        of_both = {name: (rows.errors[name] + mean.errors[name]) / 2 for name in both}
        return Diagnostics(
            cut.together(rows.target, x.shape),
            add_totals([rows.totals, mean.totals]),
            add_ratios([rows.ratios, means]),
            rows.errors | mean.errors | of_both,
            rows.constants,
        )

    return codec._replace(
        init=init,
        diagnose=diagnose,
        settle=mean_is_update,
        dropping=codec.dropping or mean_codec.dropping,
    )


def _ends(part: Part, workers: int, shape: tuple[int, ...]) -> tuple[Context, Context]:
    """Rows are encoded with coins of their own, the mean of one with those of a row beyond."""
    coins, memory = part.context.coins, part.context.memory.own
    of_rows = Coins(*(jax.random.split(key, workers) for key in coins))
    of_mean = Coins(*(jax.random.fold_in(key, workers) for key in coins))
    return (
        Context(of_rows, Memory(memory.sent, ()), shape=shape),
        Context(of_mean, Memory(memory.mean, ()), shape=shape),
    )


@checked()
@takes_options
def two_stage_mean(
    axis_name: AxisName,
    codec: Codec,
    *,
    mean_codec: Codec | None = None,
    cut: Ownership = "runs",
    **options: Unpack[AggregatorOptions],
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
      **options: As :class:`AggregatorOptions` says.

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
    by = CUTS[cut]
    of_rows = diagnosing_alone(codec)
    of_mean = of_rows if mean_codec is None else diagnosing_alone(mean_codec)

    def exchange(parts: list[Part]) -> Exchanged:
        workers, me = _axis.size(axis_name), _axis.index(axis_name)
        _, finite = agree(axis_name, (), [()] * len(parts), all_finite(x for _, x in parts))
        rows = [by.apart(part.x, workers) for part in parts]
        ends = [_ends(part, workers, x.shape[1:]) for part, x in zip(parts, rows, strict=True)]

        encode_rows = jax.vmap(functools.partial(encode_alone, of_rows))
        sent = [encode_rows(of, x) for (of, _), x in zip(ends, rows, strict=True)]
        contents = [content for content, _ in sent]
        like = jax.tree.map(lambda x: jax.eval_shape(lambda x: x[0], x), contents)
        messages = _axis.exchange(jax.vmap(to_message)(contents), axis_name)
        received = jax.vmap(lambda message: from_message(message, like))(messages)

        def owned(of: Context, content: PyTree) -> jax.Array:
            # Each sender drew for the row of this worker with the public coin of that row.
            mine = jax.tree.map(lambda x: x[me], of.replace(memory=Memory()))
            return decoded_mean(lambda one: decode_alone(of_rows, mine, one), content, mine)

        means = [owned(of, content) for (of, _), content in zip(ends, received, strict=True)]
        resent = [encode_alone(of_mean, of, x) for (_, of), x in zip(ends, means, strict=True)]
        again = [content for content, _ in resent]
        gathered = _axis.gather(to_message(again), axis_name)
        of_all = jax.vmap(lambda message: from_message(message, again))(gathered)
        units = []
        for part, (row, mean), (content, kept), x, (own, kept_of_mean), all_means in zip(
            parts, ends, sent, means, resent, of_all, strict=True
        ):
            decode = jax.vmap(functools.partial(decode_alone, of_mean, mean))
            known = _Ends(row.replace(agreed=content[1]), mean.replace(agreed=own[1]), x)
            after = Memory(TwoStageMemory(kept.own, kept_of_mean.own), ())
            whole = by.together(decode(all_means), part.x.shape)
            units.append(Encoded(part.context.replace(agreed=known), after, whole))
        if codec.dropping is not None:  # The codec of the mean may not keep a NaN.
            fitting = nan_unless_all_fit(axis_name, means, [each.mean for each in units])
            units = [each._replace(mean=mean) for each, mean in zip(units, fitting, strict=True)]

        def decoded() -> list[jax.Array]:
            decode_rows = jax.vmap(functools.partial(decode_alone, of_rows))
            return [
                by.together(decode_rows(of, content), part.x.shape)
                for part, (of, _), content in zip(parts, ends, contents, strict=True)
            ]

        return Exchanged(units, finite, decoded)

    of_units = _codec_of_units(axis_name, of_rows, of_mean, by)
    return coded_mean(axis_name, of_units, exchange, options, tells=(of_rows, of_mean))
