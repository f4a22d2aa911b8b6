"""Processes that live and die together, and start again. None needs JAX."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import jaxcomm
from jaxcomm.launch import LostProcessError, _processes
from jaxcomm.launch._command_line import parse, start
from jaxcomm.launch._environment import RUN_DIRECTORY, report_checkpoint
from tests.checkpoint.chaos import is_alive

ROOT = str(Path(jaxcomm.__file__).parents[1])
Run = Callable[..., tuple[int, str, str]]

# Which of several processes this is, and which start.
ENVIRONMENT = "import os, signal, sys, time; own = os.environ['JAX_PROCESS_ID']; "
ENVIRONMENT += "restart = os.environ['JAXCOMM_RESTARTS']\n"
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, "
STUBBORN += "signal.SIG_IGN); print('ready', flush=True); time.sleep(1000)"


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Launches a program with options; returns the exit code and what was written."""

    def launch(program: str, *options: str) -> tuple[int, str, str]:
        command = [*options, "--", "-c", ENVIRONMENT + program]
        code = start(parse(command, "launch"), "launch", {**os.environ, "PYTHONPATH": ROOT})
        return code, *capfd.readouterr()

    return launch


def soon(happened: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.02)
    return happened()


@contextlib.contextmanager
def pressed(*numbers: int, after: float = 1.0) -> Iterator[None]:
    """Sends this process signals while the block runs."""

    def press() -> None:
        for number in numbers:
            time.sleep(after)
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=press)
    thread.start()
    yield
    thread.join()


def test_lines_are_prefixed_and_success_is_0(run: Run) -> None:
    program = "print('é', own, end='\\r'); print('two'); print(input.__name__, file=sys.stderr); "
    code, stdout, stderr = run(program + "assert sys.stdin.read() == ''")
    assert code == 0
    assert sorted(stdout.splitlines()) == ["[0] two", "[0] é 0", "[1] two", "[1] é 1"]
    assert sorted(stderr.splitlines()) == ["[0] input", "[1] input"]


@pytest.mark.parametrize(
    ("end", "code", "how"),
    [
        ("sys.exit(7)", 7, "exit code 7"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "signal SIGSEGV"),
        ("os.kill(os.getpid(), 40)", 168, "signal 40"),
    ],
)
def test_the_first_failure_ends_all_and_is_reported(
    run: Run, end: str, code: int, how: str
) -> None:
    started = time.monotonic()
    found, _, stderr = run(f"{end} if own == '1' else time.sleep(1000)", "--processes", "3")
    assert found == code and time.monotonic() - started < 60
    assert stderr.splitlines()[-1] == (
        f"launch: error: process 1 of 3 has ended with {how}; the others were stopped."
    )


@pytest.mark.parametrize("end", [f"os._exit({LostProcessError.code})", "os.abort()"])
def test_consequences_are_not_reported_as_the_cause(run: Run, end: str) -> None:
    # The victim is seen first, as where the system is slow to report which process has died.
    code, _, stderr = run(f"{end} if own == '0' else (time.sleep(0.2), os.kill(os.getpid(), 9))")
    assert code == 137 and "process 1 of 2 has ended with signal SIGKILL" in stderr


@pytest.mark.skipif(
    not hasattr(os, "waitid"), reason="not Linux: waitid reports a suspended process"
)
def test_a_suspended_process_is_reported_as_the_cause(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_processes, "GRACE_SECONDS", 0.3)
    code, _, stderr = run(
        "os.kill(os.getpid(), signal.SIGSTOP) if own == '1' else (time.sleep(0.5), os.abort())"
    )
    assert code == 147 and "process 1 of 2 was stopped (SIGSTOP) and did not answer" in stderr


@pytest.mark.skipif(
    not hasattr(os, "waitid"), reason="not Linux: waitid reports a suspended process"
)
def test_an_ended_process_is_not_suspended() -> None:
    """It ended after it was last asked: the launcher itself failed, and started nothing again."""
    process = _processes._Process(0, ["-c", "pass"], os.environ, [])
    os.waitid(os.P_PID, process._popen.pid, os.WEXITED | os.WNOWAIT)
    assert not process.is_suspended() and process.code() == 0


def test_a_long_grace_is_not_for_failures(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_processes, "GRACE_SECONDS", 0.3)
    started = time.monotonic()
    program = f"if own == '1': time.sleep(1); sys.exit(4)\n{STUBBORN}"
    assert run(program, "--grace", "90")[0] == 4
    assert time.monotonic() - started < 60


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_forwarded_once(run: Run, number: signal.Signals) -> None:
    program = f"""
def end(number, _):
    print('got', number, flush=True)
    time.sleep(1)
    print('saved', flush=True)
    sys.exit(0)
signal.signal({int(number)}, end)
time.sleep(1000)"""
    before = signal.getsignal(number)
    with pressed(number):
        code, stdout, stderr = run(program, "--grace", "30")
    assert signal.getsignal(number) is before
    assert code == 128 + number
    assert stdout.count(f"got {int(number)}") == stdout.count("saved") == 2
    assert stderr == f"launch: interrupted: {number.name} has stopped all processes.\n"


def test_a_second_signal_kills(run: Run) -> None:
    started = time.monotonic()
    with pressed(signal.SIGINT, signal.SIGINT):
        code, _, _ = run(STUBBORN, "--grace", "100")
    assert code == 130 and time.monotonic() - started < 60


def test_all_start_again_while_restarts_are_left(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = f"from jaxcomm.launch import _environment as d; d.report_checkpoint({str(tmp_path)!r})"
    program = f"if restart == '1': {save}\nsys.exit(7) if own == '1' else time.sleep(2)"
    code, _, stderr = run(program, "--restarts", "2")
    how = "process 1 of 2 has ended with exit code 7"
    assert code == 7 and stderr.splitlines() == [
        f"launch: {how}; 2 start again without a checkpoint (restart 1 of 2).",
        f"launch: {how}; 2 start again from the checkpoint {tmp_path} (restart 2 of 2).",
        f"launch: error: {how}; the others were stopped; the newest checkpoint is {tmp_path}.",
    ]
    report_checkpoint("nowhere")  # Without a launcher.
    monkeypatch.setenv(RUN_DIRECTORY, str(tmp_path))
    monkeypatch.setenv("JAX_PROCESS_ID", "1")
    report_checkpoint("of/another")
    assert [*tmp_path.iterdir()] == []


def test_failed_processes_are_omitted(run: Run) -> None:
    program = "print('slot', os.environ['JAX_LOCAL_DEVICE_IDS'], flush=True); time.sleep(1)\n"
    program += "sys.exit(5 * (own == '1'))"
    options = ["--processes", "3", "--restarts", "2", "--min-processes", "2"]
    code, stdout, stderr = run(program, *options)
    assert code == 5
    slots = [line.split()[-1] for line in stdout.splitlines()]
    assert [*map(sorted, (slots[:3], slots[3:5], slots[5:]))] == [
        ["0", "1", "2"],
        ["0", "2"],
        ["0", "2"],  # No fewer than --min-processes.
    ]
    assert stderr.count("2 start again") == 2


def test_a_preempted_run_starts_again_or_has_the_code_of_sigterm(run: Run) -> None:
    report = "from jaxcomm.launch import _environment as d; d.report_preempted()"
    program = f"if restart == '0': {report}"
    assert run(program)[0] == 143
    code, _, stderr = run(program, "--restarts", "1")
    assert code == 0 and "SIGTERM has stopped all processes; 2 start again" in stderr


def test_no_restart_after_a_signal(run: Run) -> None:
    program = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\ntime.sleep(1000)"
    with pressed(signal.SIGTERM):
        code, _, stderr = run(program, "--restarts", "5")
    assert code == 143 and "start again" not in stderr


LAUNCHER = ["-m", "jaxcomm.launch", "--processes", "3", "--", "-c"]


def launcher(program: str, **pipes: int) -> subprocess.Popen:
    given = {**os.environ, "PYTHONPATH": ROOT}
    return subprocess.Popen([sys.executable, *LAUNCHER, program], env=given, text=True, **pipes)


@pytest.mark.skipif(sys.platform != "linux", reason="not Linux: its signal to orphans")
@pytest.mark.parametrize("stuck", ["time.sleep(1000)", "sum(range(10**12))"])
def test_workers_end_with_a_killed_launcher(stuck: str) -> None:
    """Also of workers that are in native code, so that no other thread of theirs runs."""
    started = launcher(
        f"import os, time; print(os.getpid(), flush=True); {stuck}; time.sleep(1000)",
        stdout=subprocess.PIPE,
    )
    workers = [int(started.stdout.readline().split()[1]) for _ in range(3)]
    assert all(map(is_alive, workers))
    started.kill()
    started.communicate()
    assert soon(lambda: not any(map(is_alive, workers)))


@pytest.mark.skipif(sys.platform != "linux", reason="not Linux: reads /proc")
def test_child_processes_end_with_their_parent(run: Run) -> None:
    begin = "import subprocess; child = subprocess.Popen(['sleep', '1000']); "
    code, stdout, _ = run(begin + "print(child.pid); sys.exit(3)", "--processes", "1")
    assert code == 3 and soon(lambda: not is_alive(int(stdout.split()[1])))


def test_a_closed_output_pipe_ends_all() -> None:
    reading, writing = os.pipe()
    started = launcher(
        "import time\nwhile True:\n print('x', flush=True); time.sleep(0.01)",
        stdout=writing,
        stderr=subprocess.PIPE,
    )
    os.close(writing)
    os.read(reading, 1)
    os.close(reading)
    _, stderr = started.communicate(timeout=30)
    assert started.returncode == 128 + signal.SIGPIPE
    assert stderr.splitlines()[-1].endswith("SIGPIPE has stopped all processes.")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_it_stops_while_its_output_is_not_read(stream: str) -> None:
    reading, writing = os.pipe()
    flood = f"import sys\nwhile True: print('x' * 1000, file=sys.{stream}, flush=True)"
    started = launcher(flood, stdout=writing, stderr=writing)
    os.close(writing)
    assert os.read(reading, 1) == b"["  # It has begun; from now on no one reads.
    time.sleep(1)
    started.send_signal(signal.SIGTERM)
    assert started.wait(15) == 128 + signal.SIGTERM
    os.close(reading)


def test_unterminated_lines_are_written_in_pieces(run: Run) -> None:
    code, stdout, _ = run("sys.stdout.write('x' * 10**6)", "--processes", "1")
    pieces = stdout.splitlines()
    assert code == 0 and sum(len(piece) - len("[0] ") for piece in pieces) == 10**6
    assert max(map(len, pieces)) < 2**17
