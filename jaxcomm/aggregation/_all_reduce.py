"""Means whose payloads are combined, by a sum or a merge, and then decoded once."""

from collections.abc import Callable
from typing import TypeAlias, Unpack

import jax
import jax.numpy as jnp
import optax

from jaxcomm import _axis
from jaxcomm._collectives import exchange_rows, gather_contents
from jaxcomm._contract import AxisName, Codec, Keys, PyTree
from jaxcomm._require import checked, combine_of
from jaxcomm.aggregation._coded import AggregatorOptions, coded_mean, takes_options
from jaxcomm.aggregation._exchange import (
    Exchange,
    Exchanged,
    Part,
    all_finite,
    decoded_payloads,
    nan_unless,
    over_units,
    reduce_statistics,
    stage_of,
    sum_together,
)
from jaxcomm.aggregation._rows import from_rows, to_rows
from jaxcomm.compression._blockwise import stacked

Combine: TypeAlias = Callable[[list[Part], list[PyTree]], list[PyTree]]
"""From this worker's payloads of all units to the payloads combined over workers."""


def _checkable(codec: Codec, statistic: PyTree) -> list[jax.Array]:
    """The statistics that are non-finite if the unit is; empty if there are none."""
    leaves = jax.tree.leaves(statistic) if "measure" in codec.fast.exposes_nonfinite else []
    return [leaf for leaf in leaves if leaf.size]


def combine_payloads(axis_name: AxisName, codec: Codec, combine: Combine | None = None) -> Exchange:
    """Reduces statistics, encodes with them, combines or adds the payloads, decodes once."""

    # The sum of such payloads is not finite if a unit of any worker is not.
    sends_statistics = {*jax.tree.leaves(codec.reduce_statistics)} - {"equal"}
    flagged_by_payload = "encode" in codec.fast.exposes_nonfinite and not sends_statistics
    exposes = "decode" in codec.fast.exposes_nonfinite

    def exchange(parts: list[Part]) -> Exchanged:
        workers = _axis.size(axis_name)
        parts = [part._replace(context=part.context.replace(workers=workers)) for part in parts]
        measured = [part.codec.measure(part.context, part.x) for part in parts]
        groups = [part.unit.group for part in parts]
        statistics = over_units(codec.reduce_statistics, measured, groups)
        if not flagged_by_payload:
            # A statistic is much smaller than its unit.
            checked = [
                array
                for part, statistic in zip(parts, measured, strict=True)
                for array in (_checkable(part.codec, statistic) or [part.x])
            ]
            statistics, finite = reduce_statistics(
                axis_name, codec.reduce_statistics, statistics, all_finite(checked)
            )
        parts = [
            part._replace(context=part.context.replace(statistics=statistics[part.unit.group]))
            for part in parts
        ]
        encoded = [part.codec.encode(part.context, part.x) for part in parts]
        payloads = [payload for payload, _ in encoded]
        with jax.named_scope(stage_of(payloads[0], "payload")):
            totals = combine(parts, payloads) if combine else sum_together(axis_name, payloads)
        if flagged_by_payload:
            finite = all_finite(jax.tree.leaves(totals))
        sent = decoded_payloads(parts, payloads)

        def decoded(part: Part, total: PyTree) -> jax.Array:
            context = part.context.received(workers)
            if exposes:
                context = context.replace(statistics=nan_unless(finite, context.statistics))
            return part.codec.decode(context, total)

        parts = [
            part._replace(memory=memory, mean=decoded(part, total), payload=total)
            for part, (_, memory), total in zip(parts, encoded, totals, strict=True)
        ]
        return Exchanged(parts, finite, sent, are_nan=exposes)

    return exchange


@checked
@takes_options
def all_reduce_mean(
    codec: Codec,
    *,
    axis_name: AxisName = "data",
    **options: Unpack[AggregatorOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""Reduces statistics, sums the payloads of all workers, and decodes the sum once.

    .. math:: a = \bigoplus_i \mathrm{measure}(x_i), \qquad
              \bar x \approx \mathrm{decode}\Big(\sum_i \mathrm{encode}(x_i, a), a\Big)

    where :math:`\bigoplus` is the reduction that the codec chooses for each statistic (sum, maximum
    or OR). A worker sends :math:`2 (n-1)/n` payloads. The statistics of all buckets or leaves and a
    flag that reports non-finite updates take one small all-reduce per kind of reduction.

    Args:
      codec: A codec with `combine="sum"`.
      axis_name: The mesh axis, or axes, of the workers.
      **options: See :class:`jaxcomm.aggregation.AggregatorOptions`.

    Returns:
      A transformation to place before the optimizer. Updates are equal on all workers and keep
      their shape and dtype. A non-finite coordinate on any worker makes them NaN on all workers.
      `update(..., weight=w)` computes a weighted mean.

    Raises:
      ValueError: If the codec's payloads cannot be summed, or an option is out of range; in
        `update`, if `axis_name` is not bound or an update is already summed.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxcomm.aggregation import all_reduce_mean
      >>> from jaxcomm.compression.quantizers import dither
      >>> tx = all_reduce_mean(dither(levels=3))
      >>> average = lambda x: tx.update(x, tx.init(x))[0]
      >>> print(jax.vmap(average, axis_name="data")(jnp.array([[3.0, 0.0], [-1.0, 3.0]])))
      [[1.  1.5]
       [1.  1.5]]
    """
    if codec.combine != "sum":
        raise ValueError(
            f"`all_reduce_mean` needs a sum, got {combine_of(codec)}. Use `all_gather_mean`."
        )

    exchange = combine_payloads(axis_name, codec)
    return coded_mean(axis_name, codec, exchange, options, stack=stacked(codec))


def _tree(
    merge: Callable[[Keys, PyTree, PyTree], PyTree], keys: Keys, payloads: PyTree, count: int
) -> PyTree:
    """Merges `[count, ...]` payloads pairwise, in worker order, to one payload."""
    for depth in range((count - 1).bit_length()):
        pairs, odd = count // 2, count % 2
        first = jax.tree.map(lambda x, n=pairs: x[0 : 2 * n : 2], payloads)
        second = jax.tree.map(lambda x, n=pairs: x[1 : 2 * n : 2], payloads)
        # Counts down: from 0 up, these would be the keys that a blockwise codec splits off.
        drawn = Keys(keys.shared, jax.random.fold_in(keys.private, 2**32 - 1 - depth))
        merged = merge(drawn, first, second)
        payloads = jax.tree.map(
            lambda new, x, n=odd: jnp.concatenate([new, x[-1:]]) if n else new,
            merged,
            payloads,
        )
        count = pairs + odd
    return jax.tree.map(lambda x: x[0], payloads)


@checked
@takes_options
def merged_mean(
    codec: Codec,
    *,
    axis_name: AxisName = "data",
    **options: Unpack[AggregatorOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""Reduces statistics, merges the payloads of all workers pairwise, and decodes once.

    Each worker owns a row of the vector. It receives the payloads of this row from all workers
    (all-to-all), merges them in a tree of depth :math:`\lceil \log_2 n \rceil`, and sends the
    result to all workers (all-gather). A worker sends :math:`2 (n-1)/n` payloads for any :math:`n`,
    as in recursive halving. If each merge rounds again, a tree has the smallest error.

    Args:
      codec: A codec whose `combine` is a function and whose payload has one entry per coordinate.
      axis_name: The mesh axis, or axes, of the workers.
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
      >>> tx = merged_mean(exponential_dither())
      >>> average = jax.vmap(lambda x: tx.update(x, tx.init(x))[0], axis_name="data")
      >>> print(jax.jit(average)(jnp.array([[4.0, 0.0], [4.0, 2.0]])))
      [[4. 1.]
       [4. 1.]]
    """
    merge = codec.combine
    if not callable(merge):
        raise ValueError(
            f"`merged_mean` needs a merge, got {combine_of(codec)}. Use `all_gather_mean`."
        )

    def merge_rows(parts: list[Part], payloads: list[PyTree]) -> list[PyTree]:
        workers = _axis.size(axis_name)
        rows = jax.tree.map(lambda codes: to_rows(codes, workers), payloads)
        mine = exchange_rows(rows, axis_name)
        merged = [
            _tree(merge, part.context.keys, codes, workers)
            for part, codes in zip(parts, mine, strict=True)
        ]
        merged_rows = gather_contents(merged, axis_name)
        return jax.tree.map(lambda x, codes: from_rows(x, codes.shape), merged_rows, payloads)

    return coded_mean(axis_name, codec, combine_payloads(axis_name, codec, merge_rows), options)
