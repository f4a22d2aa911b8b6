"""The event engine: a scan over finished gradients; what a policy is, and its messages."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm import _noise
from jaxcomm._contract import Codec, Context, Keys, PyTree
from jaxcomm._require import AtLeastZero, Positive, checked
from jaxcomm.synchronization._stragglers import Straggler, seconds_of
from jaxcomm.synchronization._trees import chosen, with_row


class Event(NamedTuple):
    """A worker finishes a gradient."""

    worker: jax.Array  # int32[]
    number: jax.Array  # int32[], the gradients that it finished before: its clock
    position: jax.Array  # int32[], the events before this one
    staleness: jax.Array  # int32[], the events of others since it began this gradient
    seconds: jax.Array  # float32[], the simulated time
    key: jax.Array  # key[], different for each event


class Sent(NamedTuple):
    """The messages of an event: what the worker sends, and what it receives in reply."""

    uploads: jax.Array  # int32[], messages
    upload_bytes: jax.Array  # int32[]
    downloads: jax.Array  # int32[], messages
    download_bytes: jax.Array  # int32[]


Work: TypeAlias = Callable[[PyTree, Event], tuple[jax.Array, PyTree]]
"""`(point, event) -> (loss, result)`; for most policies, a loss and its gradient at `point`."""


def sent(
    uploads: jax.Array | int = 0,
    upload_bytes: jax.Array | int = 0,
    downloads: jax.Array | int = 0,
    download_bytes: jax.Array | int = 0,
) -> Sent:
    """The messages of an event.

    Args:
      uploads: The number of messages that the worker sends.
      upload_bytes: Their bytes together.
      downloads: The number of messages that it receives.
      download_bytes: Their bytes together.

    Returns:
      The counts, a named tuple of int32[], with the names of the arguments.

    Example:
      >>> from jaxcomm.synchronization.events import sent
      >>> print(sent(uploads=1, upload_bytes=400).upload_bytes)
      400
    """
    counts = (uploads, upload_bytes, downloads, download_bytes)
    return Sent(*(jnp.asarray(count, jnp.int32) for count in counts))


class Policy(NamedTuple):
    """Who waits for whom, and what the parameters become: pure functions of one state.

    All but `init` run in a `jax.lax.scan`, once per event. They may read and write a few rows of
    arrays [workers, ...]. They must not compute new arrays of that size, except arrays [workers].

    Attributes:
      init: `(params, workers) -> state`, before the first event.
      point: `(state, event) -> point`, what the gradient of the event is evaluated at. It is called
        when the gradient is finished. So it must not depend on what changed since the worker began:
        a policy keeps a copy for the worker if others may change it meanwhile.
      finish: `(state, event, result) -> (state, messages)`, the effect of the event, and what
        :func:`sent` returns.
      model: `state -> params`, the parameters that the method returns; called outside the scan.
      begins: `(state, idle) -> bool[workers]`, the workers that now begin their next gradient.
        `idle`, bool[workers], has the workers that compute nothing. By default, all of them. If no
        worker computes, all later times are NaN.
      work: A function from the user's `(point, event) -> (loss, result)` to that of the policy,
        such as one that evaluates a gradient at two points. By default, the same.
      restarts: Whether a worker in `begins` that is not idle abandons its gradient and restarts.
    """

    init: Callable[[PyTree, int], Any]
    point: Callable[[Any, Event], PyTree]
    finish: Callable[[Any, Event, PyTree], tuple[Any, Sent]]
    model: Callable[[Any], PyTree]
    begins: Callable[[Any, jax.Array], jax.Array] = lambda state, idle: idle
    work: Callable[[Work], Work] = lambda work: work
    restarts: bool = False


def bytes_of(tree: PyTree) -> int:
    """The bytes of all leaves."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


class EventMessage(NamedTuple):
    """How a worker and the server send trees to each other.

    Attributes:
      init: `tree -> memory`, what the codec keeps for one worker.
      send: `(memory, key, tree) -> (received, memory)`.
      bytes: `tree -> int`, of one message.
    """

    init: Callable[[PyTree], Any]
    send: Callable[[Any, jax.Array, PyTree], tuple[PyTree, Any]]
    bytes: Callable[[PyTree], int]


def message(codec: Codec | None) -> EventMessage:
    """The messages of a codec, leaf by leaf; of `None`, the leaves themselves.

    A worker and the server are a group of one worker. So both halves of the codec's memory, its own
    and the shared one, belong to the pair.
    """
    if codec is None:
        return EventMessage(lambda tree: (), lambda memory, key, tree: (tree, memory), bytes_of)

    def init(tree: PyTree) -> PyTree:
        return [codec.init(x.astype(jnp.float32)) for x in jax.tree.leaves(tree)]

    def encoded(memory: Any, key: jax.Array, x: jax.Array) -> tuple[Context, PyTree, Any]:
        context = Context(Keys(*jax.random.split(key)), memory, shape=x.shape)
        context = context.replace(statistics=codec.measure(context, x))
        return context, *codec.encode(context, x)

    def send(memory: Any, key: jax.Array, tree: PyTree) -> tuple[PyTree, Any]:
        leaves, treedef = jax.tree.flatten(tree)
        received, memories = [], []
        for number, (own, leaf) in enumerate(zip(memory, leaves, strict=True)):
            at = jax.random.fold_in(key, jnp.uint32(number))
            context, payload, after = encoded(own, at, leaf.astype(jnp.float32))
            mean = codec.decode(context.received(), payload)
            update, after = codec.finalize(context.replace(memory=after), payload, mean)
            received.append(update.astype(leaf.dtype))
            memories.append(after)
        return jax.tree.unflatten(treedef, received), memories

    def size(tree: PyTree) -> int:
        def contents(x: jax.Array, key: jax.Array) -> PyTree:
            narrow = x.astype(jnp.float32)
            context, payload, _ = encoded(codec.init(narrow), key, narrow)
            kinds = codec.reduce_statistics
            unsent = jax.tree.map(lambda kind: kind == "equal", kinds)
            return payload, jax.tree.map(
                lambda skip, x: () if skip else x, unsent, context.statistics
            )

        key = jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32"))
        return sum(bytes_of(jax.eval_shape(contents, x, key)) for x in jax.tree.leaves(tree))

    return EventMessage(init, send, size)


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

    policy: Any  # the state of the policy
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
      work: `(params, event) -> (loss, gradient)`. It selects the batch by `event.worker` and
        `event.number`, and may draw from `event.key`.
      straggler: The model of gradient times. Gradient k of a worker takes the time that
        :func:`jaxcomm.synchronization.windows` with `minibatches=1` and the same seed draws in
        window k.
      workers: The number of workers.
      communication_seconds: The seconds between the end of a gradient and the arrival of its
        messages and of the reply; or a function of the messages, if the seconds vary.
      seed: Seed of the times and of `event.key`.

    Returns:
      The simulation: `start(params) -> progress`; `run(progress, events) -> (progress, records)`,
      where `events` is a Python int: call it under `jax.jit` with `static_argnums=1`, and donate
      `progress` to save a copy of the state; and `model(progress) -> params`. Progress is a tree of
      arrays, which a checkpoint can hold: the `policy`'s state; `events`, int32[], how many there
      were; and of each worker `due`, when it finishes its gradient; `arrived`, when its last
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
      >>> def work(params, event):
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
    event_key = jax.random.fold_in(key, jnp.uint32(0xFFFFFFFF))
    compute = policy.work(work)

    def draw(number: jax.Array) -> jax.Array:
        return straggler.sample(key, number, (workers, 1))[:, 0]

    def start(params: PyTree) -> Progress:
        state = policy.init(jax.tree.map(jnp.asarray, params), workers)
        none, zero = jnp.zeros(workers, jnp.int32), jnp.zeros((), jnp.int32)
        seconds, times = draw(zero), Seconds(*[jnp.zeros(workers, jnp.float32) for _ in range(2)])
        begins = policy.begins(state, jnp.ones(workers, bool))
        progress = Progress(
            policy=state,
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
        event = Event(
            worker=worker,
            number=progress.finished[worker],
            position=progress.events,
            staleness=progress.events - progress.began[worker],
            seconds=now.high,
            key=jax.random.fold_in(event_key, progress.events),
        )
        loss, result = compute(policy.point(progress.policy, event), event)
        state, messages = policy.finish(progress.policy, event, result)
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
