"""What a policy is, and the event engine: a scan over finished gradients."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm import _noise
from jaxcomm._contract import PyTree
from jaxcomm._require import AtLeastZero, Positive, checked
from jaxcomm.synchronization._stragglers import Straggler, seconds_of
from jaxcomm.synchronization._trees import chosen, row, rows_of, with_row
from jaxcomm.synchronization.events._messages import Sent, sent
from jaxcomm.synchronization.events._pairs import Pairs


class Task(NamedTuple):
    """A gradient that a worker computes."""

    worker: jax.Array  # int32[]
    number: jax.Array  # int32[], the gradients that it finished before: its clock
    key: jax.Array  # key[], different for each gradient


class Event(NamedTuple):
    """A worker finishes a gradient, and the owner hears of it."""

    worker: jax.Array  # int32[]
    number: jax.Array  # int32[], as in the task
    position: jax.Array  # int32[], the events before this one
    staleness: jax.Array  # int32[], the events of others since it began this gradient
    seconds: jax.Array  # float32[], the time
    key: jax.Array  # key[], as in the task


Work: TypeAlias = Callable[[PyTree, Task], tuple[jax.Array, PyTree]]
"""`(point, task) -> (loss, result)`; for most policies, a loss and its gradient at `point`."""

Steps: TypeAlias = Callable[[PyTree, PyTree, Task], tuple[jax.Array, PyTree, PyTree]]
"""`(own, view, task) -> (loss, message, own)`: what a worker does for one gradient."""


def message_is_gradient(work: Work) -> Steps:
    """The steps of a worker that sends its result at the view, and keeps no memory."""
    return lambda own, view, task: (*work(view, task), own)


class Policy(NamedTuple):
    """Who waits for whom, and what the parameters become: pure functions of arrays.

    They are those of two sides. The *owner* keeps a state. All but `init`, `model` and `attend` run
    in a `jax.lax.scan`: they may read and write a few rows of arrays [workers, ...], and compute no
    new arrays of that size, except arrays [workers]. A *worker* keeps a memory of its own. Only
    three things travel: the view and the reply to a worker, and its message to the owner. So a
    policy also runs where the sides are processes, as in :mod:`jaxcomm.asynchronous`.

    Attributes:
      init: `(params, workers) -> state`, of the owner, before the first event.
      view: `(state, worker) -> view`, what a worker receives when it begins. The event engine calls
        it when the gradient is finished. So it must not depend on what changes meanwhile, unless
        `steps` uses it for nothing but what is done after the gradient.
      steps: A function from the user's `(point, task) -> (loss, result)` to that of the worker,
        `(own, view, task) -> (loss, message, own)`. By default, it evaluates the gradient at the
        view, which is the message.
      finish: `(state, event, message) -> (state, reply, messages)`: the effect on the owner, what
        it answers, and what :func:`sent` returns.
      model: `state -> params`, the parameters that the method returns; called outside the scan.
      join: `(params, workers) -> own`, the memory of a worker that joins at these parameters. By
        default, none.
      receive: `(own, reply) -> own`, after a message. By default, nothing changes.
      begins: `(state, idle) -> bool[workers]`, the workers that now begin their next gradient.
        `idle`, bool[workers], has the workers that compute nothing. By default, all of them. If no
        worker computes, all later times are NaN.
      talks: `number -> bool`, whether the gradient with this number ends with a message, if not
        all do. Without a message, the event reaches only the worker's own memory.
      hears: `(state, worker) -> (state, messages)`, if the owner sends a worker a new view between
        its gradients; `messages` has a download if there is one. By default, only when it begins.
      tick: `(state, seconds) -> state`, what time alone changes; called before each event.
      due: `state -> seconds`, float32[], when `tick` next changes the state; infinite by default.
      attend: `(state, present, seconds) -> state`, when a worker has left or joined; `present`,
        bool[workers], has those that take part. `None`: the policy needs all workers to the end.
      pruned: `message -> message`, without what is not sent; called by a process, not in a trace.
      restarts: Whether a worker in `begins` that is not idle abandons its gradient and restarts.
      pairs: What processes do without an owner, if the state has nothing but their parameters.
      move: `(state, change) -> state`, which adds a change from outside to the parameters, so that
        the policy can be the lower one of two tiers.
    """

    init: Callable[[PyTree, int], Any]
    view: Callable[[Any, jax.Array], PyTree]
    finish: Callable[[Any, Event, PyTree], tuple[Any, PyTree, Sent]]
    model: Callable[[Any], PyTree]
    steps: Callable[[Work], Steps] = message_is_gradient
    join: Callable[[PyTree, int], PyTree] = lambda params, workers: ()
    receive: Callable[[PyTree, PyTree], PyTree] = lambda own, reply: own
    begins: Callable[[Any, jax.Array], jax.Array] = lambda state, idle: idle
    talks: Callable[[jax.Array], jax.Array] | None = None
    hears: Callable[[Any, jax.Array], tuple[Any, Sent]] = lambda state, worker: (state, sent())
    tick: Callable[[Any, jax.Array], Any] = lambda state, seconds: state
    due: Callable[[Any], jax.Array] = lambda state: jnp.full((), jnp.inf, jnp.float32)
    attend: Callable[[Any, jax.Array, jax.Array], Any] | None = None
    pruned: Callable[[PyTree], PyTree] = lambda message: message
    restarts: bool = False
    pairs: Pairs | None = None
    move: Callable[[Any, PyTree], Any] | None = None


def key_of(seed: int | jax.Array, worker: jax.Array, number: jax.Array) -> jax.Array:
    """The key of a gradient, which both sides know."""
    key = jax.random.fold_in(_noise.make_key(seed), jnp.uint32(0xFFFFFFFF))
    return jax.random.fold_in(jax.random.fold_in(key, worker), number)


class Seconds(NamedTuple):
    r"""Points in time, :math:`t = h + l` with :math:`|l|` at most half a unit of :math:`h`."""

    high: jax.Array  # float32
    low: jax.Array  # float32


def later(time: Seconds, seconds: jax.Array) -> Seconds:
    r"""The time :math:`t + s`, rounded to about 48 bits.

    The error of the float32 sum is itself a float32, which the last line of a two-sum computes.
    """
    total = time.high + seconds
    part = total - time.high
    error = (time.high - (total - part)) + (seconds - part)
    low = time.low + error
    high = total + low
    return Seconds(high, low - (high - total))


def first(time: Seconds, among: jax.Array) -> jax.Array:
    """The index of the earliest time in the mask `among`, int32[]; the lowest index of equals."""
    high = jnp.where(among, time.high, jnp.inf)
    low = jnp.where(among & (high == jnp.min(high)), time.low, jnp.inf)
    return jnp.argmin(low).astype(jnp.int32)


def last(time: Seconds, among: jax.Array) -> Seconds:
    """The latest time in the mask `among`."""
    high = jnp.where(among, time.high, -jnp.inf)
    low = jnp.where(among & (high == jnp.max(high)), time.low, -jnp.inf)
    index = jnp.argmax(low)
    return Seconds(time.high[index], time.low[index])


class Progress(NamedTuple):
    """The state of a simulation between two events."""

    policy: Any  # the state of the owner
    own: PyTree  # leaves [workers, ...], the memory of each worker
    events: jax.Array  # int32[], the number of events so far
    due: Seconds  # [workers], when each worker finishes its gradient, if it computes one
    arrived: Seconds  # [workers], when the messages of its last event have arrived
    idle: jax.Array  # bool[workers], whether it computes nothing
    finished: jax.Array  # int32[workers], the gradients that it has finished
    began: jax.Array  # int32[workers], the events before it began its gradient
    next_seconds: jax.Array  # float32[workers], the seconds of its next gradient
    releases: jax.Array  # int32[], the events after which a worker began


class Record(NamedTuple):
    """One event, as the engine reports it; of a run, leaves [events]."""

    worker: jax.Array  # int32[]
    number: jax.Array  # int32[], the gradients that the worker finished before
    staleness: jax.Array  # int32[], the events of others since it began
    seconds: jax.Array  # float32[], the simulated time
    loss: jax.Array  # what the user's function returned
    sent: Sent


class EventLoop(NamedTuple):
    """A simulation.

    Attributes:
      start: `params -> Progress`, before the first event.
      run: `(progress, events) -> (progress, records)`; `events` is a Python int. Call it under
        `jax.jit` with `static_argnums=1`, and donate `progress` to save a copy of the state.
      model: `progress -> params`, the parameters that the method returns at this point.
    """

    start: Callable[[PyTree], Progress]
    run: Callable[[Progress, int], tuple[Progress, Record]]
    model: Callable[[Progress], PyTree]


@checked
def event_loop(
    policy: Policy,
    work: Work,
    straggler: Straggler,
    *,
    workers: Positive,
    communication_seconds: AtLeastZero | Callable[[Sent], jax.Array] = 0.0,
    seed: int | jax.Array = 0,
) -> EventLoop:
    r"""Simulates workers that finish gradients at different times, one event after the other.

    .. math:: i = \arg\min_j d_j, \qquad t = d_i, \qquad
              d_j \gets t_j + \tau_{j, k_j + 1} \;\text{ for all } j \text{ that begin}

    Here :math:`d_j` is when worker j finishes its gradient, and :math:`\tau_{jk}` is the time of
    its k-th gradient. Worker i finishes its gradient, the policy changes its state, and some idle
    workers begin. A worker begins when the messages of all workers that are idle then have arrived;
    if none waits, these are its own. Ties go to the lowest index. An event costs a few operations
    on arrays [workers] beside the gradient and the policy, which changes a few rows. The same seed
    gives the same run. Nothing is sent: bytes are counted in the records.

    Args:
      policy: Decides what an event changes and who begins, such as :func:`stale_synchronous`.
      work: `(params, task) -> (loss, gradient)`. It selects the batch by `task.worker` and
        `task.number`, and may draw from `task.key`.
      straggler: The model of gradient times. Gradient k of a worker takes the time that
        :func:`jaxcomm.synchronization.windows` with `minibatches=1` and the same seed draws in
        window k.
      workers: The number of workers.
      communication_seconds: The seconds between the end of a gradient and the arrival of its
        messages and of the reply; or a function of the messages, if the seconds vary.
      seed: Seed of the times and of `task.key`.

    Returns:
      The simulation: `start(params) -> progress`; `run(progress, events) -> (progress, records)`,
      where `events` is a Python int: call it under `jax.jit` with `static_argnums=1`, and donate
      `progress` to save a copy of the state; and `model(progress) -> params`. Progress is a tree of
      arrays, which a checkpoint can hold: the state of the owner, `policy`; `own`, leaves
      [workers, ...], the memory of each worker; `events`, int32[], how many there were; and of each
      worker `due`, when it finishes its gradient; `arrived`, when its last
      messages have; `idle`, bool[workers]; `finished`, int32[workers], how many gradients it has
      finished; `began`, int32[workers], the events before it began; and `next_seconds`,
      float32[workers]. Records have a row per event: `worker`, `number` and `staleness`,
      int32[events], and `seconds`, float32[events], as in :class:`Event`; the `loss` of `work`; and
      `sent`, the counts of :func:`sent`.

    Raises:
      ValueError: If a number is out of range, or the straggler is for another number of workers;
        when started, if the policy does not accept the number of workers.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from jaxcomm.synchronization import deterministic, events
      >>> def work(params, task):
      ...     return jax.value_and_grad(lambda x: 0.5 * x**2)(params)
      >>> loop = events.event_loop(
      ...     events.parameter_server(optax.sgd(0.5)),
      ...     work,
      ...     deterministic([1.0, 2.5]),
      ...     workers=2,
      ... )
      >>> progress, records = loop.run(loop.start(jnp.float32(8.0)), 4)
      >>> print(records.worker, records.seconds, records.staleness)
      [0 0 1 0] [1.  2.  2.5 3. ] [0 0 2 1]
      >>> print(loop.model(progress))
      -3.0

    References:
      Chen et al., `Revisiting Distributed Synchronous SGD <https://arxiv.org/abs/1604.00981>`_,
      2016, describe most of the strategies; each policy names its own paper.
    """
    key = _noise.make_key(seed)
    steps = policy.steps(work)

    def draw(number: jax.Array) -> jax.Array:
        return straggler.sample(key, number, (workers, 1))[:, 0]

    def start(params: PyTree) -> Progress:
        state = policy.init(jax.tree.map(jnp.asarray, params), workers)
        none, zero = jnp.zeros(workers, jnp.int32), jnp.zeros((), jnp.int32)
        seconds, times = draw(zero), Seconds(*[jnp.zeros(workers, jnp.float32) for _ in range(2)])
        begins = policy.begins(state, jnp.ones(workers, bool))
        progress = Progress(
            policy=state,
            own=rows_of(policy.join(policy.model(state), workers), workers),
            events=zero,
            due=later(times, seconds),
            arrived=times,
            idle=~begins,
            finished=none,
            began=none,
            next_seconds=seconds,
            releases=zero + 1,
        )
        return jax.tree.map(jnp.copy, progress)  # `run` may donate them, and not the parameters.

    def take(progress: Progress) -> tuple[Progress, Record]:
        worker = first(progress.due, ~progress.idle)
        # A policy in which all workers wait for each other is seen.
        stuck = jnp.all(progress.idle)
        now = jax.tree.map(lambda x: jnp.where(stuck, jnp.nan, x[worker]), progress.due)
        number = progress.finished[worker]
        task = Task(worker, number, key_of(seed, worker, number))
        event = Event(
            worker=worker,
            number=number,
            position=progress.events,
            staleness=progress.events - progress.began[worker],
            seconds=now.high,
            key=task.key,
        )
        state, heard = policy.hears(policy.tick(progress.policy, event.seconds), worker)
        before = row(progress.own, worker)
        loss, message, own = steps(before, policy.view(state, worker), task)

        def talk() -> tuple[Any, PyTree, Sent]:
            after, reply, messages = policy.finish(state, event, message)
            return after, policy.receive(own, reply), messages

        if policy.talks is None:
            state, own, messages = talk()
        else:
            state, own, messages = lax.cond(
                policy.talks(number), talk, lambda: (state, own, sent())
            )
        # Always new, but only after `before` has been read: see `row_before`.
        own = chosen(worker >= 0, own, before)
        messages = jax.tree.map(jnp.add, messages, heard)
        travel = seconds_of(communication_seconds, messages)
        arrived = with_row(progress.arrived, worker, later(now, travel))
        idle = progress.idle.at[worker].set(True)
        begins = policy.begins(state, idle)
        if policy.restarts:
            next_seconds = draw(progress.releases)
        else:
            begins = begins & idle
            again = draw(event.number + 1)[worker]
            next_seconds = progress.next_seconds.at[worker].set(again)
        due = later(last(arrived, idle), next_seconds)
        count = progress.events + 1
        return Progress(
            policy=state,
            own=with_row(progress.own, worker, own),
            events=count,
            due=chosen(begins, due, progress.due),
            arrived=arrived,
            idle=idle & ~begins,
            finished=progress.finished.at[worker].add(1),
            began=jnp.where(begins, count, progress.began),
            next_seconds=next_seconds,
            releases=progress.releases + jnp.any(begins).astype(jnp.int32),
        ), Record(worker, event.number, event.staleness, event.seconds, loss, messages)

    def run(progress: Progress, events: int) -> tuple[Progress, Record]:
        return lax.scan(lambda carry, _: take(carry), progress, length=events)

    jax.eval_shape(draw, jnp.zeros((), jnp.int32))
    return EventLoop(start, run, lambda progress: policy.model(progress.policy))
