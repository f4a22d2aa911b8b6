"""Processes that live and die together, of which none needs JAX."""

import io
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

import jaxcomm
from jaxcomm.launch import LaunchError, _processes
from jaxcomm.launch._errors import LOST_PROCESS
from jaxcomm.launch._output import write_to
from jaxcomm.launch._processes import Outcome, ProcessGroup

ROOT = str(Path(jaxcomm.__file__).parents[1])


def run(*programs: str) -> tuple[Outcome, str, str]:
    """One process a program, given in the environment."""
    stdout, stderr = io.BytesIO(), io.BytesIO()
    command = [sys.executable, "-c", "import os; exec(os.environ['PROGRAM'])"]
    environments = [
        {**os.environ, "PYTHONPATH": ROOT, "PROGRAM": "import os, sys, time\n" + program}
        for program in programs
    ]
    outcome = ProcessGroup(stdout.write, stderr.write).run(command, environments)
    return outcome, stdout.getvalue().decode(), stderr.getvalue().decode()


def soon(happened: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.02)
    return happened()


def test_lines_are_prefixed_and_success_is_0() -> None:
    outcome, stdout, stderr = run(
        "print('one'); print('two')", "print('é'); print('problem', file=sys.stderr)"
    )
    assert outcome == Outcome(0)
    assert sorted(stdout.splitlines()) == ["[0] one", "[0] two", "[1] é"]
    assert stderr == "[1] problem\n"


def test_the_first_failure_ends_all_and_gives_the_code() -> None:
    started = time.monotonic()
    outcome, _, stderr = run(
        "time.sleep(100)", "print('my reason', file=sys.stderr); sys.exit(7)", "time.sleep(100)"
    )
    assert outcome == Outcome(7, failed=1)
    assert stderr == "[1] my reason\n"
    assert time.monotonic() - started < 50


def test_what_others_say_of_a_failure_is_dropped() -> None:
    complain = "time.sleep(100)"
    complain = f"""
import signal
def complain(*_):
    print('another has died!', file=sys.stderr, flush=True)
    sys.exit(1)
signal.signal(signal.SIGTERM, complain)
print('ready', flush=True)
{complain}"""
    fail = "time.sleep(1); print('experiments: error: why', file=sys.stderr); sys.exit(2)"
    outcome, _, stderr = run(complain, fail)
    assert outcome == Outcome(2, failed=1, explained=True)
    assert stderr == "[1] experiments: error: why\n"


@pytest.mark.parametrize("end", [f"os._exit({LOST_PROCESS})", "os.abort()"])
def test_a_consequence_is_not_taken_for_the_cause(end: str) -> None:
    # The victim is seen first, as where the system is slow to tell who has died.
    outcome, _, stderr = run(
        f"print('experiments: error: lost', file=sys.stderr, flush=True); {end}",
        "time.sleep(0.2); os.kill(os.getpid(), 9)",
    )
    assert outcome == Outcome(137, failed=1, signal=signal.SIGKILL)
    assert stderr == ""


@pytest.mark.skipif(
    not hasattr(os, "waitid"), reason="not Linux: a suspended process is told by waitid"
)
def test_one_that_is_suspended_is_the_cause() -> None:
    outcome, _, stderr = run(
        "time.sleep(0.5); print('no answer', file=sys.stderr, flush=True); os.abort()",
        "os.kill(os.getpid(), 19)",
    )
    assert outcome == Outcome(147, failed=1, signal=signal.SIGSTOP) and stderr == ""


def test_an_abort_of_its_own_is_reported() -> None:
    outcome, _, stderr = run("time.sleep(100)", "print('F1', file=sys.stderr); os.abort()")
    assert outcome == Outcome(134, failed=1, signal=signal.SIGABRT)
    assert "[1] F1" in stderr


def test_one_that_ignores_the_request_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_processes, "GRACE_SECONDS", 0.3)
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(100)"
    started = time.monotonic()
    outcome, _, _ = run(stubborn, "time.sleep(0.5); sys.exit(4)")
    assert outcome == Outcome(4, failed=1) and time.monotonic() - started < 50


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on_once(number: signal.Signals, tmp_path: Path) -> None:
    program = f"""
import signal
def note(number, _):
    with open({str(tmp_path)!r} + '/got' + str(os.getpid()), 'a') as file:
        print(number, file=file)
    print('stopped', flush=True)
    sys.exit(1)
signal.signal({int(number)}, note)
open({str(tmp_path)!r} + '/ready' + str(os.getpid()), 'w').close()
time.sleep(100)"""

    def press() -> None:
        soon(lambda: len(list(tmp_path.glob("ready*"))) == 2)
        os.kill(os.getpid(), number)

    threading.Thread(target=press).start()
    before = signal.getsignal(number)
    outcome, stdout, _ = run(program, program)
    assert outcome == Outcome(128 + number, signal=number)
    assert signal.getsignal(number) is before
    got = [path.read_text() for path in tmp_path.glob("got*")]
    assert got == [f"{int(number)}\n"] * 2
    assert stdout == "[0] stopped\n"  # The others' last words are dropped.


def test_a_second_signal_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_processes, "GRACE_SECONDS", 100.0)
    stubborn = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(100)"

    def press() -> None:
        for _ in range(2):
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press).start()
    started = time.monotonic()
    outcome, _, _ = run(stubborn)
    assert outcome == Outcome(130, signal=signal.SIGINT) and time.monotonic() - started < 50


def test_a_watch_stops_all_and_a_signal_then_is_noted() -> None:
    asked = []

    def watch() -> Outcome | None:
        asked.append(time.monotonic())
        if len(asked) < 3:
            return None
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return Outcome(9, reason="enough")

    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(100)"
    group = ProcessGroup(io.BytesIO().write, io.BytesIO().write, grace=100)
    outcome = group.run([sys.executable, "-c", stubborn], [os.environ] * 2, watch=watch)
    assert outcome == Outcome(9, reason="enough", interrupted=signal.SIGTERM) and len(asked) == 3


LAUNCHER = """
import os, sys
from jaxcomm.launch._processes import ProcessGroup
program = '''
import os, subprocess, time
child = subprocess.Popen(["sleep", "1000"])
print(os.getpid(), child.pid, flush=True)
time.sleep(1000)
'''
ProcessGroup().run([sys.executable, "-c", program], [os.environ] * 3)
"""


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="not Linux: reads /proc")
def test_no_orphan_is_left_of_a_launcher_that_is_killed() -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER],
        env={**os.environ, "PYTHONPATH": ROOT},
        stdout=subprocess.PIPE,
        text=True,
    )
    lines = [launcher.stdout.readline().split() for _ in range(3)]
    children = [int(number) for line in lines for number in line[1:]]
    assert all(map(_is_alive, children))
    launcher.kill()
    launcher.communicate()
    assert soon(lambda: not any(map(_is_alive, children)))


def test_a_reader_that_goes_away_ends_all() -> None:
    program = "while True: print('x' * 100, flush=True); time.sleep(0.01)"
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-c", "import time\n" + program.replace(": ", ":\n ")]
    outcome = ProcessGroup(write_to(writing), io.BytesIO().write).run(command, [os.environ] * 2)
    os.close(writing)
    assert outcome == Outcome(128 + signal.SIGPIPE, signal=signal.SIGPIPE)


def test_what_a_process_has_started_ends_with_it() -> None:
    start = "import subprocess; child = subprocess.Popen(['sleep', '1000']); print(child.pid)"
    outcome, stdout, _ = run(f"{start}; sys.exit(3)")
    assert outcome == Outcome(3, failed=0)
    assert soon(lambda: not _is_alive(int(stdout.split()[1])))
    # Of one that ends well too, and while others go on.
    outcome, stdout, _ = run(start, "time.sleep(1)")
    assert outcome == Outcome(0) and not _is_alive(int(stdout.split()[1]))


def test_one_that_cannot_be_started() -> None:
    with pytest.raises(LaunchError, match="process 0 of 2 cannot be started: No such file"):
        ProcessGroup(bytes.upper, bytes.upper).run(["/no/such/program"], [os.environ] * 2)


def test_a_program_that_reads_finds_the_end_of_its_input() -> None:
    assert run("assert sys.stdin.read() == ''")[0] == Outcome(0)


def test_last_words_come_last() -> None:
    stderr = io.BytesIO()
    command = [sys.executable, "-c", "import sys; print('why', file=sys.stderr); sys.exit(5)"]
    words = lambda outcome: f"ended with {outcome.code}"  # noqa: E731
    ProcessGroup(io.BytesIO().write, stderr.write).run(command, [os.environ], words)
    assert stderr.getvalue().decode() == "[0] why\nended with 5\n"


@pytest.mark.slow
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_it_is_stopped_while_nobody_reads_its_output(stream: str) -> None:
    reading, writing = os.pipe()
    flood = f"import sys\nwhile True: print('x' * 1000, file=sys.{stream}, flush=True)"
    program = LAUNCHER.split("program =")[0] + (
        f"sys.exit(ProcessGroup().run([sys.executable, '-c', {flood!r}], [os.environ] * 2).code)"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": ROOT},
        stdout=writing,
        stderr=writing,
    )
    os.close(writing)
    assert os.read(reading, 1) == b"["  # It has begun; from now on nobody reads.
    time.sleep(1)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(4) == 128 + signal.SIGTERM
    os.close(reading)


def test_output_without_an_end_of_line_takes_bounded_memory() -> None:
    written = [0, 0]

    def write(data: bytes) -> None:
        written[0] += len(data)
        written[1] = max(written[1], len(data))

    megabytes = 50
    flood = f"for _ in range({megabytes}): sys.stderr.buffer.write(b'x' * 2**20)"
    tracemalloc.start()
    outcome = ProcessGroup(io.BytesIO().write, write).run(
        [sys.executable, "-c", f"import sys\n{flood}"], [os.environ]
    )
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert outcome == Outcome(0) and written[0] >= megabytes * 2**20
    assert written[1] < 2**17 and most < 10 * 2**20


def test_a_progress_bar_is_shown_as_it_goes_on() -> None:
    program = "for i in range(3): print(i, end='\\r')"
    assert run(program)[1].splitlines() == ["[0] 0", "[0] 1", "[0] 2"]


def test_a_line_in_many_parts_is_one() -> None:
    program = "for i in range(3): sys.stdout.write('a'); sys.stdout.flush(); time.sleep(0.05)"
    assert run(program)[1] == "[0] aaa\n"


@pytest.mark.parametrize("number", [signal.SIGSEGV, 40])
def test_the_signal_that_ended_one_is_told(number: int) -> None:
    outcome, _, _ = run(f"os.kill(os.getpid(), {int(number)})")
    assert outcome == Outcome(128 + number, failed=0, signal=number)
