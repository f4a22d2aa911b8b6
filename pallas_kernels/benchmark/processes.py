"""A process with a time limit, whose lines are passed on as they come."""

import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence


def run_limited(
    command: Sequence[str],
    seconds: float,
    environment: Mapping[str, str],
    say: Callable[[str], None],
) -> str:
    """Runs the command for at most `seconds`.

    Returns:
      Why it did not finish; empty if it did.
    """
    process = subprocess.Popen(
        [sys.executable, *command],
        env=dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    last: list[str] = []

    def pass_on() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            last[:] = [line.strip() or (last or [""])[0]]
            say(line.rstrip("\n"))

    reader = threading.Thread(target=pass_on, daemon=True)
    reader.start()
    try:
        code = process.wait(timeout=max(seconds, 0.0))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return f"its time limit of {seconds:.0f} s is over"
    finally:
        reader.join(timeout=10)
        if process.stdout is not None:
            process.stdout.close()
    return f"exit code {code}: {(last or ['no output'])[0]}" if code else ""
