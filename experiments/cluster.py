"""`jaxcomm.launch` as the commands see it; loaded late, since it loads JAX."""

import contextlib
import sys
from collections.abc import Iterator

from experiments.errors import ExperimentError, LostProcessError


def join(timeout: float) -> None:
    """Makes this process one of its cluster, in which the first alone prints.

    Raises:
      ExperimentError: If not all are there within `timeout` seconds, or there is no such cluster.
    """
    from jaxcomm import launch

    try:
        launch.join(timeout, only_first_prints=True)
    except launch.LaunchError as error:
        raise ExperimentError(str(error)) from error


def in_cluster() -> bool:
    """Whether this process is one of a cluster."""
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()


def is_first() -> bool:
    """Whether this is the process that prints and records."""
    return not in_cluster() or sys.modules["jax"].process_index() == 0


@contextlib.contextmanager
def reraise_lost_process() -> Iterator[None]:
    """Turns the error of a collective, where another process has ended, into one line.

    Raises:
      LostProcessError: For an error of JAX's runtime in a cluster.
    """
    from jaxcomm import launch

    try:
        with launch.reraise_lost_process():
            yield
    except launch.LostProcessError as error:
        raise LostProcessError(str(error)) from error
