"""`python -m experiments COMMAND`: digits, survey, train, launch and others."""

import argparse
import contextlib
import importlib
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from experiments.cli.configs import (
    Bench,
    Figures,
    Launch,
    Predict,
    Profile,
    Records,
    Report,
    Timeline,
    Train,
)
from experiments.cli.errors import INTERRUPTED, WRONG_INPUT, ExperimentError, Interrupted
from experiments.cli.options import device_number
from experiments.cli.parse import Command, first_line, parse
from experiments.studies import command_of, load, names
from experiments.training.cluster import in_cluster, initialize, is_main_process

# The commands that are no studies. Each module has a function `main`, which takes the config.
OTHERS: dict[str, tuple[type, str]] = {
    "train": (Train, "train"),
    "launch": (Launch, "cli.launch"),
    "bench": (Bench, "bench.run"),
    "figures": (Figures, "study.figures"),
    "predict": (Predict, "study.predictions"),
    "profile": (Profile, "study.profile"),
    "records": (Records, "study.records"),
    "report": (Report, "report.command"),
    "timeline": (Timeline, "bench.timeline"),
}

COMMANDS = {
    **{name: command_of(name) for name in names()},
    **{
        name: Command(first_line(config), lambda config=config: config)
        for name, (config, _) in OTHERS.items()
    },
}

WITHOUT_JAX = {"launch", "records"}  # They only start other processes.
DEFAULT_DEVICES = 8
MIN_THREADS = 16
DEFECT = 1
_DEVICE_COUNT = "--xla_force_host_platform_device_count"


def set_up_jax(devices: int | None, default: int = DEFAULT_DEVICES) -> None:
    """Sets the environment variables that JAX reads when it looks for devices.

    The number of devices in the user's XLA_FLAGS overrides `default`; `devices` overrides both.

    Raises:
      ExperimentError: If the number in XLA_FLAGS is not a valid number of devices.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    counts = re.findall(rf"{_DEVICE_COUNT}=(\S*)", flags)
    if devices is not None or not counts:
        count = devices or default
        os.environ["XLA_FLAGS"] = f"{flags} {_DEVICE_COUNT}={count}".strip()
    else:
        try:
            count = [device_number(number) for number in counts][-1]
        except argparse.ArgumentTypeError as error:
            raise ExperimentError(f"XLA_FLAGS: {_DEVICE_COUNT} {error}.") from error
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if "jax" in sys.modules:  # JAX has read the variable; it reads the others with its first device.
        sys.modules["jax"].config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
    # XLA sizes its thread pool by NPROC; many devices deadlock in a small pool.
    os.environ.setdefault("NPROC", str(max(MIN_THREADS, 2 * count)))


@contextlib.contextmanager
def reporting_jax_errors() -> Iterator[None]:
    """Reports an error of JAX's import or of its search for devices in one line."""
    try:
        yield
        importlib.import_module("jax").devices()
    except (RuntimeError, ValueError) as error:
        raise ExperimentError(f"JAX does not start: {error}") from error


def run(command: str, config: Any) -> int:
    """Runs a command and returns its exit code."""
    devices = getattr(config, "devices", None)
    before_jax = getattr(config, "before_jax", None)
    if before_jax:
        before_jax()
    if getattr(config, "distributed", False):
        if devices is not None:
            raise ExperimentError(
                "--devices cannot be combined with --distributed: every device is a worker."
            )
        set_up_jax(None, 1)
        with reporting_jax_errors():
            initialize(config.start_timeout)
    elif command not in WITHOUT_JAX:
        set_up_jax(devices, 1 if before_jax else DEFAULT_DEVICES)
        with reporting_jax_errors():
            pass
    if command in names():
        return importlib.import_module("experiments.study.command").main(load(command), config)
    return importlib.import_module(f"experiments.{OTHERS[command][1]}").main(config)


def main(arguments: Sequence[str]) -> int:
    """Parses and runs; reports user errors, Ctrl+C and SIGTERM in one line each."""
    # A shell that starts this process in the background makes it ignore SIGINT.
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.default_int_handler)
    try:
        return run(*parse(COMMANDS, arguments))
    except ExperimentError as error:
        print("experiments: error:", " ".join(str(error).split()), file=sys.stderr)
        return error.code
    except ImportError as error:
        if (error.name or "").partition(".")[0] in ("experiments", "jaxcomm"):
            raise
        # Without a name, the error is from `jaxcomm.gossip`, whose message has the remedy.
        remedy = ": install jaxcomm[experiments]." if error.name else ""
        print(f"experiments: error: {error}{remedy}", file=sys.stderr)
        return WRONG_INPUT
    except OSError as error:  # For example a full disk or missing permissions.
        print("experiments: error:", error, file=sys.stderr)
        return WRONG_INPUT
    except (KeyboardInterrupt, Interrupted) as interrupt:
        for stop in (signal.SIGINT, signal.SIGTERM):
            signal.signal(stop, signal.SIG_IGN)
        if is_main_process():
            message = str(interrupt) or "nothing was recorded."
            print("experiments: interrupted:", message, file=sys.stderr)
        return INTERRUPTED
    except Exception:
        if not in_cluster():
            raise
        traceback.print_exc()
        return DEFECT


def exit_process(code: int) -> NoReturn:
    """Exits; a failed process of a cluster exits at once, since JAX would wait for the others."""
    if code and in_cluster():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
