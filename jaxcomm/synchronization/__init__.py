"""Synchronization: local steps between exchanges, and windows of a variable number of batches.

In an exchange, workers combine their parameters or gradients. A window is the computation before
one exchange, in which workers may finish different numbers of mini-batches.
"""

from jaxcomm.synchronization import events
from jaxcomm.synchronization._clock import Clock, Windows, resize_clock, windows
from jaxcomm.synchronization._deal import (
    Deal,
    new_deal,
    next_examples,
    queues_of,
    redeal,
    take_examples,
    window_batches,
)
from jaxcomm.synchronization._eager_diloco import eager_diloco
from jaxcomm.synchronization._exchange import Period, average_every
from jaxcomm.synchronization._growing_batch import growing_batch, proximal_point, scale_by_finished
from jaxcomm.synchronization._local_sgd import (
    diloco,
    local_sgd,
    post_local,
    pr_sgd,
    slowmo,
    sparseloco,
)
from jaxcomm.synchronization._real_time import RealTimeWindow, WindowResult
from jaxcomm.synchronization._run_time import (
    Barrier,
    RunTime,
    barrier_run_time,
    global_barrier,
    neighbor_barrier,
    non_blocking_rate,
    run_time,
    wait_at_barrier,
    windows_run_time,
)
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
    microbatch_gradients,
    precomputed_gradients,
    window_gradients,
)
from jaxcomm.synchronization._windows import (
    Queue,
    StaleParams,
    Trigger,
    Window,
    all_workers,
    close_window,
    deadline,
    fastest_worker,
    k_batch_sync,
    k_sync,
    new_queue,
    stale_params,
)

__all__ = [
    "Period",
    "average_every",
    "Clock",
    "Deal",
    "StaleParams",
    "new_deal",
    "next_examples",
    "queues_of",
    "redeal",
    "resize_clock",
    "take_examples",
    "WindowResult",
    "GradientSums",
    "Barrier",
    "Queue",
    "RealTimeWindow",
    "RunTime",
    "Straggler",
    "Trigger",
    "Window",
    "Windows",
    "global_barrier",
    "stale_params",
    "bernoulli_sleep",
    "close_window",
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
    "microbatch_gradients",
    "neighbor_barrier",
    "new_queue",
    "non_blocking_rate",
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
