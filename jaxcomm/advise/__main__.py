"""`python -m jaxcomm.advise --params 125M --workers 64 --link 10Gbit --step 0.3`."""

import argparse
import gc
import sys
from collections.abc import Sequence

from jaxcomm.advise import advise
from jaxcomm.advise._advise import LAYERS
from jaxcomm.perf import read_calibration
from jaxcomm.perf._link import DEVICES, LINKS


def main(arguments: Sequence[str]) -> None:
    """Prints the advice; exits with code 2 and a line about the first error."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxcomm.advise",
        description="Recommends a method for a number of workers and a link, or not to compress.",
        usage=argparse.SUPPRESS,  # An error is one line.
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for option, name, text in (
        (
            "--params",
            "params",
            f"on one device, such as 125M; taken as {LAYERS} or more square matrices",
        ),
        ("--workers", "workers", "number of workers"),
        ("--step", "step_seconds", "seconds without communication, such as 0.3 or 300ms"),
        (
            "--link",
            "link",
            "bandwidth of a worker, or of each device if its devices shard the parameters, such as "
            f"10Gbit; or a preset: {', '.join(LINKS)}",
        ),
        ("--calibration", "calibration", "a file of `perf.Calibration.save`, for codecs and link"),
        ("--axis", "axis_name", "mesh axis of the workers (default: data)"),
        ("--device", "device", f"whose memory limits codecs: {', '.join(DEVICES)} (default: a100)"),
        ("--slowest", "slowest", "time of a step on the slowest worker, over the median"),
        ("--failures", "failures_per_hour", "failures of workers per hour"),
    ):
        numbers = {"workers": int, "slowest": float, "failures_per_hour": float}
        kind = numbers.get(name, str)
        required = name in ("params", "workers", "step_seconds")
        parser.add_argument(option, dest=name, type=kind, required=required, help=text)
    given = vars(parser.parse_args(arguments))
    file = given.pop("calibration", None)
    try:
        if file is not None:
            measured = read_calibration(file)
            axis = given.get("axis_name", "data")
            given["link"] = measured.with_link(given["link"], axis) if "link" in given else measured
        elif "link" not in given:
            raise ValueError("give --link, --calibration, or both.")
        found = advise(**given)
    except (OSError, ValueError) as error:
        parser.error(" ".join(str(error).split()))
    print(found)


if __name__ == "__main__":
    gc.disable()  # A tenth of the time of a process that is soon over.
    main(sys.argv[1:])
