"""Lazy uploads: a worker sends the change of its gradient only if the change is large enough."""

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm._contract import Codec, Context, Memory, PyTree
from jaxcomm._require import AboveZero, BelowOne, Natural, Positive, Range, checked
from jaxcomm.aggregation._lazy import Upload, remembered, uploaded, uploads_now
from jaxcomm.synchronization._trees import (
    chosen,
    minus,
    narrow,
    plus,
    rows_of,
    squared_norm,
    wide,
    with_row,
)
from jaxcomm.synchronization.events._engine import Event, Policy, Steps, Task, Work
from jaxcomm.synchronization.events._messages import Messages, Sent, bytes_of, messages, sent
from pallas_kernels.pack import pack, unpack


class LazyState(NamedTuple):
    """The state of a server."""

    params: PyTree
    total: PyTree  # the sum of the last uploads, in float32 at least
    skipped: jax.Array  # int32[workers], the rounds since its last upload; LAG-PS only
    path: PyTree  # leaves [max_skip + 1, ...], the parameters of the last rounds; LAG-PS only
    uploaded: jax.Array  # int32[workers], the round of its last upload; LAG-PS only
    moves: jax.Array  # float32[memory], the squared norms of the last steps
    expected: jax.Array  # bool[workers], whose gradients the round still waits for
    rounds: jax.Array  # int32[]
    present: jax.Array  # bool[workers]
    changes: jax.Array  # int32[], how often workers have left or joined


class Round(NamedTuple):
    """What a worker receives at the beginning of a round."""

    params: PyTree
    limit: jax.Array  # float32[], the squared norm of a change that is large enough
    changes: jax.Array  # int32[]


class Change(NamedTuple):
    """The message of a worker that decides whether to upload."""

    uploads: jax.Array  # bool[]
    changes: jax.Array  # int32[], of the round
    payload: PyTree  # of the upload; None if it is not sent


class Lazy(NamedTuple):
    """The memory of a worker that decides whether to upload."""

    upload: Upload
    changes: jax.Array  # int32[], of its last round


@checked
def lag_wk(
    learning_rate: AboveZero,
    *,
    threshold: BelowOne = 0.5,
    memory: Positive = 10,
    max_skip: Natural = 100,
) -> Policy:
    r"""Lazily aggregated gradients (LAG-WK): workers decide whether to upload.

    .. math:: \|\hat g_i - g_i\|^2 \ge \frac{1}{\eta^2} \sum_{d=1}^{D} \frac{\xi}{D}
              \|x^{k + 1 - d} - x^{k - d}\|^2 \;\Rightarrow\; \hat g_i \gets g_i, \qquad
              x^{k+1} = x^k - \eta \frac{1}{n} \sum_i \hat g_i

    A round waits for all workers. Each receives the parameters, and sends the change of its
    gradient since its last upload, if the change is large or it has skipped `max_skip` rounds. The
    server keeps the sum of the last uploads. With noisy gradients, changes stay large, and all
    workers upload. If a worker leaves or joins, all upload again. A message begins with 5 bytes:
    whether it has an upload, and how often workers have left or joined.

    Args:
      learning_rate: :math:`\eta`, above 0. The paper's rate is :math:`\eta / n`, of the sum.
      threshold: :math:`\xi` in [0, 1). With 0, all workers upload in each round.
      memory: :math:`D`, the number of steps that the threshold looks back.
      max_skip: The most rounds in a row that a worker skips.

    Returns:
      A policy, for :func:`event_loop` and :func:`jaxcomm.asynchronous.train`. Each worker keeps its
      last upload.

    Raises:
      ValueError: If `learning_rate` is not positive, or another option is out of range.

    Example:
      >>> from jaxcomm.synchronization import events
      >>> policy = events.lag_wk(0.1, threshold=0.2)

    References:
      Chen et al., `LAG: Lazily Aggregated Gradient for Communication-Efficient Distributed Learning
      <https://arxiv.org/abs/1805.09965>`_, 2018.

    Differs from the paper: `max_skip`, which is from LAQ.
    """
    return _by_workers(learning_rate, threshold, memory, max_skip, messages(None), strict=False)


@checked
def laq(
    learning_rate: AboveZero,
    bits: Annotated[int, Range(least=1, most=16)] = 4,
    *,
    threshold: BelowOne = 0.5,
    memory: Positive = 10,
    max_skip: Natural = 100,
) -> Policy:
    r"""Lazily aggregated quantized gradients (LAQ): LAG-WK whose uploads have few bits.

    .. math:: \delta_i = Q_b(g_i - \hat g_i), \qquad
              \|\delta_i\|^2 > \frac{1}{\eta^2} \sum_{d=1}^{D} \frac{\xi}{D}
              \|x^{k + 1 - d} - x^{k - d}\|^2 + 3 (\|\varepsilon_i\|^2 + \|\hat\varepsilon_i\|^2)
              \;\Rightarrow\; \hat g_i \gets \hat g_i + \delta_i

    :math:`Q_b` rounds to the nearest of :math:`2^b` points between the largest magnitudes of a
    leaf, so that :math:`\|Q_b(x) - x\|_\infty \le \|x\|_\infty / (2^b - 1)`. The rounding errors of
    this change and of the last upload are :math:`\varepsilon_i` and :math:`\hat\varepsilon_i`. An
    upload has b bits per coordinate and a float32 per leaf. Rounds are those of :func:`lag_wk`.

    Args:
      learning_rate: As for :func:`lag_wk`.
      bits: b, an int from 1 to 16.
      threshold: As for :func:`lag_wk`.
      memory: As for :func:`lag_wk`.
      max_skip: As for :func:`lag_wk`. With 0, all workers upload in each round.

    Returns:
      A policy, as of :func:`lag_wk`.

    Raises:
      ValueError: As for :func:`lag_wk`, or if `bits` is out of range.

    Example:
      >>> from jaxcomm.synchronization import events
      >>> policy = events.laq(0.1, bits=3)

    References:
      Sun et al., `Communication-Efficient Distributed Learning via Lazily Aggregated Quantized
      Gradients <https://arxiv.org/abs/1909.07588>`_, 2019.

    Differs from the paper: each leaf has its own largest magnitude.
    """
    upload = messages(_nearest_on_grid(bits))
    return _by_workers(learning_rate, threshold, memory, max_skip, upload, strict=True)


@checked
def lag_ps(
    learning_rate: AboveZero,
    smoothness: Sequence[float],
    *,
    threshold: BelowOne = 0.5,
    memory: Positive = 10,
    max_skip: Natural = 100,
) -> Policy:
    r"""Lazily aggregated gradients (LAG-PS): the server decides whom to ask.

    .. math:: L_i^2 \|\hat x_i - x^k\|^2 \ge \frac{1}{\eta^2} \sum_{d=1}^{D} \frac{\xi}{D}
              \|x^{k + 1 - d} - x^{k - d}\|^2 \;\Rightarrow\; \text{worker } i \text{ is asked}

    Here :math:`\hat x_i` is the parameters of the worker's last upload. The server sends parameters
    to the workers that it asks. They compute a gradient and upload its change; the others compute
    nothing. If no worker is asked, the server takes more steps at once, until one is.

    Args:
      learning_rate: As for :func:`lag_wk`.
      smoothness: :math:`L_i`, one number above 0 per worker: the Lipschitz constant of its
        gradient. Steps descend if :math:`\eta` times their mean is at most 1.
      threshold: As for :func:`lag_wk`.
      memory: As for :func:`lag_wk`.
      max_skip: As for :func:`lag_wk`.

    Returns:
      A policy, as of :func:`lag_wk`. Workers that uploaded in one round have the same
      :math:`\hat x_i`. So the server compares the parameters of the last `max_skip` rounds, however
      many workers there are. Not for :func:`jaxcomm.asynchronous.train`: the smoothness is that of
      a worker's own examples, and the sum needs the last gradient of a dead one, too.

    Raises:
      ValueError: As for :func:`lag_wk`; when started, if `smoothness` has another number.

    Example:
      >>> from jaxcomm.synchronization import events
      >>> policy = events.lag_ps(0.1, smoothness=[1.0, 1.0, 4.0, 9.0])

    References:
      Chen et al., `LAG: Lazily Aggregated Gradient for Communication-Efficient Distributed Learning
      <https://arxiv.org/abs/1805.09965>`_, 2018.

    Differs from the paper: `max_skip`, which is from LAQ.
    """
    lipschitz, rounds = np.asarray(smoothness, np.float32), max_skip + 1

    def init(params: PyTree, workers: int) -> LazyState:
        if len(smoothness) != workers:
            raise ValueError(f"`smoothness` must have {workers} numbers, got {len(smoothness)}.")
        return _start(params, workers, memory, max_skip)._replace(
            path=rows_of(wide(params), rounds)
        )

    def asked(state: LazyState) -> jax.Array:
        distances = jnp.zeros(rounds, jnp.float32)
        for x, y in zip(*map(jax.tree.leaves, (state.path, wide(state.params))), strict=True):
            squared = jnp.sum(jnp.square(x - y[None]), axis=tuple(range(1, x.ndim)))
            distances = distances + squared.astype(jnp.float32)
        own = distances[state.uploaded % rounds]
        limit = _limit(state, threshold, learning_rate)
        return ~(jnp.asarray(lipschitz**2) * own < limit) | (state.skipped >= max_skip)

    def next_round(state: LazyState) -> LazyState:
        def step(state: LazyState) -> LazyState:
            after = _step(state, learning_rate)
            expected = asked(after)
            return after._replace(
                skipped=jnp.where(expected, after.skipped, after.skipped + 1),
                expected=expected,
                path=with_row(after.path, after.rounds % rounds, wide(after.params)),
            )

        return lax.while_loop(lambda state: ~jnp.any(state.expected), step, state)

    def steps(work: Work) -> Steps:
        def step(last: PyTree, view: PyTree, task: Task) -> tuple[jax.Array, PyTree, PyTree]:
            loss, gradient = work(view, task)
            return loss, minus(wide(gradient), last), wide(gradient)

        return step

    def finish(state: LazyState, event: Event, change: PyTree) -> tuple[LazyState, PyTree, Sent]:
        worker = event.worker
        arrived = state._replace(
            total=plus(state.total, change),
            skipped=state.skipped.at[worker].set(0),
            uploaded=state.uploaded.at[worker].set(state.rounds),
            expected=state.expected.at[worker].set(False),
        )
        counts = sent(1, bytes_of(change), 1, bytes_of(state.params))
        return next_round(arrived), (), counts

    return Policy(
        init=init,
        view=lambda state, worker: state.params,
        steps=steps,
        finish=finish,
        model=lambda state: state.params,
        join=lambda params, workers: jax.tree.map(jnp.zeros_like, wide(params)),
        begins=lambda state, idle: idle & state.expected,
    )


def _start(params: PyTree, workers: int, memory: int, max_skip: int) -> LazyState:
    """All workers are expected, and must upload."""
    return LazyState(
        params=params,
        total=jax.tree.map(jnp.zeros_like, wide(params)),
        skipped=jnp.full(workers, max_skip, jnp.int32),
        path=(),
        uploaded=jnp.zeros(workers, jnp.int32),
        moves=jnp.zeros(memory, jnp.float32),
        expected=jnp.ones(workers, bool),
        rounds=jnp.zeros((), jnp.int32),
        present=jnp.ones(workers, bool),
        changes=jnp.zeros((), jnp.int32),
    )


def _limit(state: LazyState, threshold: float, learning_rate: float) -> jax.Array:
    return threshold * jnp.mean(state.moves) / learning_rate**2


def _step(state: LazyState, learning_rate: float) -> LazyState:
    """The server's step with the mean of the last uploads."""
    workers = jnp.sum(state.present, dtype=jnp.int32)
    change = jax.tree.map(lambda x: x * (-learning_rate / workers.astype(x.dtype)), state.total)
    move = squared_norm(change).astype(jnp.float32)
    return state._replace(
        params=narrow(plus(wide(state.params), change), state.params),
        moves=remembered(state.moves, move),
        rounds=state.rounds + 1,
    )


def _by_workers(
    learning_rate: float,
    threshold: float,
    memory: int,
    max_skip: int,
    upload: Messages,
    *,
    strict: bool,
) -> Policy:
    """Lazy uploads that workers decide on; `strict` if an upload must exceed the limit."""

    def view(state: LazyState, worker: jax.Array) -> Round:
        return Round(state.params, _limit(state, threshold, learning_rate), state.changes)

    def received(event: Event | Task, payload: PyTree, like: PyTree) -> PyTree:
        none = upload.kept(upload.init(like))
        return upload.decode(none, event.key, payload, like)[0]

    def nothing(params: PyTree) -> Upload:
        """The memory of a worker that has uploaded nothing, and must."""
        zeros = jax.tree.map(jnp.zeros_like, wide(params))
        return Upload(zeros, jnp.float32(0), jnp.int32(max_skip))

    def join(params: PyTree, workers: int) -> Lazy:
        return Lazy(nothing(params), jnp.zeros((), jnp.int32))

    def steps(work: Work) -> Steps:
        def step(own: Lazy, view: Round, task: Task) -> tuple[jax.Array, Change, Lazy]:
            loss, gradient = work(view.params, task)
            begins_anew = own.changes != view.changes
            before: Upload = chosen(begins_anew, nothing(view.params), own.upload)
            target = minus(wide(gradient), before.last)
            payload, _ = upload.encode(upload.init(target), task.key, target)
            change = received(task, payload, target)
            error = squared_norm(minus(target, change)).astype(jnp.float32)
            uploads = uploads_now(
                squared_norm(change).astype(jnp.float32),
                view.limit,
                error + before.error,
                before.skipped >= max_skip,
                strict,
            )
            last = chosen(uploads, plus(before.last, change), before.last)
            after = uploaded(before, uploads, last, error)
            return loss, Change(uploads, view.changes, payload), Lazy(after, view.changes)

        return step

    def finish(state: LazyState, event: Event, message: Change) -> tuple[LazyState, PyTree, Sent]:
        # What was computed before a worker left or joined does not add up with the rest.
        current = message.changes == state.changes
        total, size = state.total, bytes_of(message._replace(payload=()))
        if message.payload is not None:
            change = received(event, message.payload, total)
            total = chosen(message.uploads & current, plus(total, change), total)
        expected = state.expected.at[event.worker].set(~current)
        after = state._replace(total=total, expected=expected)
        ends = ~jnp.any(after.expected)
        stepped = _step(after, learning_rate)
        of_payload = jnp.where(message.uploads, bytes_of(message.payload), 0)
        return (
            after._replace(
                params=chosen(ends, stepped.params, after.params),
                moves=jnp.where(ends, stepped.moves, after.moves),
                rounds=jnp.where(ends, stepped.rounds, after.rounds),
                expected=jnp.where(ends, after.present, after.expected),
            ),
            (),
            sent(message.uploads, size + of_payload, 1, bytes_of(view(state, event.worker))),
        )

    def attend(state: LazyState, present: jax.Array, seconds: jax.Array) -> LazyState:
        """All upload again, since the last upload of a worker that has left is in the sum."""
        changes = jnp.any(present != state.present)
        return state._replace(
            total=chosen(changes, jax.tree.map(jnp.zeros_like, state.total), state.total),
            expected=jnp.where(changes, present, state.expected),
            present=present,
            changes=state.changes + changes.astype(jnp.int32),
        )

    return Policy(
        init=lambda params, workers: _start(params, workers, memory, max_skip),
        view=view,
        steps=steps,
        finish=finish,
        model=lambda state: state.params,
        join=join,
        begins=lambda state, idle: idle & state.expected,
        attend=attend,
        pruned=lambda message: message if message.uploads else message._replace(payload=None),
    )


def _nearest_on_grid(bits: int) -> Codec:
    r"""A codec that rounds to the nearest of :math:`2^b` points between the largest magnitudes.

    .. math:: q_j = \Big\lfloor \frac{x_j + R}{2 \tau R} + \frac{1}{2} \Big\rfloor, \qquad
              Q(x)_j = 2 \tau R q_j - R, \qquad R = \|x\|_\infty, \quad \tau = \frac{1}{2^b - 1}

    So :math:`\|Q(x) - x\|_\infty \le \tau R`. It is biased, and no contraction: 0 is no point of
    the grid. Each leaf sends `bits` per coordinate, in words of 32 bits, and one float32.
    """
    intervals = 2**bits - 1

    def measure(context: Context, x: jax.Array) -> jax.Array:
        return jnp.max(jnp.abs(x), initial=0.0)

    def encode(context: Context, x: jax.Array) -> tuple[jax.Array, Memory]:
        radius = context.statistics
        fraction = jnp.where(radius > 0, x / radius, 0.0)
        codes = jnp.floor((fraction + 1) * (intervals / 2) + 0.5)
        codes = jnp.clip(codes, 0, intervals).astype(jnp.uint32)
        return pack(codes, bits=bits), context.memory

    def decode(context: Context, payload: jax.Array) -> jax.Array:
        codes = unpack(payload, bits=bits, shape=context.shape)
        return context.statistics * (codes.astype(jnp.float32) * (2 / intervals) - 1)

    return Codec(encode, decode, measure=measure, reduce_statistics="max")
