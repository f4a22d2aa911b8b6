"""Saving before the end: SIGTERM asks all processes to stop after the same step."""

import signal
from types import FrameType

import jax

from jaxcomm.launch._errors import LaunchError
from jaxcomm.launch._run_directory import PREEMPTED, report


class _Preemption:
    """What this process knows of a SIGTERM."""

    def __init__(self) -> None:
        self._reached = False  # Whether the step after which all stop is reached.
        self._last: int | None = None  # The last step that was asked about.
        self._received = False
        self._has_handler = False

    def _listen(self) -> None:
        try:
            before = signal.getsignal(signal.SIGTERM)

            def receive(number: int, frame: FrameType | None) -> None:
                self._received = True
                signal.signal(number, before)  # A second one ends the process.

            signal.signal(signal.SIGTERM, receive)
        except ValueError as error:
            raise LaunchError(
                "`is_preempted` must first be called in the main thread, since only that can "
                "receive SIGTERM."
            ) from error
        self._has_handler = True

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
        if self._reached:
            return True
        if jax.distributed.is_initialized():
            self._reached = self._reached_in_cluster(step)
        else:
            if not self._has_handler:
                self._listen()
            self._reached = self._received
        self._last = step
        if self._reached:
            report(PREEMPTED)
        return self._reached


_PREEMPTION = _Preemption()


def is_preempted(step: int) -> bool:
    """Returns whether to save and stop after this step, because a process has received SIGTERM.

    In a cluster, all processes must call it with the same increasing numbers. JAX's preemption
    service then makes all of them stop after the same step, a few steps after the signal;
    :func:`initialize` must have been called with `save_on_sigterm=True`. Without a cluster, the
    first call begins to listen for SIGTERM.

    Args:
      step: The number of the step that has just ended.

    Returns:
      True from one step on, which is the same in all processes; False before.

    Raises:
      LaunchError: If JAX's preemption service is off in this cluster, or if the first call without
        a cluster is not in the main thread.

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
