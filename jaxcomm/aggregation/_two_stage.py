"""The mean in two stages: float32 sums between two coded exchanges."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, Unpack, get_args

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
from jaxcomm.aggregation._agreement import all_finite, everywhere, nan_unless_all_fit
from jaxcomm.aggregation._all_gather import decoded_mean
from jaxcomm.aggregation._coded import coded_mean
from jaxcomm.aggregation._diagnostics import add_ratios, add_totals
from jaxcomm.aggregation._exchange import Encoded, Exchanged, Part
from jaxcomm.aggregation._local import (
    decode_local,
    encode_local,
    local_memory,
    without_global_diagnostics,
)
from jaxcomm.aggregation._options import AggregatorOptions, takes_options
from jaxcomm.aggregation._rows import ROW_LAYOUTS, RowLayout, RowOwnership
from jaxcomm.compression._diagnosed import diagnose_each

_Function = TypeVar("_Function", bound=Callable[..., Any])


class TwoStageMemory(NamedTuple):
    """What a worker remembers of one unit: feedback at both ends."""

    sent: PyTree  # of the rows that it sends, [workers, ...]
    mean: PyTree  # of the mean of the row that it owns


class _Ends(NamedTuple):
    """The `statistics` of a unit's context: all that is needed to diagnose both ends."""

    rows: Context  # of the rows that a worker sends, [workers, ...]
    mean: Context  # of the mean of the row that it owns
    owned: jax.Array  # that mean, before it is encoded again


def _codec_of_units(
    axis_name: AxisName, codec: Codec, mean_codec: Codec, layout: RowLayout
) -> Codec:
    """What the codecs of rows remember and tell of a whole unit."""

    def init(x: jax.Array) -> Memory:
        of_row = [
            local_memory(each, jnp.zeros(1), "two_stage_mean", "the owner of a row")
            for each in (codec, mean_codec)
        ]
        if not jax.tree.leaves(of_row):
            return Memory(TwoStageMemory((), ()), ())
        _axis.require_bound(axis_name)
        rows = layout.apart(x, _axis.size(axis_name))
        return Memory(
            TwoStageMemory(jax.vmap(codec.init)(rows).own, mean_codec.init(rows[0]).own), ()
        )

    def diagnose(context: Context, x: jax.Array, after: Memory) -> Diagnostics:
        ends, workers = context.statistics, _axis.size(axis_name)
        rows = diagnose_each(
            codec.diagnose, ends.rows, layout.apart(x, workers), Memory(after.own.sent, ())
        )
        mean = mean_codec.diagnose(ends.mean, ends.owned, Memory(after.own.mean, ()))
        # A worker sends a row to each, and one mean: both ends weigh the same.
        means = {name: (workers * a, workers * b) for name, (a, b) in mean.ratios.items()}
        both = rows.errors.keys() & mean.errors.keys()
        of_both = {name: (rows.errors[name] + mean.errors[name]) / 2 for name in both}
        return Diagnostics(
            layout.together(rows.target, x.shape),
            add_totals([rows.totals, mean.totals]),
            add_ratios([rows.ratios, means]),
            rows.errors | mean.errors | of_both,
            mean.constants | rows.constants,
        )

    return codec._replace(
        init=init,
        diagnose=diagnose,
        finalize=mean_is_update,
        drop_overflow=codec.drop_overflow or mean_codec.drop_overflow,
    )


def _ends(context: Context, workers: int, shape: tuple[int, ...]) -> tuple[Context, Context]:
    """Rows are encoded with coins of their own, the mean of one with those of a row beyond."""
    coins, memory = context.coins, context.memory.own
    of_rows = Coins(*(jax.random.split(key, workers) for key in coins))
    of_mean = Coins(*(jax.random.fold_in(key, workers) for key in coins))
    return (
        Context(of_rows, Memory(memory.sent, ()), shape=shape),
        Context(of_mean, Memory(memory.mean, ()), shape=shape),
    )


def _of(part: Part, function: _Function, in_axes: Any = 0, out_axes: Any = 0) -> _Function:
    """The function of a leaf as that of a stack of leaves, which in a message comes second."""
    stacked = part.unit.form == "stacked"
    return jax.vmap(function, in_axes, out_axes) if stacked else function


@checked()
@takes_options
def two_stage_mean(
    axis_name: AxisName,
    codec: Codec,
    *,
    mean_codec: Codec | None = None,
    layout: RowOwnership = "block",
    **options: Unpack[AggregatorOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""Encodes, exchanges rows, adds in float32, encodes the mean, and gathers it.

    .. math:: r_k = \frac{1}{n} \sum_i \mathrm{decode}(\mathrm{encode}(x_{i,k})), \qquad
              \bar x \approx (\mathrm{decode}(\mathrm{encode}(r_1)), \ldots,
              \mathrm{decode}(\mathrm{encode}(r_n)))

    Worker :math:`k` owns row :math:`k` of the vector. No sum of codes can overflow, any codec will
    do, and the bytes do not depend on :math:`n`: a worker sends :math:`2 (n-1)/n` payloads,
    statistics beside them in the same message, and one float32 flag. A message of 2^16 words or
    more is filled up to a multiple of 4096. The price is a second rounding.

    A codec with memory has it at both ends: of the rows that a worker sends, and of the mean that
    it owns. With :func:`jaxcomm.compression.feedback.error_feedback` nothing is lost:
    :math:`\sum_t \bar x^t` falls short of the sum of the means by what both ends still hold.

    Args:
      axis_name: The mesh axis, or axes, that number the workers.
      codec: A codec; it encodes rows, each with its own statistics. What it remembers must be each
        worker's own.
      mean_codec: Of the mean of the row that a worker owns. Default: `codec`.
      layout: Into `"block"` of coordinates, or `"cyclic"`: worker k owns every n-th part of the
        unit along its first axis, from the k-th on. Where neighbours are alike, as the rows of
        frequent words are, this gives all workers as much to send.
      **options: As :class:`AggregatorOptions` says.

    Returns:
      A transformation to place before the optimizer, with the guarantees of
      :func:`jaxcomm.all_reduce_mean`. Unbiased if the codec is.

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

    if layout not in get_args(RowOwnership):
        raise ValueError(f"`layout` must be one of {get_args(RowOwnership)}, got {layout!r}.")
    by = ROW_LAYOUTS[layout]
    of_rows = without_global_diagnostics(codec)
    of_mean = of_rows if mean_codec is None else without_global_diagnostics(mean_codec)

    def exchange(parts: list[Part]) -> Exchanged:
        workers, me = _axis.size(axis_name), _axis.index(axis_name)
        finite = everywhere(axis_name, all_finite(part.x for part in parts))

        def send(context: Context, x: jax.Array) -> tuple[PyTree, tuple[Context, Context, PyTree]]:
            rows = by.apart(x, workers)
            row, mean = _ends(context, workers, rows.shape[1:])
            content, kept = jax.vmap(functools.partial(encode_local, of_rows))(row, rows)
            return content, (row.replace(statistics=content[1]), mean, kept.own)

        sent = [_of(part, send, 0, (1, 0))(part.context, part.x) for part in parts]
        contents = [content for content, _ in sent]
        like = jax.tree.map(lambda x: jax.eval_shape(lambda x: x[0], x), contents)
        messages = _axis.exchange(jax.vmap(to_message)(contents), axis_name)
        received = jax.vmap(lambda message: from_message(message, like))(messages)

        def owned(row: Context, content: PyTree) -> jax.Array:
            # Each sender drew for the row of this worker with the public coin of that row.
            mine = jax.tree.map(lambda x: x[me], row.replace(memory=Memory()))
            decode = functools.partial(decode_local, of_rows, mine)
            return decoded_mean(decode, content, mine.replace(statistics=()), mine.shape)

        means = [
            _of(part, owned, (0, 1))(row, content)
            for part, (_, (row, *_)), content in zip(parts, sent, received, strict=True)
        ]
        encode_mean = functools.partial(encode_local, of_mean)
        resent = [
            _of(part, encode_mean)(mean, x)
            for part, (_, (_, mean, _)), x in zip(parts, sent, means, strict=True)
        ]
        again = [content for content, _ in resent]
        gathered = _axis.gather(to_message(again), axis_name)
        of_all = jax.vmap(lambda message: from_message(message, again))(gathered)

        def restore(context: Context, mean: Context, content: PyTree) -> jax.Array:
            decode = functools.partial(decode_local, of_mean, mean)
            return by.together(jax.vmap(decode)(content), context.shape)

        units = []
        for part, (_, (row, mean, kept)), x, (own, kept_of_mean), content in zip(
            parts, sent, means, resent, of_all, strict=True
        ):
            known = _Ends(row, mean.replace(statistics=own[1]), x)
            after = Memory(TwoStageMemory(kept, kept_of_mean.own), ())
            whole = _of(part, restore, (0, 0, 1))(part.context, mean, content)
            units.append(Encoded(part.context.replace(statistics=known), after, whole))
        if codec.drop_overflow is not None:  # The codec of the mean may not keep a NaN.
            fitting = nan_unless_all_fit(axis_name, means, [each.mean for each in units])
            units = [each._replace(mean=mean) for each, mean in zip(units, fitting, strict=True)]

        def own_rows(context: Context, row: Context, content: PyTree) -> jax.Array:
            decode = jax.vmap(functools.partial(decode_local, of_rows))
            return by.together(decode(row, content), context.shape)

        def decoded() -> list[jax.Array]:
            return [
                _of(part, own_rows, (0, 0, 1))(part.context, row, content)
                for part, (content, (row, *_)) in zip(parts, sent, strict=True)
            ]

        return Exchanged(units, finite, decoded)

    of_units = _codec_of_units(axis_name, of_rows, of_mean, by)
    return coded_mean(axis_name, of_units, exchange, options, tells=(of_rows, of_mean), stacks=True)
