"""The README of a comparison of sparse methods: question, densities, findings, table, figure."""

import inspect
from collections.abc import Sequence

from experiments import sparse_density, sparse_figure
from experiments.configs import Sparse
from experiments.digits_table import BASELINE, OPTIMIZER_TITLES
from experiments.recording import describe_command
from experiments.sparse_density import MARGIN, LeafDensity
from experiments.sparse_findings import describe_findings
from experiments.sparse_methods import SPARSE_METHODS
from experiments.sparse_table import Row, to_markdown

CAVEAT = (
    "One small model on one small dataset, equally many steps for all. One device stands for all "
    "workers, so that nothing here is about the time of a step: bytes are those that the program "
    "of so many workers sends, and times are those of the codec alone on one device."
)


def write_readme(
    config: Sparse, loss: str, leaves: Sequence[LeafDensity], rows: Sequence[Row]
) -> str:
    """The text of the README, every number of it from the record.

    Args:
      config: What was run.
      loss: What the loss is called.
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
        f"{config.batch} examples, {config.seeds} seeds, each with the same weights and batches "
        f"for all methods; {OPTIMIZER_TITLES[config.optimizer]}. Learning rates are of the grid "
        f"{grid}: of each method the one of least loss on a fifth of the training set, held out, "
        f"over {tuned}. With that rate it is trained on the whole training "
        f"set with seeds 0 to {config.seeds - 1}, which alone are in the table.\n\n"
        f"Command: `{describe_command()}`. Versions and machine are in `environment.txt`, every "
        "setting in `config.json`, every raw metric, those of the choice of rates among them, in "
        "`metrics.jsonl`.\n\n"
        f"{describe_findings(rows, leaves)}\n\n"
        f"Rows of each gradient that are not zero, the most of {config.calibration_batches} "
        "batches of "
        f"seed {config.seeds}. A leaf with rows is sparse if at most "
        f"{100 * sparse_density.MAX_DENSITY:.0f} % of them are in the union of the workers; there "
        f"is room for {MARGIN:g} times as many as were seen. A server has one row "
        f"of every {rows[0].workers}; what is told is of the fullest. All other leaves are sent by "
        f"`{BASELINE}` in the same step.\n\n"
        f"{sparse_density.to_markdown(leaves)}\n"
        f"What a worker sends of the sparse leaves:\n\n{legend}\n"
        f"{to_markdown(rows)}\n"
        f"The held-out loss is the {loss} of the test set; ± is the standard deviation over seeds, "
        f"and differences are to the mean over seeds of `{BASELINE}`, in its standard deviations. "
        "Bytes are read from the traced program, of the sparse leaves alone and of the whole step. "
        "Encoding includes measuring what workers agree on; decoding is of all that a worker "
        f"receives; each is the median of {config.repetitions}, `-` where no codec does it alone. "
        "The last three columns are the largest of all steps and seeds, as far as a method tells: "
        "`overflow`, the rows of one worker for which there was no room (of `union`: their part of "
        "the union); `unpeeled`, the part of the union that was not solved for; `expected error`, "
        "that of estimates, to the squared norm.\n\n"
        f"{CAVEAT}\n\n"
        f"![Held-out loss against sparse bytes]({sparse_figure.NAME})\n"
    )
