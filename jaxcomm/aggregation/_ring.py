"""Means in explicit rounds: the ring, hop by hop, and recursive doubling, encoded per round."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias, Unpack

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomm import _axis, _collectives, _units
from jaxcomm._collectives import Message, to_message
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
from jaxcomm.aggregation._aggregator import stateless
from jaxcomm.aggregation._all_gather import (
    decode_local,
    encode_local,
    local_memory,
    without_global_diagnostics,
)
from jaxcomm.aggregation._coded import AggregatorOptions, coded_mean, takes_options, weigh
from jaxcomm.aggregation._diagnostics import add_by_name
from jaxcomm.aggregation._exchange import (
    Exchanged,
    Part,
    all_finite,
    everywhere,
    nan_unless_all_fit,
)
from jaxcomm.aggregation._rows import from_rows, to_rows
from jaxcomm.compression._means import headroom


def _reduce_scatter(chunks: jax.Array, axis_name: AxisName) -> jax.Array:
    """Sums `[workers, ...]` over workers; worker i returns row i of the sum.

    The sum of row i starts on worker i + 1, visits each worker once, and ends on worker i.
    """
    workers = _axis.size(axis_name)
    chunks = _axis.as_varying(chunks, axis_name)
    worker = _axis.index(axis_name)

    def own_chunk(hop: jax.Array | int) -> jax.Array:
        row = (worker - 1 - hop) % workers
        return lax.dynamic_index_in_dim(chunks, row, keepdims=False)

    def body(hop: jax.Array, partial: jax.Array) -> jax.Array:
        with jax.named_scope("partial_sums"):
            return _collectives.shift(partial, axis_name) + own_chunk(hop)

    return lax.fori_loop(1, workers, body, own_chunk(0))


def _ring_mean(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """The mean over workers of float32[d], scaled by `headroom`; equal on all workers."""
    if x.size == 0:
        return lax.psum(x, axis_name)  # Sends nothing, and types the result as equal.
    workers = _axis.size(axis_name)
    part = _reduce_scatter(to_rows(x, workers), axis_name) / (workers * headroom(workers))
    with jax.named_scope("means"):
        return from_rows(_collectives.gather(part, axis_name), x.shape)


@checked
def ring_mean(axis_name: AxisName = "data") -> optax.GradientTransformationExtraArgs:
    r"""The mean over workers in float32, by an explicit ring: n - 1 hops, then a gather.

    .. math:: \bar x = \frac{1}{n} \sum_{i=1}^n x_i

    An update is split into :math:`n` chunks. In each hop, a worker passes one partial sum to the
    next worker, and adds its part to the partial sum that it receives. After :math:`n - 1` hops,
    each worker holds one chunk of the sum, and all workers gather the means. The result equals that
    of :func:`jaxcomm.mean` up to rounding; the order of summation is fixed. A worker sends
    :math:`2 (n-1)/n` times 4 bytes per coordinate; their number is padded to a multiple of
    :math:`n` per bucket of 32 MiB. A ring all-reduce sends the same bytes, but here the backend
    cannot choose a better schedule. Use this function to study the schedule or to build on it, and
    :func:`jaxcomm.mean` to train.

    Args:
      axis_name: The mesh axis, or axes, of the workers. The ring visits them in order.

    Returns:
      A transformation to place before the optimizer, without state. Updates are equal on all
      workers and keep their shape and dtype; float64 updates have float32 precision.
      `update(..., weight=w)` computes a weighted mean. NaN and infinity propagate to every worker.

    Raises:
      ValueError: In `update`, if `axis_name` is not bound, or an update is already summed or not
        floating-point.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> tx = jaxcomm.ring_mean("data")
      >>> average = lambda x: tx.update(x, tx.init(x))[0]
      >>> print(jax.vmap(average, axis_name="data")(jnp.array([1.0, 2.0, 6.0])))
      [3. 3. 3.]

    References:
      Patarasuk and Yuan, `Bandwidth optimal all-reduce algorithms for clusters of workstations
      <https://doi.org/10.1016/j.jpdc.2008.09.002>`_, 2009.

    Differs from the paper: the second half of the ring is one all-gather, which moves the same
    bytes, so that JAX types the results as equal on all workers.
    """

    def average(updates: PyTree, weight: jax.Array | float | None) -> PyTree:
        units, _, join = _units.split(updates, "bucket", _units.BUCKET_BYTES)
        units = [x * headroom(_axis.size(axis_name)) for x in units]
        if units and weight is not None:
            units = [*map(weigh(axis_name, weight, units), units)]
        return join([_ring_mean(x, axis_name) for x in units])

    return stateless(axis_name, "the exact mean", average)


CodecFor: TypeAlias = Callable[[int], Codec]
"""From the number of workers' updates in a sum to the codec that encodes the sum."""


class _Round(NamedTuple):
    distance: int  # worker i adds the sum of worker `i ^ distance`
    added: int  # the maximum number of workers' updates in a sum before the round


def _rounds(workers: int) -> tuple[list[_Round], int]:
    """The rounds, and the number of workers that then have the sum over all workers."""
    doubling = 1 << (workers.bit_length() - 1)  # The largest power of 2.
    has_rest = workers > doubling
    first = [_Round(doubling, 1)] if has_rest else []
    distances = [2**r for r in range(doubling.bit_length() - 1)]
    return [*first, *(_Round(d, min(d * (1 + has_rest), workers)) for d in distances)], doubling


@checked
@takes_options
def recursive_doubling_mean(
    codec_for: CodecFor,
    *,
    axis_name: AxisName = "data",
    **options: Unpack[AggregatorOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""Sums by recursive doubling: each round adds the sums of two workers and encodes again.

    .. math:: s_i^0 = x_i, \qquad q_i^r = \mathrm{decode}(\mathrm{encode}_{2^r}(s_i^r)), \qquad
              s_i^{r+1} = q_i^r + q_{i \oplus 2^r}^r

    where :math:`\oplus` is the exclusive or. After :math:`\log_2 n` rounds, all workers have the
    sum. Each worker then sends a part of its payload to all workers, so that the results are
    bit-equal, and JAX types them as equal on all workers. If :math:`n` is not a power of 2, the
    workers after the largest power of 2 first add their updates to those of the first workers, and
    then wait for the result. The method uses no more messages than a tree reduction. It suits
    codecs whose payload grows with the number of summed workers, such as those for sparse updates.

    A worker sends one payload per round, :math:`B_1 + B_2 + B_4 + \dots`, with statistics in the
    same message. It then sends :math:`(n-1)/n\, B_n` (with the largest power of 2 in place of
    :math:`n`), and a flag that reports non-finite updates (one float32).

    A codec with memory keeps one memory per round, which is equal on all workers with the same sum.
    With :func:`jaxcomm.compression.feedback.error_feedback` nothing is lost.

    Args:
      codec_for: A function from the maximum number of workers' updates in a sum to the codec that
        encodes the sum. The memory of the codec must be each worker's own.
      axis_name: The mesh axis, or axes, of the workers.
      **options: See :class:`jaxcomm.aggregation.AggregatorOptions`.

    Returns:
      A transformation to place before the optimizer, with the guarantees of
      :func:`jaxcomm.all_reduce_mean`. Unbiased if the codecs are.

    Raises:
      ValueError: If an option is out of range; in `init` and `update`, if `axis_name` is not bound;
        in `update`, if an update is already summed.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> from jaxcomm.aggregation import recursive_doubling_mean
      >>> from jaxcomm.compression.sparsifiers import nonzero
      >>> codec_for = lambda added: nonzero(density=min(added / 4, 1), granularity="element")
      >>> tx = recursive_doubling_mean(codec_for)
      >>> average = jax.jit(jax.vmap(lambda x: tx.update(x, tx.init(x))[0], axis_name="data"))
      >>> print(average(2 * jnp.eye(2, 4)))
      [[1. 1. 0. 0.]
       [1. 1. 0. 0.]]

    References:
      Renggli et al., `SparCML: High-Performance Sparse Communication for Machine Learning
      <https://doi.org/10.1145/3295500.3356222>`_, 2019 (SSAR_Recursive_double, of sparse vectors).

    Differs from the paper: the last step is a gather, in which each worker sends its part.
    """

    def plan() -> tuple[list[_Round], int, list[Codec]]:
        workers = _axis.size(axis_name)
        rounds, doubling = _rounds(workers)
        return (
            rounds,
            doubling,
            [
                without_global_diagnostics(codec_for(added))
                for added in (*(r.added for r in rounds), workers)
            ],
        )

    def init(x: jax.Array) -> Memory:
        holders = "the workers with the same sum"
        return Memory(
            [local_memory(codec, x, "recursive_doubling_mean", holders) for codec in plan()[2]], ()
        )

    def contexts_of(part: Part, number: int, leader: jax.Array | int) -> Context:
        """The context of a round; workers with the same sum have the same keys."""
        shared, drawn = jax.random.split(jax.random.fold_in(part.context.keys.shared, number))
        keys = Keys(shared, jax.random.fold_in(drawn, leader))
        memory = Memory(part.context.memory.own[number], ())
        return Context(keys, memory, shape=part.x.shape)

    def exchange(parts: list[Part]) -> Exchanged:
        rounds, doubling, codecs = plan()
        workers, worker = _axis.size(axis_name), _axis.index(axis_name)
        finite = everywhere(axis_name, all_finite(part.x for part in parts))
        scale = headroom(workers)
        sums = [part.x for part in parts]
        encoded: list[list[tuple[Context, jax.Array, Memory]]] = [[] for _ in parts]
        sent: list[jax.Array] = []
        partial_sums: list[jax.Array] = []

        def gather_parts(x: jax.Array) -> jax.Array:
            """`x` of the workers with the total, each of which sends its part."""
            row = to_rows(x, doubling)[_axis.index(axis_name) % doubling]
            return from_rows(_collectives.gather(row, axis_name)[:doubling], x.shape)

        def encode(number: int, leader: jax.Array | int) -> tuple[list[Context], list[PyTree]]:
            contexts = [contexts_of(part, number, leader) for part in parts]
            contents = []
            for unit, (context, x) in enumerate(zip(contexts, sums, strict=True)):
                content, memory = encode_local(codecs[number], context, x)
                encoded[unit].append((context.replace(statistics=content[1]), x, memory))
                contents.append(content)
            return contexts, contents

        def decode(number: int, contexts: list[Context], contents: PyTree) -> list[jax.Array]:
            return [
                decode_local(codecs[number], *pair) for pair in zip(contexts, contents, strict=True)
            ]

        for number, (distance, _) in enumerate(rounds):
            # Workers whose indices differ only in the lower bits have the same sum.
            leader = worker if distance == doubling else worker % doubling // distance
            contexts, contents = encode(number, leader)
            message = Message(axis_name, contents, to_message(contents))
            with jax.named_scope("partial_sums"):
                swapped = message.moved(
                    partial(_collectives.swap, axis_name=axis_name, distance=distance)
                )
            mine = decode(number, contexts, contents)
            theirs = decode(number, contexts, swapped)
            factor, sent = (1.0, sent) if number else (scale, mine)
            has_partner = (worker ^ distance) < workers
            sums = [
                a * factor + jnp.where(has_partner, b * factor, 0)
                for a, b in zip(mine, theirs, strict=True)
            ]
            partial_sums += sums
        contexts, contents = encode(len(rounds), 0)
        sent = sent or decode(len(rounds), contexts, contents)
        message = Message(axis_name, contents, to_message(contents))
        with jax.named_scope("sums"):
            gathered = message.moved(gather_parts)
        totals = decode(len(rounds), contexts, gathered)
        if partial_sums and any(codec.drop_overflow is not None for codec in codecs[:-1]):
            # The codecs of later rounds may not preserve NaN.
            totals = nan_unless_all_fit(axis_name, partial_sums, totals)
        parts = [
            part._replace(
                memory=Memory([memory.own for *_, memory in rounds], report=rounds),
                mean=x * (1 / scale / workers),
            )
            for part, rounds, x in zip(parts, encoded, totals, strict=True)
        ]
        return Exchanged(parts, finite, lambda: sent)

    def diagnose(context: Context, x: jax.Array, after: Memory) -> Diagnostics:
        rounds = [
            codec.diagnose(*each) for codec, each in zip(plan()[2], after.report, strict=True)
        ]
        return rounds[0]._replace(
            totals=add_by_name(each.totals for each in rounds),
            ratios=add_by_name(each.ratios for each in rounds),
        )

    # The codec of the first round, since the number of workers is not known yet.
    first = without_global_diagnostics(codec_for(1))
    unit_codec = first.replace(
        init=init, diagnose=diagnose, finalize=mean_is_update, drop_overflow=first
    )
    return coded_mean(axis_name, unit_codec, exchange, options, diagnosed=(first,))
