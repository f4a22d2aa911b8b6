"""When to save and stop, by JAX's preemption service or by a handler of this process."""

import os
import signal

import jax
import pytest
from jax.experimental import multihost_utils

from jaxcomm.launch import LaunchError
from jaxcomm.launch._join import _Preemption


@pytest.fixture
def in_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)


@pytest.mark.usefixtures("in_cluster")
def test_no_step_of_the_preemption_service_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def reached(number: int) -> bool:
        asked.append(number)
        return number == 27

    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", reached)
    preemption = _Preemption()
    answers = [preemption.ask(step) for step in range(10, 60, 10)]
    assert answers == [False, False, True, True, True]  # It stays so.
    assert asked == [10, *range(11, 28)]


@pytest.mark.usefixtures("in_cluster")
def test_a_service_that_is_off_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def off(number: int) -> bool:
        raise RuntimeError("Preemption sync manager has not been initialized.")

    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", off)
    with pytest.raises(LaunchError, match=r"`launch.initialize\(save_on_sigterm=True\)`"):
        _Preemption().ask(0)


def test_a_single_process_notes_the_first_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        preemption = _Preemption()
        assert not preemption.ask(0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.ask(1) and preemption.ask(2) and not seen
        os.kill(os.getpid(), signal.SIGTERM)  # Handled as before.
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
