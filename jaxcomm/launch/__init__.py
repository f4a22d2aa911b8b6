"""Train with several processes: start them on one machine, or join them on any cluster.

`python -m jaxcomm.launch --processes 4 -- script.py` starts a script in several processes. The
script calls :func:`initialize` before other code uses a device. On a cluster, the cluster's own
manager starts the script.
"""

from jaxcomm.launch._environment import LaunchError, LostProcessError
from jaxcomm.launch._join import (
    initialize,
    is_main_process,
    is_preempted,
    reraise_lost_process,
)

__all__ = [
    "LaunchError",
    "LostProcessError",
    "is_main_process",
    "is_preempted",
    "initialize",
    "reraise_lost_process",
]
