"""`jaxcomm.launch` for the commands: joining a cluster, and what its first process says."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental.multihost_utils import broadcast_one_to_all as broadcast

from experiments.errors import ExperimentError, LostProcessError
from jaxcomm import launch

Value = TypeVar("Value")


def initialize(timeout: float) -> None:
    """Joins the cluster of this process. Only the first process prints."""
    try:
        launch.initialize(timeout, only_main_process_prints=True)
    except launch.LaunchError as error:
        raise ExperimentError(str(error)) from error


def in_cluster() -> bool:
    """Whether this process has joined a cluster."""
    return jax.distributed.is_initialized()


def is_main_process() -> bool:
    """Whether this process prints and writes the record."""
    return not in_cluster() or jax.process_index() == 0


@contextlib.contextmanager
def reraise_lost_process() -> Iterator[None]:
    """Converts the error of a collective after another process has ended into one line."""
    try:
        with launch.reraise_lost_process():
            yield
    except launch.LostProcessError as error:
        raise LostProcessError(str(error)) from error


def from_main_process(value: Value) -> Value:
    """The value of the first process, in all processes of a cluster, which must all call it.

    It is sent as JSON, so tuples become lists and NumPy's numbers become Python's.
    """
    if not in_cluster():
        return value
    content = json.dumps(value, default=np.generic.item).encode() if is_main_process() else b""
    with reraise_lost_process():
        size = int(broadcast(np.int32(len(content))))
        sent: Any = broadcast(np.frombuffer(content.ljust(size, b"\0"), np.uint8))
    return json.loads(sent.tobytes()[:size])
