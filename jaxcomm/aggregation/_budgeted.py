"""A mean for workers of different speed: a slow one sends, receives and owns less."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxcomm import _axis, _collectives
from jaxcomm._collectives import from_message, gather_contents, to_message
from jaxcomm._contract import (
    AxisName,
    Codec,
    Context,
    Memory,
    PyTree,
    mean_is_update,
    target_is_unit,
)
from jaxcomm._require import checked, require_option
from jaxcomm.aggregation._all_gather import decode_local, encode_local
from jaxcomm.aggregation._coded import AggregatorOptions, coded_mean, takes_options
from jaxcomm.aggregation._exchange import Exchanged, Part, all_finite, everywhere
from jaxcomm.aggregation._rows import (
    decode_rows,
    from_rows,
    keys_of_means,
    keys_of_rows,
    mean_of_owned,
    to_rows,
)
from pallas_kernels._dispatch import nondifferentiable

CodecOf: TypeAlias = Callable[[Any], Codec]
"""From a budget to the codec of the rows that a worker with this budget sends."""


class BudgetPlan(NamedTuple):
    """Who sends with which codec, and who owns rows; static."""

    kinds: tuple[int, ...]  # for each worker, the number of its codec
    codecs: tuple[Codec, ...]
    owners: tuple[int, ...]  # the workers that own a row, ascending

    @property
    def slots(self) -> np.ndarray:
        """For each worker, the number of the row that it owns, or -1; int32[n]."""
        slots = np.full(len(self.kinds), -1, np.int32)
        slots[list(self.owners)] = np.arange(len(self.owners))
        return slots

    def pairs(self, turn: int, kind: int) -> list[tuple[int, int]]:
        """Who sends to which owner in a turn, with one codec; row `(turn - sender) % n` is sent."""
        workers = len(self.kinds)
        senders = [(turn - row) % workers for row in range(len(self.owners))]
        return [
            (sender, owner)
            for sender, owner in zip(senders, self.owners, strict=True)
            if self.kinds[sender] == kind and sender != owner
        ]


def plan_of(codec_for: CodecOf, budget: Any, slow: Mapping[int, Any], workers: int) -> BudgetPlan:
    """The plan for a number of workers; if all are slow, all own rows.

    Raises:
      ValueError: If `slow` names a worker that does not exist.
    """
    if beyond := sorted(worker for worker in slow if not 0 <= worker < workers):
        raise ValueError(f"`slow` names the workers {beyond}, but there are only {workers}.")
    budgets = [slow.get(worker, budget) for worker in range(workers)]
    kinds = [*dict.fromkeys(budgets)]
    owners = [worker for worker in range(workers) if worker not in slow] or [*range(workers)]
    return BudgetPlan(
        tuple(map(kinds.index, budgets)), tuple(codec_for(each) for each in kinds), tuple(owners)
    )


def _require_unbiased(codec: Codec, option: str) -> None:
    """Raises unless the codec is unbiased and has no memory."""
    require_option(codec, option, Codec)
    if jax.tree.leaves(codec.init(jnp.zeros(4))) or codec.claims.variance is None:
        raise ValueError(
            f"`{option}` of `budgeted_mean` must be an unbiased codec without memory, such as "
            "`dither()` or `random_k()`: all means would lack what a slow worker does not send."
        )


def _messages(
    codec: Codec, parts: list[Part], rows: list[Context], count: int
) -> tuple[jax.Array, PyTree]:
    """The message to each owner, `[count, words]`, and the shapes of what it packs."""
    units = nondifferentiable("budgeted_mean", *(part.x for part in parts))
    contents = [
        jax.vmap(functools.partial(encode_local, codec))(context, to_rows(x, count))[0]
        for x, context in zip(units, rows, strict=True)
    ]
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), contents)
    messages: jax.Array = jax.vmap(to_message)(contents)
    return messages, like


def _own_messages(
    plan: BudgetPlan, me: jax.Array, parts: list[Part], rows: list[Context]
) -> tuple[list[jax.Array], list[PyTree]]:
    """This worker's messages; those of other codecs are zeros, which it does not compute."""
    count = len(plan.owners)
    encode = [lambda each=each: _messages(each, parts, rows, count)[0] for each in plan.codecs]
    likes = [
        jax.eval_shape(lambda each=each: _messages(each, parts, rows, count)[1])
        for each in plan.codecs
    ]
    shapes = [*map(jax.eval_shape, encode)]

    def only(kind: int) -> list[jax.Array]:
        given = [
            encode[other]() if other == kind else jnp.zeros(shape.shape, shape.dtype)
            for other, shape in enumerate(shapes)
        ]
        return [_axis.varying_like(x, ([part.x for part in parts], me)) for x in given]

    branches = [lambda kind=kind: only(kind) for kind in range(len(plan.codecs))]
    if len(branches) == 1:
        return branches[0](), likes
    # Each worker runs its own branch: nothing in it communicates.
    return lax.switch(jnp.asarray(plan.kinds, jnp.int32)[me], branches), likes


@jax.named_scope("rows")
def _to_owners(
    axis_name: AxisName, plan: BudgetPlan, me: jax.Array, messages: list[jax.Array]
) -> list[jax.Array]:
    """What an owner receives, `[workers, words]` for each codec: rows of its senders are valid."""
    workers, count = len(plan.kinds), len(plan.owners)
    slot = jnp.asarray(plan.slots)[me]
    received = []
    for kind, rows in enumerate(messages):
        own = rows[jnp.maximum(slot, 0)]
        arrived = jnp.zeros((workers, *own.shape), own.dtype)
        arrived = _axis.varying_like(arrived, rows).at[me].set(own)
        for turn in range(workers):
            if pairs := plan.pairs(turn, kind):
                row = rows[jnp.minimum((turn - me) % workers, count - 1)]
                one = _collectives.permute(row, axis_name, pairs)
                sender = (turn - slot) % workers
                # In the turn of its own row a worker receives nothing.
                arrived = arrived.at[sender].set(jnp.where(sender == me, own, one))
        received.append(arrived)
    return received


@checked
@takes_options
def budgeted_mean(
    codec_for: CodecOf,
    budget: Any,
    *,
    slow: Mapping[int, Any],
    mean_codec: Codec | None = None,
    axis_name: AxisName = "data",
    **options: Unpack[AggregatorOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""Averages in two stages to which workers on slow links send fewer levels or coordinates.

    .. math:: r_k = \frac{1}{n} \sum_i Q_{b_i}(x_{i,k}), \qquad
              \bar x = (Q(r_1), \ldots, Q(r_m))

    Worker :math:`i` encodes its update with the codec of its budget :math:`b_i`, and sends row
    :math:`k` to the owner of this row. Only the :math:`m` workers that are not slow own rows. Each
    codec is unbiased, so a slow worker has the weight :math:`1 / n` of all others, and only its
    own term has more variance. With :math:`\omega_i` of its codec and :math:`\omega` of the second
    stage:

    .. math:: \mathbb{E}\Big\|\bar x - \frac{1}{n} \sum_i x_i\Big\|^2 \le
              \frac{1}{n^2} \sum_i \big((1 + \omega)\, \omega_i + n \omega\big) \|x_i\|^2

    **What is sent.** A collective of all workers has one static shape, so a message that is masked
    does not shrink. The first stage therefore consists of permutations, in which a worker takes
    part only as the sender of a row of its own size. With :math:`p_i` bytes of worker :math:`i`'s
    payload and :math:`p` of the mean's, a slow worker sends :math:`p_i + (n-1)/m\, p` bytes and
    receives :math:`(n-1)/m\, p`; all others send at most as in
    :func:`jaxcomm.aggregation.two_stage_mean` with :math:`m` rows. The second stage is an
    all-gather of equal parts: all workers need all of the mean, so :math:`p` does not fall, and a
    slow worker forwards it. `bytes_sent` of :func:`jaxcomm.wire.account` shows those of a worker.
    A flag that reports non-finite updates is one float32.

    Args:
      codec_for: A function from a budget to an unbiased codec without memory, such as `lambda k:
        dither(levels=k)` or `lambda ratio: random_k(ratio=ratio)`. Each row has separate
        statistics.
      budget: The budget of the other workers, a Python number.
      slow: The budgets of slow workers, by their index on the axis. If all workers are slow, all
        own rows.
      mean_codec: The unbiased codec of the second stage. Default: `codec_for(budget)`.
      axis_name: The mesh axis, or axes, of the workers.
      **options: See :class:`jaxcomm.aggregation.AggregatorOptions`.

    Returns:
      A transformation to place before the optimizer, with the guarantees of
      :func:`jaxcomm.all_reduce_mean`. It is unbiased.

    Raises:
      ValueError: If an option is out of range, or a codec is biased or has memory; in `update`, if
        `slow` names a worker that does not exist, `axis_name` is not bound, or an update is already
        summed.
      TypeError: If an update is differentiated: what owners receive is words.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> from jaxcomm.compression.quantizers import dither
      >>> codec_for = lambda levels: dither(levels=levels)
      >>> tx = jaxcomm.budgeted_mean(codec_for, 127, slow={0: 1})
      >>> average = jax.vmap(lambda x: tx.update(x, tx.init(x))[0], axis_name="data")
      >>> print(jax.jit(average)(jnp.array([[4.0, -4.0], [2.0, 0.0], [0.0, 2.0]])))
      [[ 2.         -0.6666667]
       [ 2.         -0.6666667]
       [ 2.         -0.6666667]]

    References:
      Tang et al., `Communication-Efficient Distributed Deep Learning: A Comprehensive Survey
      <https://arxiv.org/abs/2003.06307>`_, 2020. The survey names heterogeneous devices as future
      work; the method is ours.
    """
    for each in dict.fromkeys([budget, *slow.values()]):
        _require_unbiased(codec_for(each), f"codec_for({each!r})")
    own_codec = codec_for(budget) if mean_codec is None else mean_codec
    _require_unbiased(own_codec, "mean_codec")

    def exchange(parts: list[Part]) -> Exchanged:
        workers, me = _axis.size(axis_name), _axis.index(axis_name)
        plan = plan_of(codec_for, budget, slow, workers)
        count, slot = len(plan.owners), jnp.asarray(plan.slots)[me]
        finite = everywhere(axis_name, all_finite(part.x for part in parts))
        widths = [-(-part.x.size // count) for part in parts]
        keys = [part.context.keys for part in parts]
        rows = [
            Context(of_rows, Memory(), shape=(width,))
            for of_rows, width in zip(keys_of_rows(keys, count), widths, strict=True)
        ]
        messages, likes = _own_messages(plan, me, parts, rows)
        received = _to_owners(axis_name, plan, me, messages)
        means = [jnp.zeros(width, jnp.float32) for width in widths]
        for kind, (codec, like) in enumerate(zip(plan.codecs, likes, strict=True)):
            senders = np.flatnonzero(np.asarray(plan.kinds) == kind)
            contents = jax.vmap(lambda one, like=like: from_message(one, like))(
                received[kind][senders]
            )
            share = len(senders) / workers
            means = [
                total + share * mean_of_owned(codec, slot, context, content, context.shape)
                for total, context, content in zip(means, rows, contents, strict=True)
            ]
        contexts = [
            Context(of_mean, Memory(), shape=(width,))
            for of_mean, width in zip(keys_of_means(keys, count), widths, strict=True)
        ]
        resent = [
            encode_local(own_codec, context, jnp.where(slot >= 0, mean, 0))[0]
            for context, mean in zip(contexts, means, strict=True)
        ]
        with jax.named_scope("means"):
            gathered = gather_contents(resent, axis_name)
        results = []
        for part, context, content in zip(parts, contexts, gathered, strict=True):
            owned = jax.tree.map(lambda x: x[np.asarray(plan.owners)], content)
            whole = decode_rows(own_codec, context, owned)
            results.append(part._replace(mean=from_rows(whole, part.x.shape)))

        def sent() -> list[jax.Array]:
            """What the owners decode from this worker."""
            kind, decoded = jnp.asarray(plan.kinds, jnp.int32)[me], [0.0 * part.x for part in parts]
            for number, (codec, like) in enumerate(zip(plan.codecs, likes, strict=True)):
                contents = jax.vmap(lambda one, like=like: from_message(one, like))(
                    messages[number]
                )
                for unit, (part, context) in enumerate(zip(parts, rows, strict=True)):
                    of_rows = jax.vmap(lambda *args, codec=codec: decode_local(codec, *args))(
                        context, contents[unit]
                    )
                    mine = from_rows(of_rows, part.x.shape)
                    decoded[unit] = jnp.where(kind == number, mine, decoded[unit])
            return decoded

        return Exchanged(results, finite, sent)

    most = codec_for(budget)
    unit_codec = most.replace(
        diagnose=target_is_unit,
        finalize=mean_is_update,
        scope="leaf" if "leaf" in (most.scope, own_codec.scope) else "bucket",
    )
    return coded_mean(axis_name, unit_codec, exchange, options)
