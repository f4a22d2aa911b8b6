"""`python -m jaxcomm.advise --params 125M --workers 64 --link 10Gbit --step 0.3`."""

import argparse
import gc
import sys
from collections.abc import Sequence
from typing import NoReturn

from jaxcomm.advise import advise
from jaxcomm.advise._sizes import LAYERS
from jaxcomm.perf import DEVICES, LINKS, read_calibration

WRONG_INPUT = 2


class _Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m jaxcomm.advise",
        description="Recommends a method for a number of workers and a link, or not to compress.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--params",
        required=True,
        help=f"number of parameters, such as 125M; taken as {LAYERS} or more square matrices",
    )
    parser.add_argument("--workers", required=True, type=int, help="number of workers")
    parser.add_argument("--link", help=f"bandwidth such as 10Gbit, or a preset: {', '.join(LINKS)}")
    parser.add_argument(
        "--calibration",
        help="a file of `perf.Calibration.save`, for codecs, and for the link without --link",
    )
    parser.add_argument(
        "--step", required=True, help="a step that does not communicate, such as 0.3 or 300ms"
    )
    parser.add_argument("--axis", default="data", help="mesh axis of the workers (default: data)")
    parser.add_argument(
        "--device",
        default="a100",
        help=f"device whose memory limits codecs: {', '.join(DEVICES)} (default: a100)",
    )
    return parser


def main(arguments: Sequence[str]) -> int:
    """Prints the advice, or an error in one line; returns the exit code."""
    try:
        given = _parser().parse_args(arguments)
        if given.link is None and given.calibration is None:
            raise ValueError("give --link, --calibration, or both.")
        link = given.link
        if given.calibration is not None:
            link = read_calibration(given.calibration)
            link = link.with_link(given.link, given.axis) if given.link else link
        found = advise(
            given.params,
            given.workers,
            link=link,
            step_seconds=given.step,
            axis_name=given.axis,
            device=given.device,
        )
    except (OSError, ValueError) as error:
        print("advise: error:", " ".join(str(error).split()), file=sys.stderr)
        return WRONG_INPUT
    print(found)
    return 0


if __name__ == "__main__":
    gc.disable()  # A tenth of the time of a process that is soon over.
    sys.exit(main(sys.argv[1:]))
