"""When workers wait: local steps between exchanges, and windows in which each does what it can."""

from jaxcomm.synchronization._local_sgd import diloco, local_sgd, post_local, slowmo
from jaxcomm.synchronization._microbatches import (
    Finished,
    microbatch_gradients,
    window_gradients,
)
from jaxcomm.synchronization._pr_sgd import pr_sgd
from jaxcomm.synchronization._run_time import RunTime, non_blocking_rate, run_time
from jaxcomm.synchronization._stragglers import (
    Straggler,
    bernoulli_sleep,
    deterministic,
    exponential,
    pareto,
    trace,
)
from jaxcomm.synchronization._windows import (
    Queue,
    Window,
    close_window,
    deadline,
    everybody,
    first_done,
    new_queue,
    quorum,
    total_count,
)

__all__ = [
    "Finished",
    "Queue",
    "RunTime",
    "Straggler",
    "Window",
    "bernoulli_sleep",
    "close_window",
    "deadline",
    "deterministic",
    "diloco",
    "everybody",
    "exponential",
    "first_done",
    "local_sgd",
    "microbatch_gradients",
    "new_queue",
    "non_blocking_rate",
    "pareto",
    "post_local",
    "pr_sgd",
    "quorum",
    "run_time",
    "slowmo",
    "total_count",
    "trace",
    "window_gradients",
]
