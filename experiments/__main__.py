"""`python -m experiments COMMAND`: digits, survey, train and others."""

import dataclasses
import inspect
import os
import re
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import tyro

from experiments.cluster import in_cluster, initialize, is_main_process
from experiments.errors import ExperimentError, Interrupted
from experiments.studies import MODULES, load
from experiments.study import run
from experiments.study.run import Study

_DEVICE_COUNT = "--xla_force_host_platform_device_count"
MOST_DEVICES = 1024


def set_up_jax(devices: int | None, default: int = 8) -> None:
    """Sets what JAX reads when it looks for devices: by default, fake devices of the CPU.

    The number of devices in the user's XLA_FLAGS overrides `default`; `devices` overrides both.
    """
    flags, count = os.environ.get("XLA_FLAGS", ""), devices or default
    if count > MOST_DEVICES:
        raise ExperimentError(f"--devices must be at most {MOST_DEVICES}, got {count}.")
    if devices is not None or _DEVICE_COUNT not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_DEVICE_COUNT}={count}".strip()
    elif numbers := re.findall(rf"{_DEVICE_COUNT}=(\d+)", flags):
        count = int(numbers[-1])
    jax.config.update("jax_platforms", os.environ.setdefault("JAX_PLATFORMS", "cpu"))
    # XLA sizes its thread pool by NPROC; many devices deadlock in a small pool.
    os.environ.setdefault("NPROC", str(max(16, 2 * count)))
    try:
        jax.devices()
    except (RuntimeError, ValueError) as error:
        raise ExperimentError(f"JAX does not start: {error}") from error


def require_numbers(config: Any) -> None:
    """Checks that the numbers of a config are above 0; a seed may be 0.

    Raises:
      ExperimentError: If one is not.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        for each in value if isinstance(value, tuple) else (value,):
            is_seed = field.name == "seed"
            if type(each) in (int, float) and not (each > 0 or (is_seed and each == 0)):
                option, least = field.name.replace("_", "-"), "at least" if is_seed else "above"
                raise ExperimentError(f"--{option} must be {least} 0, got {each}.")


def execute(name: str, arguments: Sequence[str]) -> int:
    """Parses the options of a command and runs it; returns its exit code."""
    command = load(name)
    config = tyro.cli(
        command.config,
        prog=f"python -m experiments {name}",
        args=arguments,
        config=(tyro.conf.FlagCreatePairsOff, tyro.conf.AvoidSubcommands),
    )
    require_numbers(config)
    if before_jax := getattr(config, "before_jax", None):
        before_jax()
    devices = getattr(config, "devices", None)
    if getattr(config, "distributed", False):
        if devices is not None:
            raise ExperimentError(
                "--devices cannot be combined with --distributed: every device is a worker."
            )
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
        initialize(config.start_timeout)
    else:
        set_up_jax(devices, 1 if before_jax else 8)
    return run.main(command, config) if isinstance(command, Study) else command.main(config)


def main(arguments: Sequence[str]) -> int:
    """Parses and runs; reports user errors, Ctrl+C and SIGTERM in one line each."""
    # A shell that starts this process in the background makes it ignore SIGINT.
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.default_int_handler)
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        print("usage: python -m experiments COMMAND [--help]\n")
        for each in MODULES:
            print(f"  {each:12} {(inspect.getdoc(load(each).config) or '').splitlines()[0]}")
        return 0
    try:
        if name not in MODULES:
            raise ExperimentError(f"there is no command {name!r}; there are {', '.join(MODULES)}.")
        return execute(name, arguments[1:])
    except (ExperimentError, OSError) as error:  # For example a full disk.
        print("experiments: error:", " ".join(str(error).split()), file=sys.stderr)
        return getattr(error, "code", ExperimentError.code)
    except (KeyboardInterrupt, Interrupted) as interrupt:
        for stop in (signal.SIGINT, signal.SIGTERM):
            signal.signal(stop, signal.SIG_IGN)
        if is_main_process():
            message = str(interrupt) or "nothing was recorded."
            print("experiments: interrupted:", message, file=sys.stderr)
        return Interrupted.code
    except Exception:
        if not in_cluster():
            raise
        traceback.print_exc()
        return 1


def exit_process(code: int) -> NoReturn:
    """Exits; a failed process of a cluster exits at once, since JAX would wait for the others."""
    if code and in_cluster():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
