"""Training by the policies of the event engine, on the clocks and mini-batches of the windows.

Policies of ADMM are missing: their workers minimize their own loss exactly, plus a linear and a
quadratic term, in each event. The loss of a network has no such minimum in closed form. Some steps
of an optimizer instead would be another method, with parameters of its own. So is LAG-PS, which
must know the smoothness of each worker's loss.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.studies._windows import (
    BANDWIDTH,
    GRAPH,
    LATENCY,
    LENGTH,
    MINIBATCH,
    SPEEDS,
    WORKERS,
    Logged,
    link_of,
    seconds_of,
)
from experiments.studies.gossip import GRAPHS
from experiments.study.run import Setting
from experiments.tasks.task import Task
from jaxcomm import synchronization
from jaxcomm.synchronization import Straggler, events
from jaxcomm.synchronization.events import Policy
from jaxcomm.synchronization.events._messages import Sent

ROWS = 64  # Shards are padded to multiples of it, so that trials and runs share compiled programs.
ELASTICITY = 0.9 / WORKERS  # As the paper recommends.
STEP = optax.sgd(1.0)  # The gradients are multiplied by the learning rate.
OUTER_STEP = optax.sgd(0.7, momentum=0.9, nesterov=True)


class Inputs(NamedTuple):
    """What a compiled program is given: rates, seeds, clocks and data share one."""

    rate: Any  # float32[]
    seed: Any  # int32[]
    seconds: Any  # float32[LENGTH, workers], of each mini-batch
    examples: Any  # int32[LENGTH, workers, batch], of each mini-batch
    shards: Any  # leaves [workers, rows, ...], padded
    each: Any  # int32[], the examples of a shard, without the padding
    all_reduce: Any  # seconds of one
    rest_of_shard: Any  # seconds of a full gradient on the slowest worker, less those of an event;
    # 0 if the method has none


def through_server(inputs: Inputs, sent: Sent) -> jax.Array:
    """A message to the server, and its reply."""
    size = (sent.upload_bytes + sent.download_bytes).astype(jnp.float32)
    return LATENCY * (sent.uploads + sent.downloads).astype(jnp.float32) + size / BANDWIDTH


def both_ways(inputs: Inputs, sent: Sent) -> jax.Array:
    """Two workers send to each other at the same time."""
    return through_server(inputs, sent._replace(downloads=0, download_bytes=0))


def all_reduced(inputs: Inputs, sent: Sent) -> jax.Array:
    """An all-reduce."""
    return jnp.float32(inputs.all_reduce)


class Strategy(NamedTuple):
    """A policy, with what it costs."""

    name: str  # in claims
    description: str
    policy: Callable[..., Policy]  # of the step, after the full gradient if it needs one
    step: Any = STEP
    travel: Callable[[Inputs, Sent], jax.Array] = through_server  # seconds of messages
    waits: bool = False  # whether a worker that never finishes stops all others
    evaluations: int = 1  # gradients of a mini-batch that an event computes
    scale: float = 1.0  # of the learning rate


STRATEGIES = {
    "bulk_synchronous": Strategy(
        "Synchronous SGD of the event engine",
        "the exchange takes as long as that of `all_reduce blocking` on the other engine, so this "
        "is the check of this one",
        events.bulk_synchronous, travel=all_reduced, waits=True,
    ),
    "synchronous_server": Strategy(
        "Synchronous SGD through a server", "the following methods are compared with it",
        events.bulk_synchronous, waits=True,
    ),
    "backup_workers": Strategy(
        "SGD with backup workers", "the server takes the first n - `backups` gradients of a step",
        events.backup_workers,
    ),
    "stale_synchronous": Strategy(
        "SSP", "the fastest worker is at most `staleness` steps ahead of the slowest",
        events.stale_synchronous, waits=True,
    ),
    "parameter_server": Strategy(
        "Asynchronous SGD",
        f"the server applies each gradient when it arrives, with the learning rate over {WORKERS}",
        events.parameter_server, scale=1 / WORKERS,
    ),
    "staleness_aware": Strategy(
        "Asynchronous SGD with staleness-aware rates",
        "the same, with the learning rate divided by the staleness of the gradient instead",
        functools.partial(events.parameter_server, weight=events.inverse_staleness),
    ),
    "easgd": Strategy(
        "EASGD", "local steps, and an elastic pull to and of a center every `period` of them",
        functools.partial(events.easgd, elasticity=ELASTICITY),
    ),
    "eamsgd": Strategy(
        "EAMSGD",
        "the same with Nesterov's momentum; its learning rate is that of all steps which momentum "
        "makes of a gradient",
        functools.partial(events.eamsgd, elasticity=ELASTICITY), step=1.0,
    ),
    "ad_psgd": Strategy(
        "AD-PSGD", "a local step and the average with a random neighbor, on the graph of `dpsgd`",
        functools.partial(events.asynchronous_pairs, graph=GRAPHS[GRAPH]), travel=both_ways,
    ),
    "lag_wk": Strategy(
        "LAG-WK", "synchronous; a worker sends the change of its gradient only if it is large",
        events.lag_wk, step=1.0, waits=True,
    ),
    "laq": Strategy(
        "LAQ", "the same with rounded changes of `bits` per coordinate",
        events.laq, step=1.0, waits=True,
    ),
    "asy_lpg": Strategy(
        "AsyLPG",
        "asynchronous steps of variance reduction with rounded messages; every `steps` of them, "
        "all workers compute a gradient of all their examples",
        events.asy_lpg, step=1.0, waits=True, evaluations=2,
    ),
    "decoupled_diloco": Strategy(
        "Decoupled DiLoCo",
        "the server merges the local steps of a `quorum` of workers, each of which sends every "
        "`period` steps, with the outer optimizer of DiLoCo",
        functools.partial(events.decoupled_diloco, outer=OUTER_STEP),
    ),
}  # fmt: skip


@functools.lru_cache(maxsize=64)
def _examples(each: int, seed: int) -> jax.Array:
    """The examples of each mini-batch, int32[LENGTH, workers, batch]: those of the windows."""
    places = jnp.broadcast_to(jnp.arange(each, dtype=jnp.int32), (WORKERS, each))
    first = jnp.zeros(WORKERS, jnp.int32)
    dealt = synchronization.window_batches(
        jax.random.key(seed), places, first, minibatches=LENGTH, batch_size=MINIBATCH
    )
    return jnp.swapaxes(dealt.reshape(WORKERS, LENGTH, MINIBATCH), 0, 1)


@functools.cache
def _program(task: Task, method: str, minibatches: int, own: tuple) -> Callable[..., Any]:
    """A training, compiled for all rates, seeds, clocks and data."""
    strategy = STRATEGIES[method]
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(task.first_weights(0)))

    @jax.jit
    def trained(weights, inputs, times):
        def numbers(first, count):
            return (first * count + jnp.arange(count, dtype=jnp.int32)) % LENGTH

        def draw(key, number, shape):
            span = numbers(number, minibatches * strategy.evaluations)
            return jnp.sum(inputs.seconds[span], axis=0).reshape(shape)

        def scaled(loss, params):
            value, gradient = jax.value_and_grad(loss)(params)
            return value, jax.tree.map(lambda x: inputs.rate * x, gradient)

        def work(params, event):
            rows = inputs.examples[numbers(event.number, minibatches), event.worker].ravel()
            batch = jax.tree.map(lambda x: x[event.worker, rows], inputs.shards)
            return scaled(lambda params: task.loss(params, batch), params)

        def full(params, event):
            shard = jax.tree.map(lambda x: x[event.worker, :, None], inputs.shards)

            def loss(params):
                losses = jax.vmap(lambda example: task.loss(params, example))(shard)
                wanted = jnp.arange(len(losses), dtype=jnp.int32) < inputs.each
                return jnp.sum(jnp.where(wanted, losses, 0.0)) / inputs.each.astype(jnp.float32)

            return scaled(loss, params)

        def seconds(sent):
            # A message that is not rounded is a full gradient, which takes longer.
            rest = jnp.where(sent.upload_bytes >= size, inputs.rest_of_shard, 0.0)
            return strategy.travel(inputs, sent) + rest

        given = (full, strategy.step)[strategy.evaluations == 1 :]
        loop = events.event_loop(
            strategy.policy(*given, **dict(own)), work, Straggler(draw, np.ones, None),
            workers=WORKERS, communication_seconds=seconds, seed=inputs.seed,
        )  # fmt: skip
        # The messages of an event count, too, as the exchange of a window does.
        exchange = strategy.travel(inputs, events.sent(1, size, 1, size))

        def take(carry):
            progress, changed, uploads, staleness = carry
            before = loop.model(progress)
            progress, record = loop.run(progress, 1)
            differs = jax.tree.map(lambda x, y: jnp.any(x != y), before, loop.model(progress))
            changes = jnp.any(jnp.stack(jax.tree.leaves(differs)))
            arrived = progress.arrived.high[record.worker[0]]
            return (progress, jnp.where(changes, arrived, changed),
                    uploads + record.sent.uploads[0],
                    staleness + record.staleness[0].astype(jnp.float32))  # fmt: skip

        def until(carry, time):
            def is_before(carry):
                due = jnp.where(carry[0].idle, jnp.inf, carry[0].due.high)
                return jnp.min(due) <= time - exchange

            carry = progress, changed, uploads, staleness = jax.lax.while_loop(
                is_before, take, carry
            )
            return carry, Logged(loop.model(progress), progress.events, changed, staleness, uploads)

        start = loop.start(weights), jnp.float32(0), jnp.int32(0), jnp.float32(0)
        return jax.lax.scan(until, start, times)[1]

    return trained


def run(
    setting: Setting, parameters: Setting, seed: int, task: Task, shards: Any, times: np.ndarray
) -> Logged:
    """The same; has the last state before each time, if the parameters changed, and the last."""
    method, speeds, own = setting["method"], setting["speeds"], dict(parameters)
    strategy, rate = STRATEGIES[method], own.pop("learning_rate")
    minibatches = own.pop("minibatches", 1)  # Of a gradient. All others are of the policy.
    each = shards[0].shape[1]
    shards = [jnp.pad(x, [(0, 0), (0, -each % ROWS)] + [(0, 0)] * (x.ndim - 2)) for x in shards]
    # Momentum makes many steps of a gradient; the learning rate is that of all of them.
    rate *= strategy.scale * (1 - own.get("momentum", 0))
    rest = each / MINIBATCH - strategy.evaluations if strategy.evaluations > 1 else 0.0
    inputs = Inputs(
        jnp.float32(rate), jnp.int32(seed), seconds_of(speeds, seed), _examples(each, seed),
        tuple(shards), jnp.int32(each), link_of(task, "all_reduce").all_reduce,
        rest * float(SPEEDS[speeds].straggler.means(WORKERS).max()),
    )  # fmt: skip
    program = _program(task, method, minibatches, tuple(sorted(own.items())))
    states = jax.device_get(program(task.first_weights(seed), inputs, jnp.float32(times)))
    count = np.maximum(states.step, 1)
    states = states._replace(staleness=states.staleness / count, uploads=states.uploads / count)
    is_new = np.diff(states.seconds, prepend=0) > 0
    is_new[-1] = True
    return jax.tree.map(lambda x: x[is_new], states)
