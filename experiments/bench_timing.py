"""Times whole updates for the bench's table, in a process of its own that has one core.

`python -m experiments.bench_timing SIDE REPEATS NAME...` prints a line of JSON a group.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

from experiments.bench_methods import TIMED
from experiments.bench_updates import fastest, prepare_runs, share_one_core
from experiments.errors import ExperimentError

GROUP = 6  # That share a baseline, and the memory of the machine.
ROUNDS = 2  # Of a repeat.


def time_group(names: Sequence[str], side: int, repeats: int) -> dict[str, list[float]]:
    """The least seconds of each in each repeat, and those of the baseline in the same turns.

    In nanoseconds a coordinate.
    """
    runs, size = prepare_runs({name: TIMED[name] for name in names}, side)
    taken = [fastest(runs, ROUNDS) for _ in range(repeats)]
    return {name: [1e9 * each[name] / size for each in taken] for name in runs}


def time_in_subprocess(
    names: Sequence[str], side: int, repeats: int
) -> Iterator[Mapping[str, list[float]]]:
    """`time_group` of one group after the other, from the process.

    Raises:
      ExperimentError: If it fails; what it says goes to the standard error.
    """
    command = [sys.executable, "-m", __name__, str(side), str(repeats), *names]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            yield json.loads(line)
    if process.returncode:
        raise ExperimentError(f"the process that times updates ended with {process.returncode}.")


def main(arguments: Sequence[str]) -> None:
    """Prints what `timed_apart` reads."""
    side, repeats, *names = arguments
    for first in range(0, len(names), GROUP):
        found = time_group(names[first : first + GROUP], int(side), int(repeats))
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    share_one_core()
    main(sys.argv[1:])
