"""The mean by recursive doubling: pairs add, then pairs of pairs, each sum encoded anew."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

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
from jaxcomm.aggregation._info import Observations, add_observations
from jaxcomm.aggregation._rows import from_rows, to_rows
from jaxcomm.compression._means import headroom

CodecOf: TypeAlias = Callable[[int], Codec]
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
def doubling_mean(
    axis_name: AxisName,
    codec_of: CodecOf,
    *,
    scope: _buckets.Scope | None = None,
    bucket_bytes: int | None = None,
    seed: int = 0,
    key: jax.Array | None = None,
    info: bool = False,
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
      codec_of: How many workers' updates are in a sum, at most, to the codec that encodes it.
        What it remembers must be each worker's own.
      scope: What is encoded as one: a `"leaf"`, or a `"bucket"` of leaves (`"tree"` likewise).
        Default: what the codec asks for, `codec.scope`.
      bucket_bytes: The most float32 bytes joined in a bucket. Default: 32 MiB.
      seed: Seed of the randomness; may be traced.
      key: A typed threefry key, in place of `seed`.
      info: Whether the state's field `info` tells of the step: `compression_error`, `density`,
        `residual_norm`; see :func:`jaxcomm.global_qsgd`.

    Returns:
      A transformation to place before the optimizer, with the guarantees of
      :func:`jaxcomm.summed_mean`. Unbiased if the codecs are.

    Raises:
      ValueError: If an option is out of range; in `init` and `update`, if `axis_name` is not bound;
        in `update`, if an update is already summed.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> from jaxcomm.aggregation import doubling_mean
      >>> from jaxcomm.compression.sparsifiers import nonzero
      >>> codec_of = lambda added: nonzero(density=min(added / 4, 1), granularity="element")
      >>> tx = doubling_mean("data", codec_of)
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
        return rounds, doubling, [codec_of(added) for _, added in rounds] + [codec_of(workers)]

    def init(x: jax.Array) -> Memory:
        _axis.require_bound(axis_name)
        knows = "those that have a sum"
        return Memory([own_memory(codec, x, "doubling_mean", knows) for codec in plan()[2]], ())

    def coins_of(coin: Coins, number: int, leader: jax.Array | int) -> Coins:
        """Those of a round, which all draw alike that have the same sum."""
        public, drawn = jax.random.split(jax.random.fold_in(coin.public, number))
        return Coins(public, jax.random.fold_in(drawn, leader))

    def exchange(coins: list[Coins], memories: list[Memory], units: list[jax.Array]) -> Exchanged:
        rounds, doubling, codecs = plan()
        workers, own = _axis.size(axis_name), _axis.index(axis_name)
        _, finite = agree(axis_name, (), [()] * len(units), all_finite(units))
        scale = headroom(workers)
        sums = units
        after: list[list[PyTree]] = [[] for _ in units]
        firsts: list[jax.Array] = []
        on_the_way: list[jax.Array] = []
        common: list[list[tuple[jax.Array, PyTree]]] = [[] for _ in units]

        def encode(number: int, leader: jax.Array | int) -> tuple[list[Coins], list[PyTree]]:
            codec, contents = codecs[number], []
            drawn = [coins_of(coin, number, leader) for coin in coins]
            for unit, x in enumerate(sums):
                own_memories = memories[unit].own
                content, kept = encode_alone(codec, drawn[unit], own_memories[number], x)
                after[unit].append(kept)
                common[unit].append((drawn[unit].public, content[1]))
                contents.append(content)
            return drawn, contents

        def decode(number: int, drawn: list[Coins], contents: list[PyTree]) -> list[jax.Array]:
            return [
                codecs[number].decode(coin.public, payload, measured, 1, 1, x.shape)
                for coin, (payload, measured), x in zip(drawn, contents, units, strict=True)
            ]

        for number, (distance, _) in enumerate(rounds):
            # Workers have the same sum whose indices differ in the lower bits alone.
            leader = own if distance == doubling else own % doubling // distance
            drawn, contents = encode(number, leader)
            message = _axis.swap(to_message(contents), axis_name, distance)
            mine = decode(number, drawn, contents)
            theirs = decode(number, drawn, from_message(message, contents))
            factor, firsts = (1.0, firsts) if number else (scale, mine)
            has_partner = (own ^ distance) < workers
            sums = [
                a * factor + jnp.where(has_partner, b * factor, 0)
                for a, b in zip(mine, theirs, strict=True)
            ]
            on_the_way += sums
        drawn, contents = encode(len(rounds), 0)
        firsts = firsts or decode(len(rounds), drawn, contents)
        message = to_message(contents)
        part = to_rows(message, doubling)[own % doubling]
        whole = from_rows(_axis.gather(part, axis_name)[:doubling], message.size)
        totals = decode(len(rounds), drawn, from_message(whole, contents))
        if on_the_way and any(codec.dropping is not None for codec in codecs[:-1]):
            totals = nan_unless_all_fit(axis_name, on_the_way, totals)  # Others may keep no NaN.
        return Exchanged(
            [total * (1 / scale / workers) for total in totals],
            [Memory(own, ()) for own in after],
            finite,
            lambda: firsts,
            [(coin.public, each) for coin, each in zip(coins, common, strict=True)],
        )

    def tell(memory: Memory) -> dict[str, jax.Array]:
        news: dict[str, jax.Array] = {}
        for codec, own in zip(plan()[2], memory.own, strict=True):
            for name, told in codec.tell(Memory(own, ())).items():
                news[name] = told + news[name] if name in news else told
        return news

    def target(memory: Memory, x: jax.Array) -> jax.Array:
        return plan()[2][0].target(Memory(memory.own[0], ()), x)

    def measure(coins: Coins, memory: Memory, x: jax.Array) -> list[tuple[jax.Array, PyTree]]:
        """Of each round, as if all were given `x`, for the names that `observe` tells."""
        del memory
        return [(coins.public, each.measure(coins, each.init(x), x)) for each in plan()[2]]

    def observe(
        public: jax.Array, rounds: list[tuple[jax.Array, PyTree]], x: jax.Array
    ) -> Observations:
        del public
        return add_observations(
            observing_alone(each).observe(*pair, x)
            for each, pair in zip(plan()[2], rounds, strict=True)
        )

    codec = codec_of(1)._replace(
        init=init,
        measure=measure,
        target=target,
        tell=tell,
        observe=observe,
        settle=settled,
        dropping=codec_of(1),  # Of any round: the number of workers is not known yet.
    )
    return coded_mean(
        axis_name,
        codec,
        exchange,
        scope=scope,
        bucket_bytes=bucket_bytes,
        seed=seed,
        key=key,
        info=info,
    )
