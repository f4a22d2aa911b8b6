"""Joins this process to a cluster whose processes are already started."""

import contextlib
import errno
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType, TracebackType
from typing import Any, NoReturn, TypeAlias

import jax

from jaxcomm.launch._environment import (
    BIND,
    COORDINATOR,
    HEARTBEAT_TIMEOUT,
    PROCESS,
    PROCESSES,
    START_TIMEOUT,
    LaunchError,
    LostProcessError,
    report_preempted,
)

DEFAULT_SECONDS = 300.0
DEFAULT_HEARTBEAT = 100  # That of JAX; the launcher, on one machine, needs less.
MARGIN_SECONDS = 60  # So that `initialize` exits with its own line before JAX aborts.
DEFECT = 1
INTERRUPTED = 130

Hook: TypeAlias = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def _cluster_settings(environment: Mapping[str, str]) -> dict[str, Any]:
    """The cluster that the environment defines, as arguments of JAX; none if JAX must detect it.

    JAX reads only the address, and the devices of this process, from the environment.
    """
    if PROCESSES not in environment and PROCESS not in environment:
        return {}
    if missing := [n for n in (COORDINATOR, PROCESSES, PROCESS) if n not in environment]:
        raise LaunchError(
            f"a process of a cluster needs {' and '.join(missing)} in the environment."
        )
    coordinator = environment[COORDINATOR]
    host, _, port = coordinator.rpartition(":")
    for name, text in ((PROCESSES, environment[PROCESSES]), (PROCESS, environment[PROCESS])):
        if not text.isdecimal():
            raise LaunchError(f"{name} must be an integer, got {text!r}.")
    if not host or not port.isdecimal():
        raise LaunchError(f"{COORDINATOR} must be HOST:PORT, got {coordinator!r}.")
    # JAX would listen on all interfaces for a coordinator on loopback too.
    is_loopback = host in ("localhost", "127.0.0.1", "[::1]")
    return {
        "coordinator_address": coordinator,
        "num_processes": int(environment[PROCESSES]),
        "process_id": int(environment[PROCESS]),
        "cluster_detection_method": "deactivate",
        "coordinator_bind_address": environment.get(
            BIND, coordinator if is_loopback else f"[::]:{port}"
        ),
    }


def _check_port(address: str) -> None:
    """Raises an error if the port is in use; JAX may crash."""
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host.strip("[]"), int(port)), family=family).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise LaunchError(
                f"the coordinator cannot listen at {address}: the port is in use; choose another."
            ) from error


@contextlib.contextmanager
def _exit_after(seconds: float, line: str) -> Iterator[None]:
    """Exits with one line if the block takes too long; JAX would abort the process."""

    def exit_process() -> NoReturn:
        print("jaxcomm.launch: error:", line, file=sys.stderr, flush=True)
        os._exit(LaunchError.code)

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


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _exit_hook(show: Hook) -> Hook:
    """Returns a hook that calls `show` and exits; JAX's shutdown would wait for other processes."""

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        show(kind, error, trace)
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        if isinstance(error, KeyboardInterrupt):
            os._exit(INTERRUPTED)
        os._exit(LostProcessError.code if _may_mean_lost_process(error) else DEFECT)

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
    JAX detects Slurm, Open MPI, Kubernetes and TPU pods. `jax.distributed.initialize` connects the
    processes.

    From then on, an uncaught exception ends this process at once, whereas JAX would wait for the
    other processes. The exit code is 1, or 3 for an error of JAX's runtime, which usually means
    that another process has ended.

    Args:
      timeout: The seconds within which all processes must start; after them, this process exits
        with code 2 and one line. Default: JAXCOMM_START_TIMEOUT, or 300.
      only_main_process_prints: Whether to discard the standard output of all processes except
        process 0 from now on.
      heartbeat_timeout: The seconds after which a process that does not answer, for instance
        because it is suspended, counts as lost; JAX then ends the others. Default:
        JAXCOMM_HEARTBEAT_TIMEOUT, which `python -m jaxcomm.launch` sets, or 100 as in JAX.
      save_on_sigterm: Whether SIGTERM asks :func:`is_preempted` to stop all processes after the
        same step, so that they can save first. If not, SIGTERM ends this process at once.

    Raises:
      LaunchError: If no cluster is defined or detected, its definition is wrong, or the
        coordinator's port is in use.

    Example:
      >>> import os
      >>> from jaxcomm import launch
      >>> os.environ["JAX_NUM_PROCESSES"] = "two"
      >>> launch.initialize()
      Traceback (most recent call last):
          ...
      jaxcomm.launch._environment.LaunchError: a process of a cluster needs ...
      >>> del os.environ["JAX_NUM_PROCESSES"]
    """
    if timeout is None:
        timeout = float(os.environ.get(START_TIMEOUT, DEFAULT_SECONDS))
    if heartbeat_timeout is None:
        heartbeat_timeout = int(os.environ.get(HEARTBEAT_TIMEOUT, DEFAULT_HEARTBEAT))
    cluster = _cluster_settings(os.environ)
    if cluster.get("process_id") == 0:
        _check_port(cluster["coordinator_bind_address"])
    # If this is on, JAX receives SIGTERM, and the process does not end.
    jax.config.update("jax_enable_preemption_service", save_on_sigterm)
    who, where = "this process", "the coordinator"
    if cluster:
        who = f"process {cluster['process_id']} of {cluster['num_processes']}"
        where = cluster["coordinator_address"]
    with _exit_after(
        timeout,
        f"{who} could not join all others at {where} within {timeout:g} s: a process has not "
        "started, cannot reach this address, or expects another number of processes.",
    ):
        try:
            jax.distributed.initialize(
                **cluster,
                initialization_timeout=round(timeout) + MARGIN_SECONDS,
                heartbeat_timeout_seconds=heartbeat_timeout,
            )
            jax.devices()
        except (RuntimeError, ValueError) as error:
            if cluster or isinstance(error, RuntimeError):
                raise LaunchError(f"{who} cannot join the others: {_first_line(error)}") from error
            raise LaunchError(
                "there is no cluster to join: run under Slurm, Open MPI, Kubernetes or on a TPU "
                "pod, with `python -m jaxcomm.launch` on one machine, or set "
                f"{COORDINATOR}, {PROCESSES} and {PROCESS} ({_first_line(error)})"
            ) from error
    sys.excepthook = _exit_hook(sys.excepthook)
    if cluster.get("num_processes", jax.process_count()) != jax.process_count():
        raise LaunchError(
            f"{who} has joined {jax.process_count()} processes: set {PROCESSES} to the same value "
            "in all."
        )
    if only_main_process_prints and jax.process_index():
        # Redirect the file descriptor, since Gloo's C++ code prints too.
        with open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), sys.stdout.fileno())


def is_main_process() -> bool:
    """Returns whether this process should print and record: process 0, or the only process.

    Example:
      >>> from jaxcomm import launch
      >>> launch.is_main_process()
      True
    """
    return not jax.distributed.is_initialized() or jax.process_index() == 0


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
        if not jax.distributed.is_initialized() or not _may_mean_lost_process(error):
            raise
        raise LostProcessError(
            f"process {jax.process_index()} cannot continue, most likely because another process "
            f"has ended: {_first_line(error)}"
        ) from error


class _Preemption:
    """What this process knows of a SIGTERM."""

    def __init__(self) -> None:
        self._reached = False  # Whether the step after which all stop is reached.
        self._last: int | None = None  # The last step that was asked about.
        self._received = False
        self._listens = False

    def _has_received(self) -> bool:
        """Without a cluster; the first call begins to listen."""
        if not self._listens:
            before = signal.getsignal(signal.SIGTERM)

            def receive(number: int, frame: FrameType | None) -> None:
                self._received = True
                signal.signal(number, before)  # A second one ends the process.

            signal.signal(signal.SIGTERM, receive)
            self._listens = True
        return self._received

    def _reached_in_cluster(self, step: int) -> bool:
        from jax.experimental.multihost_utils import reached_preemption_sync_point

        first = step if self._last is None else self._last + 1
        try:
            # JAX says yes for exactly one number, which a step of more than 1 could pass over.
            return any(reached_preemption_sync_point(number) for number in range(first, step + 1))
        except RuntimeError as error:
            raise LaunchError(
                "`is_preempted` needs JAX's preemption service, which is off: join the cluster "
                "with `launch.initialize(save_on_sigterm=True)`."
            ) from error

    def ask(self, step: int) -> bool:
        if not self._reached:
            in_cluster = jax.distributed.is_initialized()
            self._reached = self._reached_in_cluster(step) if in_cluster else self._has_received()
            self._last = step
            if self._reached:
                report_preempted()
        return self._reached


_PREEMPTION = _Preemption()


def is_preempted(step: int) -> bool:
    """Returns whether to save and stop after this step, because a process has received SIGTERM.

    In a cluster, all processes must call it with the same increasing numbers. JAX's preemption
    service then makes all of them stop after the same step, a few steps after the signal;
    :func:`initialize` must have been called with `save_on_sigterm=True`. Without a cluster, the
    first call begins to listen for SIGTERM; it must be in the main thread.

    Args:
      step: The number of the step that has just ended.

    Returns:
      True from one step on, which is the same in all processes; False before.

    Raises:
      LaunchError: If JAX's preemption service is off in this cluster.

    Example:
      >>> import os, signal
      >>> from jaxcomm import launch
      >>> for step in range(100):
      ...     if launch.is_preempted(step):
      ...         break  # after saving a checkpoint
      ...     if step == 2:
      ...         os.kill(os.getpid(), signal.SIGTERM)  # as a cluster manager does
      >>> step
      3
    """
    return _PREEMPTION.ask(step)
