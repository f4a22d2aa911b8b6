"""The README of a comparison: question, table, findings, figure."""

import inspect
from collections.abc import Sequence
from typing import Any

from experiments.cli.configs import Compare
from experiments.methods import BASELINE
from experiments.studies import figures
from experiments.studies.digits import acceptance
from experiments.studies.digits.acceptance import Verdict
from experiments.studies.digits.table import Row, to_markdown
from experiments.study.record import describe_command
from experiments.training.optimizers import OPTIMIZER_TITLES

CAVEAT = (
    "All methods take the same number of steps; the figure shows the loss for the same bytes. One "
    "small network and one small dataset verify the rounding; they do not predict results of "
    "larger models. All workers share one machine and no link is slow: ms/step is the cost of "
    "computation and does not show the time that fewer bytes would save."
)


def _times_above(runs: Sequence[dict[str, Any]], row: Row) -> int:
    """The number of seeds in which a method has a higher final loss than the exact mean."""
    losses = {
        (run["method"], run["seed"]): run["train_loss"]
        for run in runs
        if run["optimizer"] == row.optimizer
    }
    seeds = {seed for _, seed in losses}
    return sum(losses[row.method, seed] > losses[BASELINE, seed] for seed in seeds)


def _paragraph(
    rows: Sequence[Row], verdicts: Sequence[Verdict], runs: Sequence[dict[str, Any]]
) -> str:
    """The findings and their limits."""
    exact = {row.optimizer: row for row in rows if row.method == BASELINE}
    sentences = []
    for verdict in verdicts:
        row = verdict.row
        points = 100 * (row.test_accuracy - exact[row.optimizer].test_accuracy)
        sentences.append(
            f"With {row.optimizer}, {'' if verdict.should_pass else 'the control '}`{row.method}` "
            f"has {row.loss_ratio:.2f} times the final loss of `{BASELINE}`, a higher one in "
            f"{_times_above(runs, row)} of {row.seeds} seeds, differs by {points:+.1f} points of "
            f"test accuracy, and sends {row.bytes_ratio:.3f} of the bytes: it "
            f"{'passes' if verdict.passes else 'does not pass'}."
        )
    return " ".join([*sentences, CAVEAT])


def write_readme(
    config: Compare,
    workers: int,
    runs: Sequence[dict[str, Any]],
    rows: Sequence[Row],
    verdicts: Sequence[Verdict],
) -> str:
    """The text of the README; all its numbers are in the record."""
    question = (inspect.getdoc(config) or "").splitlines()[0]
    rates = " and ".join(
        f"{config.fixed_learning_rates[optimizer]} with {OPTIMIZER_TITLES[optimizer]}"
        for optimizer in config.optimizers
    )
    return (
        f"# {question}\n\n"
        f"{config.dataset}, {workers} workers, {config.steps} steps of {config.batch} examples, "
        f"{config.seeds} seeds; all methods have the same weights and batches per seed; learning "
        f"rates {rates}.\n\n"
        f"Command: `{describe_command()}`. Versions and machine are in `environment.txt`, every "
        f"setting in `config.json`, every raw metric in `metrics.jsonl`.\n\n"
        f"{to_markdown(rows)}\n"
        "Losses are over the whole training set. ± is the standard deviation over seeds. Ratios "
        "are to `mean`. The compression error is ‖G - mean‖² / ‖mean‖² of an update G, averaged "
        "over logged steps and seeds. ms/step is a median.\n\n"
        f"{_paragraph(rows, verdicts, runs)}\n\n"
        f"{acceptance.describe(config, verdicts)}\n\n"
        f"![Training loss against bytes sent per worker]({figures.NAME})\n"
    )
