"""Joining a cluster of processes, which somebody else has started."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import NoReturn, TypeAlias

import jax

from jaxcomm.launch._cluster import bind_address, find_cluster
from jaxcomm.launch._errors import LOST_PROCESS, WRONG_INPUT, LaunchError, LostProcessError
from jaxcomm.launch._roll_call import answer, call
from jaxcomm.launch._told import TOKEN, start_seconds

# What JAX gets at least to connect all that have answered.
CONNECT_SECONDS = 60.0
DEFECT = 1
INTERRUPTED = 130

Hook: TypeAlias = Callable[[type[BaseException], BaseException, TracebackType | None], object]


@contextlib.contextmanager
def _or_give_up(seconds: float, line: str) -> Iterator[None]:
    """Ends this process with one line where the block takes too long; JAX would abort it."""

    def give_up() -> NoReturn:
        print("jaxcomm.launch: error:", line, file=sys.stderr, flush=True)
        os._exit(WRONG_INPUT)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _may_be_of_a_lost_process(error: BaseException) -> bool:
    """Whether a collective may have failed with it; Gloo's errors are some of another type."""
    gloo = isinstance(error, ValueError) and str(error).startswith("UNKNOWN: Gloo ")
    return gloo or isinstance(error, LostProcessError | jax.errors.JaxRuntimeError)


def _end_at_once_after(show: Hook) -> Hook:
    """Ends a process that fails, once `show` has; JAX's own shutdown would wait for the others."""

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        show(kind, error, trace)
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        if isinstance(error, KeyboardInterrupt):
            os._exit(INTERRUPTED)
        os._exit(LOST_PROCESS if _may_be_of_a_lost_process(error) else DEFECT)

    return end


def join(timeout: float | None = None, *, only_first_prints: bool = False) -> None:
    """Makes this process one of its cluster; afterwards `jax.devices()` are those of all.

    To be called before anything else touches a device. The cluster is what
    `python -m jaxcomm.launch` or JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID
    tell, or what JAX detects: Slurm, Open MPI, Kubernetes, TPU pods. Before JAX connects them,
    process 0 calls the roll of all, signed with JAXCOMM_TOKEN where that is set.

    From then on an exception that nobody catches ends this process at once, where JAX would have
    it wait for the others; its exit code is 1, or 3 for an error of JAX's runtime, which most
    often says that another process has ended.

    Args:
      timeout: Seconds until all processes have to be there, at most a week; where it is not given,
        JAXCOMM_START_TIMEOUT, or 300.
      only_first_prints: Whether what the others write to the standard output is lost from now on.

    Raises:
      LaunchError: If they are not there, or there is no such cluster.

    Example:
      >>> import os
      >>> from jaxcomm import launch
      >>> os.environ["JAX_NUM_PROCESSES"] = "two"
      >>> launch.join()
      Traceback (most recent call last):
          ...
      jaxcomm.launch._errors.LaunchError: a process of a cluster needs ...
      >>> del os.environ["JAX_NUM_PROCESSES"]
    """
    seconds = start_seconds(os.environ, timeout)
    deadline = time.monotonic() + seconds
    cluster = find_cluster(os.environ, seconds)
    bind = bind_address(os.environ, cluster.coordinator)
    token = os.environ.get(TOKEN, "")
    if cluster.process == 0:
        call(bind, cluster.processes, seconds, token)
    else:
        answer(cluster.coordinator, cluster.process, cluster.processes, seconds, token)
    if cluster.process and only_first_prints:
        # Below Python, since Gloo greets too.
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), sys.stdout.fileno())

    # JAX would take SIGTERM as a notice of preemption, which nothing here asks for.
    jax.config.update("jax_enable_preemption_service", False)
    left = max(deadline - time.monotonic(), CONNECT_SECONDS)
    with _or_give_up(
        left,
        f"process {cluster.process} of {cluster.processes} has answered the others but could not "
        f"connect with them within {left:.0f} s.",
    ):
        try:
            jax.distributed.initialize(
                str(cluster.coordinator),
                cluster.processes,
                cluster.process,
                cluster.local_devices,
                cluster_detection_method="deactivate",
                initialization_timeout=round(left) + 60,
                coordinator_bind_address=str(bind),
            )
            jax.devices()
        except RuntimeError as error:
            said = str(error).strip().splitlines()[0]
            raise LaunchError(
                f"process {cluster.process} of {cluster.processes} cannot connect: {said}"
            ) from error
    sys.excepthook = _end_at_once_after(sys.excepthook)


def has_joined() -> bool:
    """Whether this process is one of a cluster.

    Example:
      >>> from jaxcomm import launch
      >>> launch.has_joined()
      False
    """
    return jax.distributed.is_initialized()


def is_first() -> bool:
    """Whether this is the process that prints and records: process 0, or the only one.

    Example:
      >>> from jaxcomm import launch
      >>> launch.is_first()
      True
    """
    return not has_joined() or jax.process_index() == 0


@contextlib.contextmanager
def reraise_lost_process() -> Iterator[None]:
    """Turns the error of a collective, where another process has ended, into one line.

    Raises:
      LostProcessError: For an error of JAX's runtime in a cluster.

    Example:
      >>> from jaxcomm import launch
      >>> with launch.reraise_lost_process():
      ...     total = sum(range(4))  # steps that send
    """
    try:
        yield
    except Exception as error:
        if not has_joined() or not _may_be_of_a_lost_process(error):
            raise
        said = str(error).strip().splitlines()[0]
        raise LostProcessError(
            f"process {jax.process_index()} cannot go on, most likely since another has ended: "
            f"{said}"
        ) from error
