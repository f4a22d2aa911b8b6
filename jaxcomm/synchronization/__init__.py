"""When workers wait: local steps between exchanges, and windows in which each does what it can."""

from jaxcomm.synchronization._local_sgd import diloco, local_sgd, post_local, slowmo
from jaxcomm.synchronization._microbatches import (
    Finished,
    microbatch_gradients,
    window_gradients,
)

__all__ = [
    "Finished",
    "diloco",
    "local_sgd",
    "microbatch_gradients",
    "post_local",
    "slowmo",
    "window_gradients",
]
