"""Joins this process to a cluster whose processes are already started."""

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
from jaxcomm.launch._environment import TOKEN, heartbeat_seconds, start_seconds
from jaxcomm.launch._errors import LOST_PROCESS, WRONG_INPUT, LaunchError, LostProcessError
from jaxcomm.launch._roll_call import answer, call
from jaxcomm.launch._run_directory import JOINED, STARTED, report

# The least time that JAX gets to connect the processes after the roll call.
CONNECT_SECONDS = 60.0
DEFECT = 1
INTERRUPTED = 130

Hook: TypeAlias = Callable[[type[BaseException], BaseException, TracebackType | None], object]


@contextlib.contextmanager
def _exit_after(seconds: float, line: str) -> Iterator[None]:
    """Exits with one line if the block takes too long; JAX would abort the process."""

    def exit_process() -> NoReturn:
        print("jaxcomm.launch: error:", line, file=sys.stderr, flush=True)
        os._exit(WRONG_INPUT)

    timer = threading.Timer(seconds, exit_process)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _may_mean_lost_process(error: BaseException) -> bool:
    """Whether a failed collective may raise this error; some errors of Gloo are ValueErrors."""
    gloo = isinstance(error, ValueError) and str(error).startswith("UNKNOWN: Gloo ")
    return gloo or isinstance(error, LostProcessError | jax.errors.JaxRuntimeError)


def _exit_hook(show: Hook) -> Hook:
    """Returns a hook that calls `show` and exits; JAX's shutdown would wait for other processes."""

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        show(kind, error, trace)
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        if isinstance(error, KeyboardInterrupt):
            os._exit(INTERRUPTED)
        os._exit(LOST_PROCESS if _may_mean_lost_process(error) else DEFECT)

    return end


def initialize(
    timeout: float | None = None,
    *,
    only_main_process_prints: bool = False,
    heartbeat_timeout: int | None = None,
    save_on_sigterm: bool = False,
) -> None:
    """Joins this process to its cluster; then `jax.devices()` has the devices of all processes.

    Call this before other code uses a device. `python -m jaxcomm.launch` or the variables
    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID define the cluster. Without them,
    JAX detects Slurm, Open MPI, Kubernetes and TPU pods. Before JAX connects the processes, they
    report to process 0, which checks that all are present. These messages are signed with
    JAXCOMM_TOKEN, if that is set.

    From then on, an uncaught exception ends this process at once, whereas JAX would wait for the
    other processes. The exit code is 1, or 3 for an error of JAX's runtime, which usually means
    that another process has ended.

    Args:
      timeout: The seconds within which all processes must start, at most a week. Default:
        JAXCOMM_START_TIMEOUT, or 300.
      only_main_process_prints: Whether to discard the standard output of all processes except
        process 0 from now on.
      heartbeat_timeout: The seconds after which a process that does not answer, for instance
        because it is suspended, counts as lost; JAX then ends the others. Default:
        JAXCOMM_HEARTBEAT_TIMEOUT, which `python -m jaxcomm.launch` sets, or 100 as in JAX.
      save_on_sigterm: Whether SIGTERM asks :func:`is_preempted` to stop all processes after the
        same step, so that they can save first. If not, SIGTERM ends this process at once.

    Raises:
      LaunchError: If processes are missing, no cluster is defined or detected, or an argument is
        out of range.

    Example:
      >>> import os
      >>> from jaxcomm import launch
      >>> os.environ["JAX_NUM_PROCESSES"] = "two"
      >>> launch.initialize()
      Traceback (most recent call last):
          ...
      jaxcomm.launch._errors.LaunchError: a process of a cluster needs ...
      >>> del os.environ["JAX_NUM_PROCESSES"]
    """
    seconds = start_seconds(os.environ, timeout)
    heartbeat = heartbeat_seconds(os.environ, heartbeat_timeout)
    deadline = time.monotonic() + seconds
    cluster = find_cluster(os.environ, seconds)
    bind = bind_address(os.environ, cluster.coordinator)
    token = os.environ.get(TOKEN, "")
    if cluster.process == 0:
        report(JOINED)
        call(bind, cluster.processes, seconds, token)
        report(STARTED)
    else:
        answer(cluster.coordinator, cluster.process, cluster.processes, seconds, token)
    if cluster.process and only_main_process_prints:
        # Redirect the file descriptor, since Gloo's C++ code prints too.
        with open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), sys.stdout.fileno())

    # If this is on, JAX receives SIGTERM, and the process does not end.
    jax.config.update("jax_enable_preemption_service", save_on_sigterm)
    left = max(deadline - time.monotonic(), CONNECT_SECONDS)
    with _exit_after(
        left,
        f"process {cluster.process} of {cluster.processes} has passed the roll call but could not "
        f"connect to the other processes within {left:.0f} s.",
    ):
        try:
            jax.distributed.initialize(
                str(cluster.coordinator),
                cluster.processes,
                cluster.process,
                cluster.local_devices,
                cluster_detection_method="deactivate",
                initialization_timeout=round(left) + 60,
                heartbeat_timeout_seconds=heartbeat,
                coordinator_bind_address=str(bind),
            )
            jax.devices()
        except RuntimeError as error:
            first_line = str(error).strip().splitlines()[0]
            raise LaunchError(
                f"process {cluster.process} of {cluster.processes} cannot connect: {first_line}"
            ) from error
    sys.excepthook = _exit_hook(sys.excepthook)


def is_initialized() -> bool:
    """Returns whether this process has joined a cluster.

    Example:
      >>> from jaxcomm import launch
      >>> launch.is_initialized()
      False
    """
    return jax.distributed.is_initialized()


def is_main_process() -> bool:
    """Returns whether this process should print and record: process 0, or the only process.

    Example:
      >>> from jaxcomm import launch
      >>> launch.is_main_process()
      True
    """
    return not is_initialized() or jax.process_index() == 0


@contextlib.contextmanager
def reraise_lost_process() -> Iterator[None]:
    """Context manager: raises a one-line error if a collective fails since another process ended.

    Raises:
      LostProcessError: If the block raises an error of JAX's runtime in a cluster.

    Example:
      >>> from jaxcomm import launch
      >>> with launch.reraise_lost_process():
      ...     total = sum(range(4))  # steps that send
    """
    try:
        yield
    except Exception as error:
        if not is_initialized() or not _may_mean_lost_process(error):
            raise
        first_line = str(error).strip().splitlines()[0]
        raise LostProcessError(
            f"process {jax.process_index()} cannot continue, most likely because another process "
            f"has ended: {first_line}"
        ) from error
