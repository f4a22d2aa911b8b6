"""Several processes that train together: started on one machine, and joined anywhere.

`python -m jaxcomm.launch --processes 4 -- script.py` starts a script, which calls :func:`join`
before anything else touches a device; on a cluster, its own manager starts it.
"""

from jaxcomm.launch._command_line import LaunchOptions, parse, start
from jaxcomm.launch._errors import LaunchError, LostProcessError
from jaxcomm.launch._join import has_joined, is_first, join, reraise_lost_process

__all__ = [
    "LaunchError",
    "LostProcessError",
    "LaunchOptions",
    "has_joined",
    "is_first",
    "join",
    "parse",
    "reraise_lost_process",
    "start",
]
