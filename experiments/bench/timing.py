"""Times whole updates for the table of the bench, in a separate process on one core.

`python -m experiments.bench.timing SIDE REPEATS NAME...` prints a line of JSON per group.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

from experiments.bench.methods import TIMED
from experiments.bench.updates import fastest, prepare_runs, share_one_core
from experiments.cli.errors import ExperimentError

GROUP = 6  # Rows with a common baseline, which are in memory at the same time.
ROUNDS = 2  # Per repeat.


def time_group(names: Sequence[str], side: int, repeats: int) -> dict[str, list[float]]:
    """The minimum nanoseconds per coordinate of each row and of the baseline, per repeat."""
    runs, size = prepare_runs({name: TIMED[name] for name in names}, side)
    taken = [fastest(runs, ROUNDS) for _ in range(repeats)]
    return {name: [1e9 * each[name] / size for each in taken] for name in runs}


def time_in_subprocess(
    names: Sequence[str], side: int, repeats: int
) -> Iterator[Mapping[str, list[float]]]:
    """Yields the results of `time_group` for one group after another, from a subprocess.

    Raises:
      ExperimentError: If the subprocess fails; it prints the reason to the standard error.
    """
    command = [sys.executable, "-m", __name__, str(side), str(repeats), *names]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            yield json.loads(line)
    if process.returncode:
        raise ExperimentError(f"the subprocess that times updates ended with {process.returncode}.")


def main(arguments: Sequence[str]) -> None:
    """Prints the results that `time_in_subprocess` reads."""
    side, repeats, *names = arguments
    for first in range(0, len(names), GROUP):
        result = time_group(names[first : first + GROUP], int(side), int(repeats))
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    share_one_core()
    main(sys.argv[1:])
