"""SIGTERM lets the script save: all processes agree on the step after which they stop."""

import operator
import signal
from types import FrameType

import jax
from jax.experimental import multihost_utils

from jaxcomm.launch._errors import LaunchError
from jaxcomm.launch._run_directory import PREEMPTED, report

SERVICE = "jax_enable_preemption_service"


class _Notice:
    """What this process knows of a preemption."""

    def __init__(self) -> None:
        self._received = False  # Without a cluster.
        self._listens = False
        self._asked: int | None = None  # The last step of which this process has asked.
        self._step: int | None = None  # The step at which all stop.

    def _listen(self) -> None:
        def note(number: int, frame: FrameType | None) -> None:
            self._received = True
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # A second one ends the process.

        if not self._listens:
            try:
                signal.signal(signal.SIGTERM, note)
            except ValueError as error:
                raise LaunchError(
                    "`is_preempted` must be called in the main thread at first: Python handles "
                    "signals there."
                ) from error
            self._listens = True

    def _reached(self, first: int, step: int) -> bool:
        if not jax.distributed.is_initialized():
            self._listen()
            return self._received
        if not getattr(jax.config, SERVICE):
            raise LaunchError(
                "`is_preempted` needs JAX's preemption service: call "
                "`jaxcomm.launch.initialize(save_on_sigterm=True)`."
            )
        # JAX answers for one number only, the largest that any process had given, plus one.
        return any(multihost_utils.reached_preemption_sync_point(n) for n in range(first, step + 1))

    def is_preempted(self, step: int) -> bool:
        if self._asked is not None and step < self._asked:
            raise ValueError(
                f"`step` must not fall: {step} comes after {self._asked}; pass the number of the "
                "step."
            )
        if self._step is None and step != self._asked:
            first = step if self._asked is None else self._asked + 1
            if self._reached(first, step):
                self._step = step
                if not jax.distributed.is_initialized() or jax.process_index() == 0:
                    report(PREEMPTED)
            self._asked = step
        return self._step is not None


_NOTICE = _Notice()


def is_preempted(step: int) -> bool:
    """Returns whether this run shall save and end: a process has received SIGTERM.

    Call it in every process after each step, with the number of the step. In a cluster it is True
    from the same step on in all processes, so that they can save together; this needs
    `initialize(save_on_sigterm=True)`. In a process without a cluster, the first call starts to
    listen for SIGTERM. A second SIGTERM ends the process.

    Args:
      step: The number of the step. It must not fall; it may rise by more than one.

    Raises:
      LaunchError: If this process has joined a cluster without `save_on_sigterm`.

    Example:
      >>> import os, signal
      >>> from jaxcomm import launch
      >>> for step in range(100):
      ...     if launch.is_preempted(step):
      ...         break  # after saving a checkpoint
      ...     if step == 7:
      ...         os.kill(os.getpid(), signal.SIGTERM)
      >>> step
      8
    """
    return _NOTICE.is_preempted(operator.index(step))
