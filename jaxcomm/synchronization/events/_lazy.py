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
    scaled,
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


class Round(NamedTuple):
    """What a worker receives at the beginning of a round."""

    params: PyTree
    limit: jax.Array  # float32[], the squared norm of a change that is large enough


class Change(NamedTuple):
    """The message of a worker that decides whether to upload."""

    uploads: jax.Array  # bool[]
    payload: PyTree  # sent only if it uploads


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
    workers upload.

    Args:
      learning_rate: :math:`\eta`, above 0. The paper's rate is :math:`\eta / n`, of the sum.
      threshold: :math:`\xi` in [0, 1). With 0, all workers upload in each round.
      memory: :math:`D`, the number of steps that the threshold looks back.
      max_skip: The most rounds in a row that a worker skips.

    Returns:
      A policy, for :func:`event_loop`. Each worker keeps its last upload.

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
      many workers there are.

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
    )


def _limit(state: LazyState, threshold: float, learning_rate: float) -> jax.Array:
    return threshold * jnp.mean(state.moves) / learning_rate**2


def _step(state: LazyState, learning_rate: float) -> LazyState:
    """The server's step with the mean of the last uploads."""
    change = scaled(state.total, -learning_rate / len(state.expected))
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
        return Round(state.params, _limit(state, threshold, learning_rate))

    def received(event: Event | Task, payload: PyTree, like: PyTree) -> PyTree:
        none = upload.kept(upload.init(like))
        return upload.decode(none, event.key, payload, like)[0]

    def join(params: PyTree, workers: int) -> Upload:
        zeros = jax.tree.map(jnp.zeros_like, wide(params))
        return Upload(zeros, jnp.float32(0), jnp.int32(max_skip))

    def steps(work: Work) -> Steps:
        def step(own: Upload, view: Round, task: Task) -> tuple[jax.Array, Change, Upload]:
            loss, gradient = work(view.params, task)
            target = minus(wide(gradient), own.last)
            payload, _ = upload.encode(upload.init(target), task.key, target)
            change = received(task, payload, target)
            error = squared_norm(minus(target, change)).astype(jnp.float32)
            uploads = uploads_now(
                squared_norm(change).astype(jnp.float32),
                view.limit,
                error + own.error,
                own.skipped >= max_skip,
                strict,
            )
            last = chosen(uploads, plus(own.last, change), own.last)
            return loss, Change(uploads, payload), uploaded(own, uploads, last, error)

        return step

    def finish(state: LazyState, event: Event, message: Change) -> tuple[LazyState, PyTree, Sent]:
        change = received(event, message.payload, state.total)
        after = state._replace(
            total=chosen(message.uploads, plus(state.total, change), state.total),
            expected=state.expected.at[event.worker].set(False),
        )
        ends = ~jnp.any(after.expected)
        stepped = _step(after, learning_rate)
        size = jnp.where(message.uploads, bytes_of(message.payload), 0)
        return (
            after._replace(
                params=chosen(ends, stepped.params, after.params),
                moves=jnp.where(ends, stepped.moves, after.moves),
                rounds=jnp.where(ends, stepped.rounds, after.rounds),
                expected=after.expected | ends,
            ),
            (),
            sent(message.uploads, size, 1, bytes_of(view(state, event.worker))),
        )

    return Policy(
        init=lambda params, workers: _start(params, workers, memory, max_skip),
        view=view,
        steps=steps,
        finish=finish,
        model=lambda state: state.params,
        join=join,
        begins=lambda state, idle: idle & state.expected,
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
