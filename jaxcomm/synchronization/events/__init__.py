"""Asynchronous and stale training, simulated event by event on one device.

A policy says what an event changes and which workers begin after it; :func:`event_loop` runs any
policy on the clock of any straggler model.
"""

from jaxcomm.synchronization.events._asy_lpg import asy_lpg
from jaxcomm.synchronization.events._decoupled_diloco import decoupled_diloco
from jaxcomm.synchronization.events._elastic import eamsgd, easgd
from jaxcomm.synchronization.events._engine import (
    Event,
    Policy,
    Task,
    event_loop,
)
from jaxcomm.synchronization.events._lazy import lag_ps, lag_wk, laq
from jaxcomm.synchronization.events._messages import sent
from jaxcomm.synchronization.events._parameter_server import (
    backup_workers,
    bulk_synchronous,
    inverse_staleness,
    parameter_server,
)
from jaxcomm.synchronization.events._stale_synchronous import stale_synchronous
from jaxcomm.synchronization.events._without_server import (
    Subproblem,
    asynchronous_pairs,
    d_admm,
    jacobi_admm,
)

__all__ = [
    "Event",
    "Policy",
    "Subproblem",
    "Task",
    "asynchronous_pairs",
    "asy_lpg",
    "backup_workers",
    "bulk_synchronous",
    "d_admm",
    "decoupled_diloco",
    "eamsgd",
    "easgd",
    "event_loop",
    "inverse_staleness",
    "jacobi_admm",
    "lag_ps",
    "lag_wk",
    "laq",
    "parameter_server",
    "sent",
    "stale_synchronous",
]
