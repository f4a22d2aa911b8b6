"""The mean by recursive doubling: pairs add, then pairs of pairs, each sum encoded anew."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias, Unpack

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
from jaxcomm.aggregation._rows import from_rows, to_rows
from jaxcomm.compression._means import headroom

CodecFor: TypeAlias = Callable[[int], Codec]
"""From how many workers' updates are in a sum to the codec that encodes it."""


class _Round(NamedTuple):
    distance: int  # of partners: worker i adds what worker `i ^ distance` has
    added: int  # at most so many workers are in a sum before it


def _rounds(workers: int) -> tuple[list[_Round], int]:
    """The rounds, and how many workers have the sum of all after them."""
    doubling = 1 << (workers.bit_length() - 1)  # The largest power of 2.
    beyond = workers > doubling
    first = [_Round(doubling, 1)] if beyond else []
    distances = [2**r for r in range(doubling.bit_length() - 1)]
    return [*first, *(_Round(d, min(d * (1 + beyond), workers)) for d in distances)], doubling


@checked()
@takes_options
def recursive_doubling_mean(
    axis_name: AxisName,
    codec_for: CodecFor,
    **options: Unpack[AggregatorOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""Adds in rounds, in which the workers that have a sum double; each sum is encoded anew.

    .. math:: s_i^0 = x_i, \qquad q_i^r = \mathrm{decode}(\mathrm{encode}_{2^r}(s_i^r)), \qquad
              s_i^{r+1} = q_i^r + q_{i \oplus 2^r}^r

    with :math:`i \oplus 2^r` the exclusive or. After :math:`\log_2 n` rounds all have the sum;
    each then sends a part of its code to all, so that the results are equal to the bit, and are
    known to be. Where :math:`n` is no power of 2, the workers beyond the largest power add theirs
    to the first ones' before, and take no part until the end. In no more messages than a tree has,
    this suits codecs whose payload grows with what is in a sum, as that of sparse updates does.

    A worker sends one payload a round, :math:`B_1 + B_2 + B_4 + \dots`, statistics beside them in
    the same message of bytes, then :math:`(n-1)/n\, B_n` (over the largest power of 2 in place of
    :math:`n`), and one float32 flag.

    A codec with memory has it in each round; all workers that have a sum remember the same. With
    :func:`jaxcomm.compression.feedback.error_feedback` nothing is lost.

    Args:
      axis_name: The mesh axis, or axes, that number the workers.
      codec_for: How many workers' updates are in a sum, at most, to the codec that encodes it.
        What it remembers must be each worker's own.
      **options: As :class:`AggregatorOptions` says.

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
      >>> tx = recursive_doubling_mean("data", codec_for)
      >>> average = jax.jit(jax.vmap(lambda x: tx.update(x, tx.init(x))[0], axis_name="data"))
      >>> print(average(2 * jnp.eye(2, 4)))
      [[1. 1. 0. 0.]
       [1. 1. 0. 0.]]

    References:
      Renggli et al., `SparCML: High-Performance Sparse Communication for Machine Learning
      <https://doi.org/10.1145/3295500.3356222>`_, 2019 (SSAR_Recursive_double, of sparse vectors).

    Differs from the paper: it ends in a gather, of which a worker sends its part.
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
        _axis.require_bound(axis_name)
        knows = "those that have a sum"
        return Memory(
            [local_memory(codec, x, "recursive_doubling_mean", knows) for codec in plan()[2]], ()
        )

    def contexts_of(part: Part, number: int, leader: jax.Array | int) -> Context:
        """That of a round, in which all draw alike that have the same sum."""
        public, drawn = jax.random.split(jax.random.fold_in(part.context.coins.public, number))
        coins = Coins(public, jax.random.fold_in(drawn, leader))
        memory = Memory(part.context.memory.own[number], ())
        return Context(coins, memory, shape=part.x.shape)

    def exchange(parts: list[Part]) -> Exchanged:
        rounds, doubling, codecs = plan()
        workers, own = _axis.size(axis_name), _axis.index(axis_name)
        finite = everywhere(axis_name, all_finite(part.x for part in parts))
        scale = headroom(workers)
        sums = [part.x for part in parts]
        after: list[list[PyTree]] = [[] for _ in parts]
        known: list[list[tuple[Context, jax.Array]]] = [[] for _ in parts]
        firsts: list[jax.Array] = []
        on_the_way: list[jax.Array] = []

        def encode(number: int, leader: jax.Array | int) -> tuple[list[Context], list[PyTree]]:
            contexts = [contexts_of(part, number, leader) for part in parts]
            contents = []
            for unit, (context, x) in enumerate(zip(contexts, sums, strict=True)):
                content, kept = encode_local(codecs[number], context, x)
                after[unit].append(kept.own)
                known[unit].append((context.replace(statistics=content[1]), x))
                contents.append(content)
            return contexts, contents

        def decode(number: int, contexts: list[Context], contents: PyTree) -> list[jax.Array]:
            return [
                decode_local(codecs[number], *pair) for pair in zip(contexts, contents, strict=True)
            ]

        for number, (distance, _) in enumerate(rounds):
            # Workers have the same sum whose indices differ in the lower bits alone.
            leader = own if distance == doubling else own % doubling // distance
            contexts, contents = encode(number, leader)
            message = _axis.swap(to_message(contents), axis_name, distance)
            mine = decode(number, contexts, contents)
            theirs = decode(number, contexts, from_message(message, contents))
            factor, firsts = (1.0, firsts) if number else (scale, mine)
            has_partner = (own ^ distance) < workers
            sums = [
                a * factor + jnp.where(has_partner, b * factor, 0)
                for a, b in zip(mine, theirs, strict=True)
            ]
            on_the_way += sums
        contexts, contents = encode(len(rounds), 0)
        firsts = firsts or decode(len(rounds), contexts, contents)
        message = to_message(contents)
        row = to_rows(message, doubling)[own % doubling]
        whole = from_rows(_axis.gather(row, axis_name)[:doubling], message.size)
        totals = decode(len(rounds), contexts, from_message(whole, contents))
        if on_the_way and any(codec.drop_overflow is not None for codec in codecs[:-1]):
            totals = nan_unless_all_fit(axis_name, on_the_way, totals)  # Others may keep no NaN.
        units = [
            Encoded(
                part.context.replace(statistics=each), Memory(own, ()), x * (1 / scale / workers)
            )
            for part, each, own, x in zip(parts, known, after, totals, strict=True)
        ]
        return Exchanged(units, finite, lambda: firsts)

    def diagnose(context: Context, x: jax.Array, after: Memory) -> Diagnostics:
        told = [
            codec.diagnose(of_round, given, Memory(own, ()))
            for codec, (of_round, given), own in zip(
                plan()[2], context.statistics, after.own, strict=True
            )
        ]
        return told[0]._replace(
            totals=add_totals(each.totals for each in told),
            ratios=add_ratios(each.ratios for each in told),
        )

    # Of any round: the number of workers is not known yet.
    first = without_global_diagnostics(codec_for(1))
    of_units = first._replace(
        init=init, diagnose=diagnose, finalize=mean_is_update, drop_overflow=first
    )
    return coded_mean(axis_name, of_units, exchange, options, tells=(first,))
