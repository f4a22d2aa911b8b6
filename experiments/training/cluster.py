"""Wraps `jaxcomm.launch` for the commands; imports it late, since it imports JAX."""

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np

from experiments.cli.errors import ExperimentError, LostProcessError

Value = TypeVar("Value")


def initialize(timeout: float) -> None:
    """Joins the cluster of this process. Only the first process prints.

    Raises:
      ExperimentError: If not all processes join within `timeout` seconds, or there is no cluster.
    """
    from jaxcomm import launch

    try:
        launch.initialize(timeout, only_main_process_prints=True)
    except launch.LaunchError as error:
        raise ExperimentError(str(error)) from error


def in_cluster() -> bool:
    """Whether this process has joined a cluster."""
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()


def is_main_process() -> bool:
    """Whether this process prints and writes the record."""
    return not in_cluster() or sys.modules["jax"].process_index() == 0


@contextlib.contextmanager
def reraise_lost_process() -> Iterator[None]:
    """Converts the error of a collective after another process has ended into one line.

    Raises:
      LostProcessError: If JAX's runtime fails in a cluster.
    """
    from jaxcomm import launch

    try:
        with launch.reraise_lost_process():
            yield
    except launch.LostProcessError as error:
        raise LostProcessError(str(error)) from error


def from_main_process(value: Value) -> Value:
    """The value of the first process, in all processes of a cluster, which must all call it.

    Without a cluster, it is `value`. In a cluster, it has been sent as JSON, so tuples are lists
    and NumPy's numbers are Python's.

    Raises:
      TypeError: If JSON cannot represent the value.
      LostProcessError: If another process has ended.
    """
    if not in_cluster():
        return value
    from jax.experimental.multihost_utils import broadcast_one_to_all as broadcast

    content = b""
    if is_main_process():
        content = json.dumps(value, default=np.generic.item).encode()
    with reraise_lost_process():
        size = int(broadcast(np.int32(len(content))))
        sent: Any = broadcast(np.frombuffer(content.ljust(size, b"\0"), np.uint8))
    return json.loads(sent.tobytes()[:size])
