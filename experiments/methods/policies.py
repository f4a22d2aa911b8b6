"""The policies of the event engine, as methods of the study of stragglers.

Those of ADMM are not among them: their workers minimize their own loss exactly, plus a linear and a
quadratic term, in each event. The loss of a network has no such minimum in closed form. Some steps
of an optimizer instead would be another method, with parameters of its own. Neither is LAG-PS, for
which the smoothness of each worker's loss must be known.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from experiments.methods.stragglers import TOPOLOGY, WORKERS
from jaxcomm.synchronization import events
from jaxcomm.synchronization.events import Policy
from jaxcomm.synchronization.events._engine import Sent

EVENTS = "events"
FORM = (
    "every gradient is an event of its own, after which the method decides what it changes and "
    "which workers go on"
)
ELASTICITY = 0.9 / WORKERS  # As the paper recommends.
STEP = optax.sgd(1.0)  # The gradients are multiplied by the learning rate.


class Wire(NamedTuple):
    """What messages take."""

    bandwidth: Any  # bytes per second
    latency: Any  # seconds per message
    all_reduce: Any  # seconds
    bytes: Any  # of the parameters
    rest_of_shard: Any  # seconds of a full gradient on the slowest worker, less those of an event


Travel = Callable[[Wire, Sent], jax.Array]


def _seconds(wire: Wire, messages: jax.Array, size: jax.Array) -> jax.Array:
    return wire.latency * messages.astype(jnp.float32) + size.astype(jnp.float32) / wire.bandwidth


def through_server(wire: Wire, sent: Sent) -> jax.Array:
    """A message to the server, and its reply."""
    return _seconds(wire, sent.uploads + sent.downloads, sent.upload_bytes + sent.download_bytes)


def both_ways(wire: Wire, sent: Sent) -> jax.Array:
    """Two workers send to each other at the same time."""
    return _seconds(wire, sent.uploads, sent.upload_bytes)


def all_reduced(wire: Wire, sent: Sent) -> jax.Array:
    """An all-reduce."""
    return jnp.float32(wire.all_reduce)


def with_full_gradients(wire: Wire, sent: Sent) -> jax.Array:
    """Through the server; a message that is not rounded is a full gradient, which takes longer."""
    is_full = sent.upload_bytes >= wire.bytes
    return through_server(wire, sent) + jnp.where(is_full, wire.rest_of_shard, 0.0)


class Strategy(NamedTuple):
    """A policy, with what it costs."""

    description: str
    build: Callable[..., Policy]  # of the full gradient, and the tuned parameters by name
    travel: Travel = through_server
    waits: bool = False  # whether a worker that never finishes stops all others
    evaluations: int = 1  # gradients of a mini-batch that an event computes
    scale: Callable[[Mapping[str, Any]], float] = lambda own: 1.0  # of the learning rate


def _per_worker(own: Mapping[str, Any]) -> float:
    """So that gradients of all workers, one after the other, are a step of the learning rate."""
    return 1 / WORKERS


def _in_the_long_run(own: Mapping[str, Any]) -> float:
    """So that the learning rate is that of all steps that momentum makes of a gradient."""
    return 1 - own["momentum"]


STRATEGIES: dict[str, Strategy] = {
    "bulk_synchronous": Strategy(
        "synchronous SGD whose exchange takes as long as an all-reduce: `all_reduce blocking` on "
        "the other engine, and the check of this one",
        lambda full: events.bulk_synchronous(STEP), all_reduced, waits=True,
    ),
    "synchronous_server": Strategy(
        "synchronous SGD through a server, with which the following ones are compared",
        lambda full: events.bulk_synchronous(STEP), waits=True,
    ),
    "backup_workers": Strategy(
        "the server takes the first n - `backups` gradients of a step",
        lambda full, **own: events.backup_workers(STEP, **own),
    ),
    "stale_synchronous": Strategy(
        "SSP: the fastest worker is at most `staleness` steps ahead of the slowest",
        lambda full, **own: events.stale_synchronous(STEP, **own), waits=True,
    ),
    "parameter_server": Strategy(
        "asynchronous SGD: the server applies each gradient when it arrives",
        lambda full: events.parameter_server(STEP), scale=_per_worker,
    ),
    "staleness_aware": Strategy(
        "the same, with the learning rate divided by the staleness of the gradient",
        lambda full: events.parameter_server(STEP, weight=events.inverse_staleness),
    ),
    "easgd": Strategy(
        "EASGD: local steps, and an elastic pull to and of a center every `period` of them",
        lambda full, **own: events.easgd(STEP, elasticity=ELASTICITY, **own),
    ),
    "eamsgd": Strategy(
        "EAMSGD: the same with Nesterov's momentum; its learning rate is that of all steps which "
        "momentum makes of a gradient",
        lambda full, **own: events.eamsgd(1.0, elasticity=ELASTICITY, **own),
        scale=_in_the_long_run,
    ),
    "ad_psgd": Strategy(
        "AD-PSGD: a local step and the average with a random neighbor, on the graph of `dpsgd`",
        lambda full: events.asynchronous_pairs(STEP, TOPOLOGY.graph), both_ways,
    ),
    "lag_wk": Strategy(
        "LAG-WK: synchronous, and a worker sends the change of its gradient only if it is large",
        lambda full, **own: events.lag_wk(1.0, **own), waits=True,
    ),
    "laq": Strategy(
        "LAQ: the same with rounded changes of `bits` per coordinate",
        lambda full, **own: events.laq(1.0, **own), waits=True,
    ),
    "asy_lpg": Strategy(
        "AsyLPG: asynchronous steps of variance reduction with rounded messages; every `steps` of "
        "them, all workers compute a gradient of all their examples",
        lambda full, **own: events.asy_lpg(full, 1.0, **own), with_full_gradients, waits=True,
        evaluations=2,
    ),
    "decoupled_diloco": Strategy(
        "Decoupled DiLoCo: the server merges the local steps of a `quorum` of workers, each of "
        "which sends every `period` steps, with the outer optimizer of DiLoCo",
        lambda full, **own: events.decoupled_diloco(
            STEP, optax.sgd(0.7, momentum=0.9, nesterov=True), **own
        ),
    ),
}  # fmt: skip
