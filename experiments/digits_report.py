"""The README of a comparison: question, table, what the numbers say, figure."""

import inspect
from collections.abc import Sequence
from typing import Any

from experiments import acceptance, figures
from experiments.acceptance import Verdict
from experiments.configs import Compare
from experiments.digits_table import BASELINE, OPTIMIZER_TITLES, Row, to_markdown
from experiments.recording import describe_command

CAVEAT = (
    "All methods take equally many steps; what each reaches for equal bytes is in the figure. One "
    "small network and one small dataset show that the rounding does what it claims, not how "
    "larger models fare. All workers share one machine and no link is slow, so ms/step is the cost "
    "of computing alone and shows nothing of what sending less would save."
)


def _times_above(runs: Sequence[dict[str, Any]], row: Row) -> int:
    """In how many seeds a method ended above the exact mean of the same weights and batches."""
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
    """What the numbers say, and what they do not."""
    exact = {row.optimizer: row for row in rows if row.method == BASELINE}
    sentences = []
    for verdict in verdicts:
        row = verdict.row
        points = 100 * (row.test_accuracy - exact[row.optimizer].test_accuracy)
        sentences.append(
            f"With {row.optimizer}, {'' if verdict.should_pass else 'the control '}`{row.method}` "
            f"ends at {row.loss_ratio:.2f} times the loss of `{BASELINE}`, above it in "
            f"{_times_above(runs, row)} of {row.seeds} seeds, {points:+.1f} points of test "
            f"accuracy away, for {row.bytes_ratio:.3f} of the bytes: it "
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
    """The text of the README, every number of it from the record."""
    question = (inspect.getdoc(config) or "").splitlines()[0]
    rates = " and ".join(
        f"{config.fixed_learning_rates[optimizer]} with {OPTIMIZER_TITLES[optimizer]}"
        for optimizer in config.optimizers
    )
    return (
        f"# {question}\n\n"
        f"{config.dataset}, {workers} workers, {config.steps} steps of {config.batch} examples, "
        f"{config.seeds} seeds, each with the same weights and batches for all methods; learning "
        f"rates {rates}.\n\n"
        f"Command: `{describe_command()}`. Versions and machine are in `environment.txt`, every "
        f"setting in `config.json`, every raw metric in `metrics.jsonl`.\n\n"
        f"{to_markdown(rows)}\n"
        "Losses are exact, over the whole training set; ± is the standard deviation over seeds; "
        "ratios are to `mean`; the compression error is ‖G - mean‖² / ‖mean‖² of an update G, "
        "averaged over logged steps and seeds; ms/step is a median.\n\n"
        f"{_paragraph(rows, verdicts, runs)}\n\n"
        f"{acceptance.describe(config, verdicts)}\n\n"
        f"![Training loss against bytes sent per worker]({figures.NAME})\n"
    )
