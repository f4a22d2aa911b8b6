"""`python -m experiments COMMAND`: compare, estimate, train, bench or figures."""

import importlib
import os
import re
import signal
import sys
from collections.abc import Sequence
from typing import Any

from experiments.command_line import parse
from experiments.configs import Bench, Digits, Estimate, Figures, Train
from experiments.errors import ExperimentError, Interrupted

COMMANDS = {
    "compare": Digits,
    "estimate": Estimate,
    "train": Train,
    "bench": Bench,
    "figures": Figures,
}

DEFAULT_DEVICES = 8
LEAST_THREADS = 16
_DEVICE_COUNT = "--xla_force_host_platform_device_count"

WRONG_INPUT = 2
INTERRUPTED = 130


def set_up_jax(devices: int | None) -> None:
    """Sets what JAX reads from the environment when it is imported.

    A number of devices in the user's XLA_FLAGS wins over the default, and `devices` over both.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    given = re.findall(rf"{_DEVICE_COUNT}=(\d+)", flags)
    if devices is not None or not given:
        count = devices or DEFAULT_DEVICES
        os.environ["XLA_FLAGS"] = f"{flags} {_DEVICE_COUNT}={count}".strip()
    else:
        count = int(given[-1])
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # XLA sizes its thread pool by NPROC, and many devices deadlock in a small one.
    os.environ.setdefault("NPROC", str(max(LEAST_THREADS, 2 * count)))


def run(command: str, config: Any) -> int:
    """Runs a command; the exit code."""
    set_up_jax(getattr(config, "devices", None))
    return importlib.import_module(f"experiments.{command}").main(config)


def main(arguments: Sequence[str]) -> int:
    """Parses and runs; what the user can mend, and Ctrl+C, are reported in one line."""
    # A shell that starts this in the background has it ignore the signal.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return run(*parse(COMMANDS, arguments))
    except ExperimentError as error:
        print("experiments: error:", " ".join(str(error).split()), file=sys.stderr)
        return WRONG_INPUT
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("experiments", "jaxcomm"):
            raise
        print(f"experiments: error: {error}: install jaxcomm[experiments].", file=sys.stderr)
        return WRONG_INPUT
    except (KeyboardInterrupt, Interrupted) as interrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        left = str(interrupt) or "nothing was recorded."
        print("experiments: interrupted:", left, file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
