"""The policies, each with the oracle that replays it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import optax

from jaxcomm import gossip
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.quantizers import dither
from jaxcomm.compression.sparsifiers import top_k
from jaxcomm.synchronization import Straggler, deterministic, events, shifted_exponential
from jaxcomm.synchronization.events import Policy
from jaxcomm.synchronization.events._engine import Work, key_of
from tests.synchronization.events import oracle, problem

UNEVEN = deterministic([1.0, 1.0, 1.75, 3.5])
RANDOM = shifted_exponential(1.0, shift=0.1)


class Row(NamedTuple):
    """A policy and its oracle."""

    name: str
    policy: Callable[[int], Policy]  # from the number of workers
    rule: Callable[[], Any] | None  # `None` if rounding is random
    straggler: Straggler = RANDOM
    seconds_per_byte: float = 0.0
    work: Work = problem.work
    plain: Work | None = problem.halved  # of any size
    grows: bool = False  # whether an event costs more for more workers, as its docstring states

    def __repr__(self) -> str:
        return self.name


RING = [[1, 3], [0, 2], [1, 3], [0, 2]]


def partners(numbers: int) -> list[list[int]]:
    """The partner of each worker of a ring for each of its gradients, [numbers][workers]."""

    def draw(number: jax.Array, worker: jax.Array) -> jax.Array:
        return jax.random.randint(key_of(0, worker, number), (), 0, 2)

    workers = jnp.arange(len(RING))
    drawn = jax.vmap(lambda number: jax.vmap(lambda i: draw(number, i))(workers))
    sides = np.asarray(drawn(jnp.arange(numbers)))
    return [[others[side] for others, side in zip(RING, row, strict=True)] for row in sides]


def inverse(staleness: int) -> float:
    return 1 / max(staleness, 1)


ROWS = [
    Row(
        "bulk_synchronous",
        lambda n: events.bulk_synchronous(optax.sgd(0.3)),
        lambda: oracle.Backup(0.3, 0),
        seconds_per_byte=0.01,
    ),
    Row(
        "backup_workers",
        lambda n: events.backup_workers(optax.sgd(0.3), 1),
        lambda: oracle.Backup(0.3, 1),
        UNEVEN,
    ),
    Row(
        "backup_workers_abort",
        lambda n: events.backup_workers(optax.sgd(0.3), 1, in_flight="abort"),
        lambda: oracle.Backup(0.3, 1, aborts=True),
    ),
    Row(
        "stale_synchronous_0",
        lambda n: events.stale_synchronous(optax.sgd(0.3), 0),
        lambda: oracle.Backup(0.3, 0),
    ),
    Row(
        "stale_synchronous_2",
        lambda n: events.stale_synchronous(optax.sgd(0.3), 2),
        lambda: oracle.StaleSynchronous(0.3, 2),
        UNEVEN,
        seconds_per_byte=0.01,
    ),
    Row(
        "parameter_server",
        lambda n: events.parameter_server(optax.sgd(0.2)),
        lambda: oracle.Server(0.2),
        seconds_per_byte=0.01,
    ),
    Row(
        "parameter_server_aware",
        lambda n: events.parameter_server(optax.sgd(0.2), weight=events.inverse_staleness),
        lambda: oracle.Server(0.2, inverse),
        UNEVEN,
    ),
    Row(
        "parameter_server_top_k",
        lambda n: events.parameter_server(optax.sgd(0.1), codec=error_feedback(top_k(k=1))),
        lambda: oracle.SparseServer(0.1),
    ),
    Row(
        "easgd",
        lambda n: events.easgd(optax.sgd(0.2), elasticity=0.8 / n, period=2),
        lambda: oracle.Elastic(0.2, 0.2, 2),
    ),
    Row(
        "eamsgd",
        lambda n: events.eamsgd(0.1, 0.8, elasticity=0.8 / n, period=2),
        lambda: oracle.Elastic(0.1, 0.2, 2, momentum=0.8),
    ),
    Row(
        "ad_psgd",
        lambda n: events.asynchronous_pairs(optax.sgd(0.2), gossip.ring(n)),
        lambda: oracle.Pairs(0.2, partners(60)),
        seconds_per_byte=0.01,
    ),
    Row(
        "d_admm",
        lambda n: events.d_admm(gossip.ring(n), 0.4),
        lambda: oracle.Consensus(RING, 0.4, [0, 1, 0, 1]),
        work=problem.solve,
        plain=problem.at_zero,
    ),
    Row(
        "d_admm_colors",
        lambda n: events.d_admm(nx.complete_graph(n), 0.2, [*range(n)]),
        lambda: oracle.Consensus([[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]], 0.2, [0, 1, 2, 3]),
        UNEVEN,
        seconds_per_byte=0.01,
        work=problem.solve,
        plain=problem.at_zero,
        grows=True,
    ),
    Row(
        "jacobi_admm",
        lambda n: events.jacobi_admm(gossip.ring(n), 0.4),
        lambda: oracle.Consensus(RING, 0.4),
        work=problem.solve,
        plain=problem.at_zero,
    ),
    Row(
        "lag_wk",
        lambda n: events.lag_wk(0.2, threshold=0.8, memory=3, max_skip=4),
        lambda: oracle.Lazy(0.2, 0.8, 3, 4),
        seconds_per_byte=0.05,
        work=problem.whole,
    ),
    Row(
        "laq",
        lambda n: events.laq(0.2, 3, threshold=0.5, memory=3, max_skip=4),
        lambda: oracle.Lazy(0.2, 0.5, 3, 4, bits=3),
        UNEVEN,
        work=problem.whole,
        seconds_per_byte=0.05,
    ),
    Row(
        "lag_ps",
        lambda n: events.lag_ps(0.2, [1.5] * n, threshold=0.8, memory=3, max_skip=4),
        lambda: oracle.Lazy(0.2, 0.8, 3, 4, smoothness=np.full(4, 1.5)),
        work=problem.whole,
        seconds_per_byte=0.05,
    ),
    Row(
        "asy_lpg",
        lambda n: events.asy_lpg(
            problem.whole,
            0.1,
            3 * n,
            precision=0.0,
            codec=dither(bits=32),
            proximal=problem.shrunk,
        ),
        lambda: oracle.VarianceReduced(0.1, 12, 0.1),
        plain=None,
        seconds_per_byte=0.01,
    ),
    Row(
        "asy_lpg_rounded",
        lambda n: events.asy_lpg(problem.halved, 0.1, n),
        None,
    ),
    Row(
        "decoupled_diloco",
        lambda n: events.decoupled_diloco(
            optax.sgd(0.1),
            optax.sgd(0.7, momentum=0.5, nesterov=True),
            2,
            quorum=2,
            grace=0.4,
            tokens=[1.0, 2.0, 1.0, 3.0] * (n // 4),
        ),
        lambda: oracle.Decoupled(0.1, 0.7, 0.5, 2, 2, 0.4, [1.0, 2.0, 1.0, 3.0]),
    ),
]
REPLAYED = [row for row in ROWS if row.rule]
PLAIN = [row for row in ROWS if row.plain]
