"""Runs on processes of Ray: the same bits as a replay, whoever dies, and nothing left behind."""

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest

from jaxcomm import asynchronous
from jaxcomm.asynchronous import Row
from jaxcomm.checkpoint import Checkpoints
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.quantizers import dither
from jaxcomm.compression.sparsifiers import top_k
from jaxcomm.synchronization import events
from tests.asynchronous.program import options_of, paced, processes, train_in_a_full_store
from tests.asynchronous.simulated import START, batches, loss

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="no Ray")
pytestmark = pytest.mark.xdist_group("ray")


def trained(
    policy: events.Policy,
    act: Callable[[Row], None] = lambda row: None,
    of: Callable[..., Any] = paced,
    **changes: Any,
) -> Any:
    """A run whose rows are passed to `act` as they come, and which equals its replay."""
    options = options_of(policy, **changes)
    result = asynchronous.train(loss, START, of, **options, on_row=act)
    again = asynchronous.train(loss, START, batches, **options, replay=result.rows)
    np.testing.assert_array_equal(result.params["w"], again.params["w"])
    assert not processes("")
    return result


def once(condition: Callable[[Row], bool], action: Callable[[], None]) -> Callable[[Row], None]:
    """Acts on the first row of a kind."""
    done = threading.Event()

    def act(row: Row) -> None:
        if condition(row) and not done.is_set():
            done.set()
            action()

    return act


@needs_ray
def test_processes_make_the_same_bits_as_a_replay() -> None:
    policy = events.parameter_server(optax.sgd(0.02), codec=dither(bits=8))
    result = trained(policy)
    summary = result.summary
    assert result.is_done and summary.used == 60 and summary.deaths == 0
    # 8 bits per number and a float32; the parameters come back.
    assert summary.upload_bytes == 60 * 7 and summary.download_bytes == 60 * 12
    np.testing.assert_allclose(result.params["w"], [1, 2, 3], atol=0.5)


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [
        events.stale_synchronous(optax.sgd(0.05), 2),
        events.backup_workers(optax.sgd(0.05), 1),
        events.easgd(optax.sgd(0.05), elasticity=0.3, period=2),
        events.decoupled_diloco(
            optax.sgd(0.02), optax.sgd(0.7, momentum=0.5, nesterov=True), 4, quorum=2, grace=0.1,
            codec=error_feedback(top_k(k=1)),
        ),
    ],
    ids=["stale_synchronous", "backup_workers", "easgd", "decoupled_diloco"],
)  # fmt: skip
def test_a_killed_worker_returns(policy: events.Policy, tmp_path: Path) -> None:
    returns = tmp_path / "returns"

    def kill() -> None:
        returns.touch()
        os.kill(processes("WorkerProcess")[0], signal.SIGKILL)

    def slow(numbers: np.ndarray, worker: int) -> Any:
        """The others still train when it returns, however busy the machine."""
        time.sleep(1.0 if returns.exists() else 0.0)
        return paced(numbers, worker)

    kills = once(lambda row: row.kind == "arrived" and row.number > 3, kill)
    left: list[Row] = []

    def act(row: Row) -> None:
        kills(row)
        # On a busy machine, others may be silent for long.
        if row.kind == "left" and "silent" not in row.reason:
            left.append(row)
        if left and row.kind == "arrived" and row.worker == left[0].worker:
            returns.unlink(missing_ok=True)

    result = trained(policy, act, of=slow, total=300, devices=2)
    died = left[0]
    after = [row for row in result.rows if row.seconds > died.seconds and row.worker == died.worker]
    assert after[0].kind == "joined" and after[1].kind == "arrived"


@needs_ray
@pytest.mark.slow
def test_a_worker_that_hangs_is_replaced() -> None:
    def stop() -> None:
        os.kill(processes("WorkerProcess")[0], signal.SIGSTOP)

    policy = events.bulk_synchronous(optax.sgd(0.05))
    act = once(lambda row: row.kind == "arrived" and row.number > 3, stop)
    result = trained(policy, act, total=300, patience=4.0)
    left = [row for row in result.rows if row.kind == "left"]
    assert left and all(row.reason.startswith("silent for") for row in left)
    assert any(row.outcome == "lost" for row in left)


@needs_ray
@pytest.mark.slow
def test_the_owner_goes_on_at_its_checkpoint(tmp_path: Path) -> None:
    def kill() -> None:
        os.kill(processes("OwnerProcess")[0], signal.SIGKILL)

    policy = events.parameter_server(optax.sgd(0.02))
    result = trained(
        policy, once(lambda row: row.seconds > 6 and row.number > 20, kill),
        total=1500, directory=tmp_path, checkpoint_seconds=1.0,
    )  # fmt: skip
    assert result.is_done and result.summary.restarts == 1 and result.summary.undone > 0
    assert sum(row.examples for row in result.rows if row.outcome == "used") == 1500


@needs_ray
@pytest.mark.slow
def test_an_owner_that_dies_before_its_first_checkpoint_begins_again(tmp_path: Path) -> None:
    def kill() -> None:
        os.kill(processes("OwnerProcess")[0], signal.SIGKILL)

    policy = events.parameter_server(optax.sgd(0.02))
    act = once(lambda row: row.kind == "arrived" and row.number > 3, kill)
    result = trained(policy, act, total=300, directory=tmp_path, checkpoint_seconds=1e6)
    assert result.summary.undone > 3 and result.rows[0].seconds < result.rows[-1].seconds
    assert sum(row.examples for row in result.rows if row.outcome == "used") == 300


@needs_ray
@pytest.mark.slow
def test_rows_that_an_owner_had_saved_and_not_yet_sent_are_kept(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"

    def kill() -> None:
        """Meanwhile, the program asks for no rows."""
        with Checkpoints(directory) as checkpoints:
            before = max(checkpoints.steps, default=0)
            while max(checkpoints.steps, default=0) <= before:
                time.sleep(0.1)
        os.kill(processes("OwnerProcess")[0], signal.SIGKILL)

    seen: list[Row] = []
    kills = once(lambda row: row.kind == "arrived" and row.number > 3, kill)

    def act(row: Row) -> None:
        seen.append(row)
        kills(row)

    policy = events.parameter_server(optax.sgd(0.02))
    result = trained(policy, act, total=600, directory=directory, checkpoint_seconds=1.0)
    (cut,) = (number for number, row in enumerate(result.rows) if row.kind == "restored")
    assert result.rows[cut].number == cut and result.summary.used == 300
    assert [row for row in seen if row in result.rows] == result.rows


@needs_ray
@pytest.mark.slow
def test_an_owner_without_a_directory_cannot_go_on() -> None:
    def kill() -> None:
        os.kill(processes("OwnerProcess")[0], signal.SIGKILL)

    policy = events.parameter_server(optax.sgd(0.02))
    with pytest.raises(RuntimeError, match="pass `directory`"):
        trained(policy, once(lambda row: row.kind == "arrived", kill))
    assert not processes("")


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_leaves_no_process(number: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.asynchronous.program", str(tmp_path)]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, **pipes)
    for _ in range(20):
        assert process.stdout is not None and process.stdout.readline().startswith("row")
    pids = processes("", process.pid)
    process.send_signal(number)
    try:
        _, errors = process.communicate(timeout=90)
    finally:
        process.kill()
    assert process.returncode == (-signal.SIGINT if number == signal.SIGINT else 128 + number)
    assert "workers alive" in errors and len(pids) >= 4
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps[-1] > 10


class Unreadable:
    """Batches that no other process can read."""

    def __call__(self, numbers: np.ndarray, worker: int) -> Any:
        return batches(numbers, worker)

    def __reduce__(self) -> Any:
        return unread, ()


def unread() -> None:
    raise KeyError("no such leaf")


@needs_ray
@pytest.mark.slow
def test_an_error_of_the_user_is_raised() -> None:
    def broken(params: Any, batch: Any) -> Any:
        raise KeyError("no such leaf")

    options = options_of(events.parameter_server(optax.sgd(0.02)))
    for loss_fn, load in ((broken, batches), (loss, Unreadable())):
        with pytest.raises(Exception, match="no such leaf"):
            asynchronous.train(loss_fn, START, load, **options)
        assert not processes("")


@needs_ray
@pytest.mark.slow
def test_a_full_store_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="object store and the disk"):
        train_in_a_full_store()
    assert not processes("")


def test_mistakes_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    server = events.parameter_server(optax.sgd(0.02))
    aborts = events.backup_workers(optax.sgd(0.1), 1, in_flight="abort")
    two = asynchronous.Island(events.parameter_server(optax.sgd(0.1)), 2, 5)
    backups = events.backup_workers(optax.sgd(0.1), 2)
    for changes, message in [
        ({"policy": aborts}, "in_flight='finish_late'"),
        ({"island": two._replace(policy=aborts)}, "in_flight='finish_late'"),
        ({"island": two._replace(policy=backups)}, "less than 2 workers"),
        ({"island": two._replace(workers=0)}, "`island.workers` must be"),
        ({"island": two._replace(messages=0)}, "`island.messages` must be"),
        ({"island": two, "examples": 2}, "fewer than the 3 islands"),
        ({"policy": events.lag_ps(0.1, [1.0] * 3)}, "needs every worker to the end"),
        ({"start": 4}, "`start`=4 is more than"),
        ({"policy": events.backup_workers(optax.sgd(0.1), 3)}, "less than 3 workers"),
        ({"total": None}, "Pass `total` or `seconds`"),
    ]:
        with pytest.raises(ValueError, match=message):
            asynchronous.train(loss, START, batches, **{**options_of(server), **changes})
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install \"jaxcomm\[ray\]\""):
        asynchronous.train(loss, START, batches, **options_of(server))


@needs_ray
def test_another_ray_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.40.1")
    with pytest.raises(ImportError, match=r"needs Ray 2\.59 or newer, not 2\.40\.1"):
        asynchronous.train(
            loss, START, batches, **options_of(events.parameter_server(optax.sgd(0.02)))
        )
