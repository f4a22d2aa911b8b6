"""The README of a comparison of sparse methods: question, densities, findings, table, figure."""

import inspect
from collections.abc import Sequence

from experiments.cli.configs import Sparse
from experiments.methods import BASELINE
from experiments.methods.sparse import SPARSE_METHODS
from experiments.studies.sparse import density, figure
from experiments.studies.sparse.density import MARGIN, LeafDensity
from experiments.studies.sparse.findings import describe_findings
from experiments.studies.sparse.table import Row, to_markdown
from experiments.study.record import describe_command
from experiments.training.optimizers import OPTIMIZER_TITLES

CAVEAT = (
    "One small model, one small dataset, the same number of steps for all methods. One device "
    "simulates all workers, so no step times are measured: bytes are those of the program for all "
    "workers, and times are those of the codec on one device."
)


def write_readme(
    config: Sparse, loss: str, leaves: Sequence[LeafDensity], rows: Sequence[Row]
) -> str:
    """The text of the README; all its numbers are in the record.

    Args:
      config: The config of the record.
      loss: The name of the loss.
      leaves: The densities of all leaves.
      rows: The table.
    """
    question = (inspect.getdoc(Sparse) or "").splitlines()[0]
    grid = ", ".join(f"{rate:g}" for rate in config.learning_rates or ())
    first, last = config.seeds, config.seeds + config.tuning_seeds - 1
    tuned = f"seeds {first} to {last}" if last > first else f"seed {first}"
    legend = "".join(
        f"- `{row.method}`: {SPARSE_METHODS[row.method].sends}\n"
        for row in rows
        if row.method in SPARSE_METHODS
    )
    return (
        f"# {question}\n\n"
        f"{config.dataset}, {rows[0].workers} simulated workers, {config.steps} steps of "
        f"{config.batch} examples, {config.seeds} seeds; all methods have the same weights and "
        f"batches per seed; {OPTIMIZER_TITLES[config.optimizer]}. Learning rates are from the grid "
        f"{grid}: each method uses the rate with the least loss on a held-out fifth of the "
        f"training set, over {tuned}. With that rate it is trained on the whole training set with "
        f"seeds 0 to {config.seeds - 1}; the table has only these seeds.\n\n"
        f"Command: `{describe_command()}`. Versions and machine are in `environment.txt`, every "
        "setting in `config.json`, every raw metric, including those of the choice of rates, in "
        "`metrics.jsonl`.\n\n"
        f"{describe_findings(rows, leaves)}\n\n"
        "Nonzero rows of each gradient, the maximum over "
        f"{config.calibration_batches} batches of seed {config.seeds}. A leaf with rows is sparse "
        f"if at most {100 * density.MAX_DENSITY:.0f} % of them are in the union of the "
        f"workers. The capacity is {MARGIN:g} times the measured number. A server has one of every "
        f"{rows[0].workers} rows; the table lists the fullest server. `{BASELINE}` sends all other "
        "leaves in the same step.\n\n"
        f"{density.to_markdown(leaves)}\n"
        f"For the sparse leaves, each worker sends:\n\n{legend}\n"
        f"{to_markdown(rows)}\n"
        f"The held-out loss is the {loss} of the test set. ± is the standard deviation over seeds. "
        f"Differences are to the mean over seeds of `{BASELINE}`, in its standard deviations. "
        "Bytes are read from the traced program, for the sparse leaves and for the whole step. "
        "Encoding includes measuring the statistics that are reduced over workers; decoding is of "
        f"all payloads that a worker receives. Each time is the median of {config.repetitions}, "
        "or `-` if the method has no single codec. The last three columns are maxima over steps "
        "and seeds, for methods that report them: `overflow`, the fraction of rows of one worker "
        "above the capacity (for `union`, of rows of the union); `unpeeled`, the fraction of the "
        "union that peeling did not decode; `expected error`, the error of estimates relative to "
        "the squared norm.\n\n"
        f"{CAVEAT}\n\n"
        f"![Held-out loss against sparse bytes]({figure.NAME})\n"
    )
