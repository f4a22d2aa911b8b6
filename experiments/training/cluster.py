"""Wraps `jaxcomm.launch` for the commands; imports it late, since it imports JAX."""

import contextlib
import sys
from collections.abc import Iterator

from experiments.cli.errors import ExperimentError, LostProcessError


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
