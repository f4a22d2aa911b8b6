"""Train with several processes: start them on one machine, or join them on any cluster.

`python -m jaxcomm.launch --processes 4 -- script.py` starts a script in several processes. The
script calls :func:`initialize` before other code uses a device. On a cluster, the cluster's own
manager starts the script.
"""

from jaxcomm.launch._command_line import start
from jaxcomm.launch._errors import LaunchError, LostProcessError
from jaxcomm.launch._join import initialize, is_initialized, is_main_process, reraise_lost_process
from jaxcomm.launch._options import LaunchOptions, parse
from jaxcomm.launch._preemption import is_preempted

__all__ = [
    "LaunchError",
    "LostProcessError",
    "LaunchOptions",
    "is_initialized",
    "is_main_process",
    "is_preempted",
    "initialize",
    "parse",
    "reraise_lost_process",
    "start",
]
