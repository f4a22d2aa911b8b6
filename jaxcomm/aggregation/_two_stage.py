"""The mean in two stages: float32 sums between two coded exchanges."""

import functools
from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax

from jaxcomm import _axis
from jaxcomm._contract import (
    AxisName,
    Codec,
    Context,
    Diagnostics,
    Keys,
    Memory,
    PyTree,
    mean_is_update,
)
from jaxcomm._require import checked
from jaxcomm._units import Unit
from jaxcomm.aggregation._all_gather import (
    decode_local,
    local_memory,
    without_global_diagnostics,
)
from jaxcomm.aggregation._coded import AggregatorOptions, coded_mean, takes_options
from jaxcomm.aggregation._diagnostics import add_by_name
from jaxcomm.aggregation._exchange import (
    Exchanged,
    Part,
    all_finite,
    everywhere,
    nan_unless,
    nan_unless_all_fit,
)
from jaxcomm.aggregation._rows import (
    ROW_CUTS,
    RowCut,
    RowOwnership,
    keys_of_means,
    pull_rows,
    push_rows,
    recut_memory,
)
from jaxcomm.compression._blockwise import diagnose_each, stacked


class TwoStageMemory(NamedTuple):
    """The memory of one unit: one part per stage."""

    sent: PyTree  # for the rows that the worker sends, [workers, ...]
    mean: PyTree  # for the mean of the row that it owns


class _Stages(NamedTuple):
    """The report of a unit: what `diagnose` needs of both stages."""

    rows: Context  # of the rows that the worker sends, [workers, ...]
    rows_after: Memory
    mean: Context  # of the mean of the row that it owns
    mean_after: Memory
    owned: jax.Array  # that mean, before encoding


def _codec_of_units(axis_name: AxisName, cut: RowCut, codec: Codec, mean_codec: Codec) -> Codec:
    """The codec of a whole unit, with the memory and diagnostics of the codecs of its rows."""

    def init(x: jax.Array) -> Memory:
        memory = functools.partial(
            local_memory, aggregator="two_stage_mean", holders="the owner of a row"
        )
        one = x if x.size else jnp.zeros(1)
        if not any(
            jax.tree.leaves(jax.eval_shape(functools.partial(memory, each), one))
            for each in (codec, mean_codec)
        ):
            return Memory(TwoStageMemory((), ()))
        rows = cut.split(x, _axis.size(axis_name))
        return Memory(TwoStageMemory(jax.vmap(codec.init)(rows).own, mean_codec.init(rows[0]).own))

    def diagnose(context: Context, x: jax.Array, after: Memory) -> Diagnostics:
        stages, workers = after.report, _axis.size(axis_name)
        rows = diagnose_each(codec.diagnose, stages.rows, cut.split(x, workers), stages.rows_after)
        mean = mean_codec.diagnose(stages.mean, stages.owned, stages.mean_after)
        # A worker sends n rows but owns one mean; the factor weights both stages equally.
        mean_ratios = {name: (workers * a, workers * b) for name, (a, b) in mean.ratios.items()}
        common = rows.errors.keys() & mean.errors.keys()
        averages = {name: (rows.errors[name] + mean.errors[name]) / 2 for name in common}
        return Diagnostics(
            cut.join(rows.target, x.shape),
            add_by_name([rows.totals, mean.totals]),
            add_by_name([rows.ratios, mean_ratios]),
            rows.errors | mean.errors | averages,
            mean.constants | rows.constants,
        )

    return codec.replace(
        init=init,
        diagnose=diagnose,
        finalize=mean_is_update,
        drop_overflow=codec.drop_overflow or mean_codec.drop_overflow,
    )


def _of_stack(cut: RowCut) -> RowCut:
    """The cut of each leaf of a stack `[leaves, ...]`, into rows `[workers, leaves, ...]`."""
    return RowCut(
        lambda x, workers: jax.vmap(lambda leaf: cut.split(leaf, workers), out_axes=1)(x),
        lambda rows, shape: jax.vmap(lambda leaf: cut.join(leaf, shape[1:]), 1)(rows),
    )


@checked
@takes_options
def two_stage_mean(
    codec: Codec,
    *,
    mean_codec: Codec | None = None,
    ownership: RowOwnership = "block",
    axis_name: AxisName = "data",
    **options: Unpack[AggregatorOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""Encodes and exchanges rows, averages in float32, encodes the mean, and gathers it.

    .. math:: r_k = \frac{1}{n} \sum_i \mathrm{decode}(\mathrm{encode}(x_{i,k})), \qquad
              \bar x \approx (\mathrm{decode}(\mathrm{encode}(r_1)), \ldots,
              \mathrm{decode}(\mathrm{encode}(r_n)))

    Worker :math:`k` owns row :math:`k` of the vector. Payloads are never summed, so no sum can
    overflow and any codec is supported. The payload does not grow with :math:`n`. A worker sends
    :math:`2 (n-1)/n` payloads with their statistics in the same message, and a flag that reports
    non-finite updates (one float32). A message of 2^16 words or more is padded to a multiple of
    4096 words. The cost is a second rounding.

    A codec with memory keeps it for both stages: for the rows that a worker sends, and for the mean
    that it owns. With :func:`jaxcomm.compression.feedback.error_feedback` nothing is lost:
    :math:`\sum_t \bar x^t` differs from the sum of the means by the residuals of both stages.

    Args:
      codec: A codec that encodes rows, each with separate statistics. Its memory must be each
        worker's own.
      mean_codec: The codec of the mean of the row that a worker owns. Default: `codec`.
      ownership: How a unit (a bucket or a leaf) is split into rows. `"block"`: contiguous blocks of
        coordinates. `"cyclic"`: worker k owns every n-th slice along the first axis, from slice k
        on. `"cyclic"` balances the bytes of workers if adjacent slices are similar, such as
        embeddings of frequent words.
      axis_name: The mesh axis, or axes, of the workers.
      **options: See :class:`jaxcomm.aggregation.AggregatorOptions`.

    Returns:
      A transformation to place before the optimizer, with the guarantees of
      :func:`jaxcomm.all_reduce_mean`. Unbiased if the codec is.

    Raises:
      ValueError: If an option is out of range; in `init`, if the codec has memory that workers
        share; in `update`, if `axis_name` is not bound or an update is already summed.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxcomm.aggregation import two_stage_mean
      >>> from jaxcomm.compression.quantizers import dither
      >>> tx = two_stage_mean(dither(levels=1))
      >>> average = jax.vmap(lambda x: tx.update(x, tx.init(x))[0], axis_name="data")
      >>> print(jax.jit(average)(jnp.array([[3.0, 0.0], [1.0, 5.0]])))
      [[2.  2.5]
       [2.  2.5]]
    """
    row_codec = without_global_diagnostics(codec)
    own_codec = row_codec if mean_codec is None else without_global_diagnostics(mean_codec)
    alone = ROW_CUTS[ownership], row_codec, own_codec
    stack = _of_stack(ROW_CUTS[ownership]), stacked(row_codec), stacked(own_codec)
    exposes = "decode" in own_codec.fast.exposes_nonfinite

    def kind_of(unit: Unit) -> tuple[RowCut, Codec, Codec]:
        """How a unit is cut, and the codecs of its rows and of their means."""
        return stack if unit.form == "stacked" else alone

    def exchange(parts: list[Part]) -> Exchanged:
        workers = _axis.size(axis_name)
        finite = everywhere(axis_name, all_finite(part.x for part in parts))

        def exposed(codec: Codec) -> Codec:
            def decode(context: Context, payload: PyTree) -> jax.Array:
                measured = nan_unless(finite, context.statistics)
                return codec.decode(context.replace(statistics=measured), payload)

            return codec.replace(decode=decode) if exposes else codec

        def started(part: Part, codec: Codec, keys: Keys, memory: PyTree, x: jax.Array) -> Part:
            return part._replace(codec=codec, context=Context(keys, Memory(memory)), x=x)

        def to_push(part: Part) -> Part:
            cut, codec, _ = kind_of(part.unit)
            rows, memory = cut.split(part.x, workers), part.context.memory.own.sent
            return started(part, codec, part.context.keys, memory, rows)

        def to_pull(first: Part, part: Part, keys: Keys) -> Part:
            codec = exposed(kind_of(part.unit)[2])
            return started(first, codec, keys, part.context.memory.own.mean, first.mean)

        def joined(part: Part, rows: jax.Array) -> jax.Array:
            return kind_of(part.unit)[0].join(rows, part.x.shape)

        def after(first: Part, second: Part) -> Memory:
            report = _Stages(first.context, first.memory, second.context, second.memory, second.x)
            return Memory(TwoStageMemory(first.memory.own, second.memory.own), report=report)

        def sent_of(part: Part, first: Part) -> jax.Array:
            decode = jax.vmap(functools.partial(decode_local, first.codec))
            return joined(part, decode(first.context, first.payload))

        firsts, _ = push_rows(axis_name, [*map(to_push, parts)])
        keys = keys_of_means([part.context.keys for part in parts], workers)
        seconds, _ = pull_rows(axis_name, [*map(to_pull, firsts, parts, keys)])
        means = [joined(part, second.mean) for part, second in zip(parts, seconds, strict=True)]
        if codec.drop_overflow is not None:  # The codec of the mean may not preserve NaN.
            means = nan_unless_all_fit(axis_name, [second.x for second in seconds], means)
        results = [
            part._replace(memory=memory, mean=mean)
            for part, memory, mean in zip(parts, map(after, firsts, seconds), means, strict=True)
        ]
        sent = lambda: [*map(sent_of, parts, firsts)]  # noqa: E731
        return Exchanged(results, finite, sent, are_nan=exposes)

    def resize(
        unit: Unit, shape: tuple[int, ...], old: TwoStageMemory, new: TwoStageMemory
    ) -> TwoStageMemory:
        """The memory of both stages: rows, which are joined and split again."""
        cut, *_ = kind_of(unit)

        def stage(before: PyTree, after: PyTree, *, of_rows: bool) -> PyTree:
            return recut_memory(
                lambda whole, workers: [cut.split(whole, workers)],
                lambda rows, workers: cut.join(rows[0], shape),
                jnp.zeros(shape),
                [before],
                [after],
                of_rows=of_rows,
                user="two_stage_mean",
            )[0]

        return TwoStageMemory(
            stage(old.sent, new.sent, of_rows=True), stage(old.mean, new.mean, of_rows=False)
        )

    return coded_mean(
        axis_name,
        _codec_of_units(axis_name, *alone),
        exchange,
        options,
        diagnosed=(row_codec, own_codec),
        stack=_codec_of_units(axis_name, *stack),
        resize=resize,
    )
