"""AsyLPG: asynchronous variance reduction, with few bits in both directions."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm._contract import Codec, PyTree
from jaxcomm._require import AboveZero, BelowOne, Positive, checked
from jaxcomm.compression.quantizers import _dither, dither
from jaxcomm.synchronization._trees import (
    chosen,
    minus,
    narrow,
    plus,
    scaled,
    squared_norm,
    wide,
)
from jaxcomm.synchronization.events._engine import Event, Policy, Steps, Task, Work
from jaxcomm.synchronization.events._messages import Messages, Sent, bytes_of, messages, sent

Proximal = Callable[[PyTree, float], PyTree]


class LowPrecisionState(NamedTuple):
    """The state of an epoch: first full gradients at a snapshot, then stochastic ones."""

    params: PyTree  # in float32 at least
    snapshot: PyTree  # in the dtypes of the parameters
    full: PyTree  # the mean of the full gradients at the snapshot, or the sum of those that arrived
    has_read: jax.Array  # bool[workers], whether it has received other parameters since
    takes_snapshot: jax.Array  # bool[], whether workers compute full gradients
    arrived: jax.Array  # int32[], the gradients of this part of the epoch
    epochs: jax.Array  # int32[]


class Epoch(NamedTuple):
    """What a worker receives of the epoch."""

    snapshot: PyTree
    takes_snapshot: jax.Array
    has_read: jax.Array


class Gradients(NamedTuple):
    """The message of a worker, of which it sends one part."""

    full: PyTree  # the full gradient at a snapshot
    change: PyTree  # the rounded difference of two stochastic gradients


def rounding_error(x: PyTree, bits: int) -> jax.Array:
    r"""The expected squared error of `dither(bits=bits)`, leaf by leaf.

    .. math:: \sum_j \delta^2 f_j (1 - f_j), \qquad \delta = \frac{\|x\|_\infty}{s}, \quad
              f_j = \frac{x_j}{\delta} - \Big\lfloor \frac{x_j}{\delta} \Big\rfloor
    """
    levels = _dither.choose_field(None, bits, 1).levels

    def of_leaf(leaf: jax.Array) -> jax.Array:
        x = leaf.astype(jnp.float32)
        step = jnp.max(jnp.abs(x), initial=0.0) / levels
        position = jnp.where(step > 0, x / step, 0)
        part = position - jnp.floor(position)
        return jnp.square(step) * jnp.sum(part * (1 - part))

    return sum((of_leaf(leaf) for leaf in jax.tree.leaves(x)), start=jnp.float32(0))


@checked
def asy_lpg(
    full_gradient: Work,
    learning_rate: AboveZero,
    steps: Positive,
    *,
    precision: BelowOne = 0.5,
    bits: Sequence[int] = (4, 8, 16),
    codec: Codec | None = None,
    proximal: Proximal | None = None,
) -> Policy:
    r"""Asynchronous low-precision proximal gradient with variance reduction (AsyLPG).

    .. math:: \alpha = g_i(Q_x(x^{t - \tau})) - g_i(\tilde x), \qquad
              x^{t+1} = \mathrm{prox}_{\eta h}\Big(x^t - \eta \Big(Q_\alpha(\alpha)
              + \frac{1}{n} \sum_i \nabla f_i(\tilde x)\Big)\Big)

    An epoch begins with a snapshot :math:`\tilde x = x`. All workers send the full gradients of
    their functions at it, exactly. Then they send `steps` quantized differences of stochastic
    gradients, and none of them waits. The server replies with quantized parameters, with the
    smallest of `bits` whose error is within the precision rule:

    .. math:: \mathbb{E} \|Q_x(x) - x\|^2 \le \mu \|x - \tilde x\|^2

    If none of `bits` is precise enough, as always at :math:`x = \tilde x`, it sends float32. Both
    roundings are unbiased.

    Args:
      full_gradient: `(params, task) -> (loss, gradient)`, of all examples of `task.worker`. The
        function passed to :func:`event_loop` returns the stochastic gradient of one batch.
      learning_rate: :math:`\eta`, above 0.
      steps: The stochastic gradients of an epoch, at least the number of workers.
      precision: :math:`\mu` in [0, 1). With 0, parameters are sent exactly.
      bits: The widths for parameters, as for :func:`jaxcomm.compression.quantizers.dither`, which
        rounds each leaf.
      codec: :math:`Q_\alpha`, an unbiased codec without memory. By default `dither(bits=8)`.
      proximal: `(params, learning_rate) -> params`, the proximal operator of the regularizer
        :math:`h`. By default there is none.

    Returns:
      A policy, for :func:`event_loop`. Each worker keeps the parameters that it has received. In
      the compiled program, each event has a branch for either kind of gradient. Not for
      :func:`jaxcomm.asynchronous.train`: a full gradient is over a worker's own examples, which
      there are dealt to whoever is free, and a reply of either kind would have the bytes of both.

    Raises:
      ValueError: If an option is out of range, or `codec` has memory; when started, if `steps` is
        less than the number of workers.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxcomm.synchronization import deterministic, events
      >>> def gradient(x, event):
      ...     return jax.value_and_grad(lambda x: 0.5 * jnp.sum((x - 1) ** 2))(x)
      >>> policy = events.asy_lpg(gradient, 0.5, steps=8)
      >>> loop = events.event_loop(policy, gradient, deterministic([1.0, 2.0]), workers=2)
      >>> progress, _ = loop.run(loop.start(jnp.zeros(3)), 40)
      >>> print(loop.model(progress).round(3))
      [1. 1. 1.]

    References:
      Yu, Wu, Huang, `Double Quantization for Communication-Efficient Distributed Optimization
      <https://arxiv.org/abs/1805.10111>`_, 2019.

    Differs from the paper: each leaf has its own scale. The snapshot is the last iterate.
    """
    bits = sorted(bits)
    gradient_codec = dither(bits=8) if codec is None else codec
    if jax.tree.leaves(jax.eval_shape(gradient_codec.init, jnp.zeros(2))):
        raise ValueError("`codec` has memory, such as feedback: pass an unbiased codec without it.")
    upload = messages(gradient_codec)
    replies = [*(messages(dither(bits=width)) for width in bits), messages(None)]

    def init(params: PyTree, workers: int) -> LowPrecisionState:
        if steps < workers:
            raise ValueError(f"`steps`={steps} must be at least the number of workers, {workers}.")
        x = wide(params)
        zero = jnp.zeros((), jnp.int32)
        return LowPrecisionState(
            params=x,
            snapshot=params,
            full=jax.tree.map(jnp.zeros_like, x),
            has_read=jnp.zeros(workers, bool),
            takes_snapshot=jnp.ones((), bool),
            arrived=zero,
            epochs=zero,
        )

    def view(state: LowPrecisionState, worker: jax.Array) -> Epoch:
        return Epoch(state.snapshot, state.takes_snapshot, state.has_read[worker])

    def begins(state: LowPrecisionState, idle: jax.Array) -> jax.Array:
        computing = jnp.sum(~idle, dtype=jnp.int32)
        waits = jnp.where(
            state.takes_snapshot, state.arrived > 0, state.arrived + computing >= steps
        )
        return idle & ~waits

    def steps_of(stochastic: Work) -> Steps:
        def step(read: PyTree, view: Epoch, task: Task) -> tuple[jax.Array, PyTree, PyTree]:
            def full() -> tuple[jax.Array, PyTree]:
                loss, gradient = full_gradient(view.snapshot, task)
                payload, _ = jax.eval_shape(lambda: encoded(gradient, task.key))
                nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), payload)
                return loss, Gradients(gradient, nothing)

            def difference() -> tuple[jax.Array, PyTree]:
                params = chosen(view.has_read, read, view.snapshot)
                loss, new = stochastic(params, task)
                change = minus(new, stochastic(view.snapshot, task)[1])
                nothing = jax.tree.map(jnp.zeros_like, change)
                return loss, Gradients(nothing, encoded(change, task.key)[0])

            return *lax.cond(view.takes_snapshot, full, difference), read

        return step

    def encoded(change: PyTree, key: jax.Array) -> tuple[PyTree, PyTree]:
        return upload.encode(upload.init(change), jax.random.split(key)[0], change)

    def finish(
        state: LowPrecisionState, event: Event, message: Gradients
    ) -> tuple[LowPrecisionState, PyTree, Sent]:
        workers, size = len(state.has_read), bytes_of(state.snapshot)
        own_key, reply_key = jax.random.split(event.key)

        def snapshot() -> tuple[LowPrecisionState, Sent]:
            full, arrived = plus(state.full, message.full), state.arrived + 1
            ends = arrived == workers
            return state._replace(
                full=chosen(ends, scaled(full, 1 / workers), full),
                takes_snapshot=~ends,
                arrived=jnp.where(ends, 0, arrived),
            ), sent(1, bytes_of(message.full), 1)

        def step() -> tuple[LowPrecisionState, Sent]:
            none = upload.kept(upload.init(message.full))
            received, _ = upload.decode(none, own_key, message.change, message.full)
            x = minus(state.params, scaled(plus(state.full, received), learning_rate))
            x = x if proximal is None else proximal(x, learning_rate)
            arrived = state.arrived + 1
            ends = arrived == steps
            return state._replace(
                params=x,
                snapshot=chosen(ends, narrow(x, state.snapshot), state.snapshot),
                full=chosen(ends, jax.tree.map(jnp.zeros_like, x), state.full),
                has_read=state.has_read.at[event.worker].set(True) & ~ends,
                takes_snapshot=ends,
                arrived=jnp.where(ends, 0, arrived),
                epochs=state.epochs + ends.astype(jnp.int32),
            ), sent(1, bytes_of(message.change), 1)

        after, messages = lax.cond(state.takes_snapshot, snapshot, step)
        received, reply_size = reply(after, reply_key)
        return (
            after,
            received,
            messages._replace(download_bytes=jnp.where(state.takes_snapshot, size, reply_size)),
        )

    def reply(state: LowPrecisionState, key: jax.Array) -> tuple[PyTree, jax.Array]:
        """The parameters as the server sends them, and their bytes."""
        x = narrow(state.params, state.snapshot)
        bound = precision * squared_norm(minus(state.params, wide(state.snapshot)))
        precise = jnp.stack([*(rounding_error(x, width) <= bound for width in bits), True])
        choice = jnp.argmax(precise)

        def sent_by(each: Messages, x: PyTree) -> PyTree:
            memory = each.init(x)
            payload, _ = each.encode(memory, key, x)
            return each.decode(each.kept(memory), key, payload, x)[0]

        branches = [functools.partial(sent_by, each) for each in replies]
        sizes = jnp.asarray([each.bytes(x) for each in replies], jnp.int32)
        return lax.switch(choice, branches, x), sizes[choice]

    return Policy(
        init=init,
        view=view,
        steps=steps_of,
        finish=finish,
        model=lambda state: narrow(state.params, state.snapshot),
        join=lambda params, workers: params,
        receive=lambda read, reply: reply,
        begins=begins,
    )
