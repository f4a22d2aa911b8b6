"""When workers wait: local steps between exchanges, and windows in which each does what it can."""

from jaxcomm.synchronization._by_samples import scale_by_finished
from jaxcomm.synchronization._clock import Clock, Windows, windows
from jaxcomm.synchronization._deal import deal
from jaxcomm.synchronization._diloco import diloco
from jaxcomm.synchronization._growing_batch import growing_batch, proximal_point
from jaxcomm.synchronization._local_sgd import local_sgd, post_local
from jaxcomm.synchronization._microbatches import (
    Finished,
    given_gradients,
    microbatch_gradients,
    window_gradients,
)
from jaxcomm.synchronization._pr_sgd import pr_sgd
from jaxcomm.synchronization._real_time import Closed, RealTimeWindow
from jaxcomm.synchronization._run_time import (
    RunTime,
    meetings_run_time,
    non_blocking_rate,
    run_time,
    windows_run_time,
)
from jaxcomm.synchronization._slowmo import slowmo
from jaxcomm.synchronization._stragglers import (
    Straggler,
    bernoulli_sleep,
    deterministic,
    exponential,
    pareto,
    trace,
)
from jaxcomm.synchronization._streaming_diloco import streaming_diloco
from jaxcomm.synchronization._triggers import (
    Trigger,
    deadline,
    everybody,
    first_done,
    quorum,
    total_count,
)
from jaxcomm.synchronization._waiting import Meeting, all_meet, neighbours_meet, wait
from jaxcomm.synchronization._windows import Queue, Window, begun_at, close_window, new_queue

__all__ = [
    "Clock",
    "Closed",
    "Finished",
    "Meeting",
    "Queue",
    "RealTimeWindow",
    "RunTime",
    "Straggler",
    "Trigger",
    "Window",
    "Windows",
    "all_meet",
    "begun_at",
    "bernoulli_sleep",
    "close_window",
    "deadline",
    "deal",
    "deterministic",
    "diloco",
    "everybody",
    "exponential",
    "first_done",
    "given_gradients",
    "growing_batch",
    "local_sgd",
    "meetings_run_time",
    "microbatch_gradients",
    "neighbours_meet",
    "new_queue",
    "non_blocking_rate",
    "pareto",
    "post_local",
    "pr_sgd",
    "proximal_point",
    "quorum",
    "run_time",
    "scale_by_finished",
    "slowmo",
    "streaming_diloco",
    "total_count",
    "trace",
    "wait",
    "window_gradients",
    "windows",
    "windows_run_time",
]
