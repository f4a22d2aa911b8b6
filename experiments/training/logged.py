"""What a training of the study of stragglers is given, and what it logs."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from experiments.tasks.task import Task


class Training(NamedTuple):
    """One training for a simulated time."""

    config: Any
    setting: Mapping[str, Any]
    parameters: Mapping[str, Any]
    seed: int
    task: Task
    shards: Any  # leaves [workers, examples, ...]
    seconds: float  # the simulated time
    logged: np.ndarray  # float64[], simulated times in increasing order; the last one is the end


class Logged(NamedTuple):
    """The state at one of the times."""

    params: Any  # as the method returns them at this time
    step: int  # steps so far, or events
    seconds: float  # when the parameters became these
    clock: float  # when the last message so far arrived
    finished: int  # mini-batches
    aborted: float = math.nan  # worker-seconds so far on mini-batches that were aborted
    staleness: float = math.nan  # the mean number of events of others since a gradient began
    uploads: float = math.nan  # messages to the server or a neighbor, per gradient
