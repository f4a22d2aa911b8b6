"""The README of a comparison: question, table, findings, figure."""

import inspect
from collections.abc import Sequence

from experiments.cli.configs import Compare
from experiments.methods import BASELINE
from experiments.studies.digits import acceptance
from experiments.studies.digits.acceptance import Verdict
from experiments.studies.digits.table import TABLE
from experiments.study import figures
from experiments.study.columns import Line
from experiments.study.record import describe_command
from experiments.training.optimizers import OPTIMIZER_TITLES

CAVEAT = (
    "All methods take the same number of steps; the figure shows the loss for the same bytes. One "
    "small network and one small dataset verify the rounding; they do not predict results of "
    "larger models. All workers share one machine and no link is slow: ms/step is the cost of "
    "computation and does not show the time that fewer bytes would save."
)


def _times_above(line: Line, exact: Line) -> int:
    """The number of seeds in which a method has a higher final loss than the exact mean."""
    losses, exact_losses = (each.group.by_seed("train_loss") for each in (line, exact))
    return sum(losses[seed] > exact_losses[seed] for seed in losses)


def _paragraph(lines: Sequence[Line], verdicts: Sequence[Verdict]) -> str:
    """The findings and their limits."""
    exact = {line["optimizer"]: line for line in lines if line.group.is_reference}
    sentences = []
    for verdict in verdicts:
        line, of_mean = verdict.line, exact[verdict.line["optimizer"]]
        points = 100 * (line["test_accuracy"].mean - of_mean["test_accuracy"].mean)
        sentences.append(
            f"With {line['optimizer']}, {'' if verdict.should_pass else 'the control '}"
            f"`{line['method']}` has {line['loss_ratio']:.2f} times the final loss of "
            f"`{BASELINE}`, a higher one in {_times_above(line, of_mean)} of {line['seeds']} "
            f"seeds, differs by {points:+.1f} points of test accuracy, and sends "
            f"{line['bytes_ratio']:.3f} of the bytes: it "
            f"{'passes' if verdict.passes else 'does not pass'}."
        )
    return " ".join([*sentences, CAVEAT])


def write_readme(
    config: Compare, workers: int, lines: Sequence[Line], verdicts: Sequence[Verdict]
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
        f"{TABLE.to_markdown(lines)}\n"
        "Losses are over the whole training set. ± is the standard deviation over seeds. Ratios "
        "are to `mean`. The compression error is ‖G - mean‖² / ‖mean‖² of an update G, averaged "
        "over logged steps and seeds. ms/step is a median.\n\n"
        f"{_paragraph(lines, verdicts)}\n\n"
        f"{acceptance.describe(config, verdicts)}\n\n"
        f"![Training loss against bytes sent per worker]({figures.NAME})\n"
    )
