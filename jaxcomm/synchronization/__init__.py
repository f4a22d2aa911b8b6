"""Synchronization: local steps between exchanges, and windows of a variable number of batches.

In an exchange, workers combine their parameters or gradients. A window is the computation before
one exchange, in which workers may finish different numbers of mini-batches.
"""

from jaxcomm.synchronization import events
from jaxcomm.synchronization._clock import resize_clock, windows
from jaxcomm.synchronization._deal import (
    new_deal,
    next_examples,
    queues_of,
    redeal,
    take_examples,
    window_batches,
)
from jaxcomm.synchronization._des_loc import des_loc
from jaxcomm.synchronization._eager_diloco import eager_diloco
from jaxcomm.synchronization._exchange import average_every
from jaxcomm.synchronization._growing_batch import growing_batch, proximal_point, scale_by_finished
from jaxcomm.synchronization._local_sgd import (
    diloco,
    local_sgd,
    post_local,
    pr_sgd,
    slowmo,
    sparseloco,
)
from jaxcomm.synchronization._real_time import RealTimeWindow
from jaxcomm.synchronization._run_time import (
    barrier_run_time,
    global_barrier,
    neighbor_barrier,
    run_time,
    wait_at_barrier,
    windows_run_time,
)
from jaxcomm.synchronization._sparta import sparta
from jaxcomm.synchronization._stragglers import (
    Straggler,
    bernoulli_sleep,
    deterministic,
    pareto,
    recorded_times,
    shifted_exponential,
)
from jaxcomm.synchronization._streaming_diloco import streaming_diloco
from jaxcomm.synchronization._window_gradients import (
    GradientSums,
    precomputed_gradients,
    window_gradients,
)
from jaxcomm.synchronization._windows import (
    StaleParams,
    Trigger,
    all_workers,
    deadline,
    fastest_worker,
    k_batch_sync,
    k_sync,
    stale_params,
)

__all__ = [
    "average_every",
    "des_loc",
    "sparta",
    "StaleParams",
    "new_deal",
    "next_examples",
    "queues_of",
    "redeal",
    "resize_clock",
    "take_examples",
    "GradientSums",
    "RealTimeWindow",
    "Straggler",
    "Trigger",
    "global_barrier",
    "stale_params",
    "bernoulli_sleep",
    "deadline",
    "window_batches",
    "deterministic",
    "diloco",
    "eager_diloco",
    "all_workers",
    "shifted_exponential",
    "fastest_worker",
    "precomputed_gradients",
    "growing_batch",
    "local_sgd",
    "barrier_run_time",
    "neighbor_barrier",
    "pareto",
    "post_local",
    "pr_sgd",
    "proximal_point",
    "k_sync",
    "run_time",
    "scale_by_finished",
    "slowmo",
    "sparseloco",
    "streaming_diloco",
    "k_batch_sync",
    "recorded_times",
    "wait_at_barrier",
    "window_gradients",
    "windows",
    "windows_run_time",
    "events",
]
