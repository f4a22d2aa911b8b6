"""The README of a survey: question, findings, table, figure."""

import inspect
import math
from collections.abc import Sequence

from experiments.cli.configs import Compare, Survey
from experiments.methods import BASELINE
from experiments.studies.survey import figure
from experiments.studies.survey.table import SIGNIFICANCE, Row, to_markdown
from experiments.study.record import describe_command
from experiments.training.optimizers import OPTIMIZER_TITLES

# Per kind of methods, why they may lose.
REASONS = {
    "exact": "exact, so that this is chance",
    "nearest": "they round to nearest, and what is always rounded the same way never comes back",
    "unbiased": (
        "they are right on average, but their noise, the compression error, comes on top of that "
        "of the batches and calls for smaller steps"
    ),
    "biased": "they are biased and remember nothing: what they leave out is lost",
    "signs": (
        "only signs are sent, so that a coordinate of small gradient moves as far as any other, "
        "and steps do not shrink as the gradient does"
    ),
    "feedback": (
        "they leave out much at each step; it is sent later, when the gradient that it was taken "
        "from is out of date"
    ),
    "shifts": (
        "they send what has changed since the last steps, and with gradients of small batches "
        "most of that is noise, which they follow late"
    ),
}

CAVEAT = (
    "One small network, one small dataset, the same number of steps for all methods. Methods that "
    "lose here may not lose in a longer run, where feedback has more time; methods that tie here "
    "may not tie on a larger model. Thresholds were set once by hand; all other options are "
    "defaults. One device simulates all workers, so no time is measured."
)


def _name(rows: Sequence[Row]) -> str:
    return ", ".join(f"`{row.method}`" for row in rows)


def _ratio(row: Row) -> float:
    return row.loss_ratio if math.isfinite(row.loss_ratio) else math.inf


def _times(row: Row) -> str:
    return f"{row.loss_ratio:.2f} times" if math.isfinite(row.loss_ratio) else "diverged"


def _describe_losers(rows: Sequence[Row]) -> list[str]:
    judged = [row for row in rows if row.is_judged]
    losers = [row for row in judged if row.loses]
    if not judged:
        return [f"None is judged, which takes `{BASELINE}` and two seeds."]
    if not losers:
        return [f"None of {len(judged)} methods loses to `{BASELINE}` in loss."]
    sentences = [f"{len(losers)} of {len(judged)} methods lose to `{BASELINE}` in loss."]
    for kind, reason in REASONS.items():
        group = sorted((row for row in losers if row.kind == kind), key=_ratio, reverse=True)
        if group:
            named = ", ".join(f"`{row.method}` ({_times(row)})" for row in group)
            sentences.append(f"{named}: {reason}.")
    return sentences


def _describe_savings(rows: Sequence[Row]) -> list[str]:
    judged = [row for row in rows if row.is_judged]
    workers_pay = [row for row in judged if not row.saves and row.kind != "exact"]
    sentences = []
    if workers_pay:
        sentences.append(
            f"In bytes {_name(workers_pay)} save nothing: their payloads cannot be added, and "
            "each worker's goes to all the others."
        )
    saving = sorted(
        (row for row in judged if row.saves and not row.loses), key=lambda row: row.bytes_ratio
    )
    if saving:
        named = ", ".join(
            f"`{row.method}` ({row.bytes_ratio:.3f}; {_times(row)})" for row in saving
        )
        sentences.append(
            f"Not told apart from `{BASELINE}` in loss, for these parts of its bytes: {named}."
        )
    return sentences


def describe_findings(rows: Sequence[Row]) -> str:
    """States which methods lose to the mean and why, which save no bytes, and the other savings."""
    optimizers = [*dict.fromkeys(row.optimizer for row in rows)]
    paragraphs = []
    for optimizer in optimizers:
        of_optimizer = [row for row in rows if row.optimizer == optimizer]
        title = [f"With {OPTIMIZER_TITLES[optimizer]}:"] if len(optimizers) > 1 else []
        sentences = [*title, *_describe_losers(of_optimizer), *_describe_savings(of_optimizer)]
        if edge := [row for row in of_optimizer if row.at_edge]:
            sentences.append(
                f"At the edge of the grid, so that another rate may do better: {_name(edge)}."
            )
        paragraphs.append(" ".join(sentences))
    return "\n\n".join(paragraphs)


def write_readme(config: Compare, workers: int, rows: Sequence[Row]) -> str:
    """The text of the README; all its numbers are in the record."""
    question = (inspect.getdoc(Survey) or "").splitlines()[0]
    grid = ", ".join(f"{rate:g}" for rate in config.learning_rates or ())
    last = config.seeds + config.tuning_seeds - 1
    return (
        f"# {question}\n\n"
        f"{config.dataset}, {workers} simulated workers, {config.steps} steps of {config.batch} "
        f"examples, {config.seeds} seeds; all methods have the same weights and batches per seed. "
        f"Learning rates are from the grid {grid}: each method uses the rate with the least loss "
        "on a held-out fifth of the training set, over seeds "
        f"{config.seeds} to {last}. With that rate it is trained on the whole training set with "
        f"seeds 0 to {config.seeds - 1}; the table has only these seeds. SGD has momentum 0.9, "
        "except for methods whose aggregator has momentum.\n\n"
        f"Command: `{describe_command()}`. Versions and machine are in `environment.txt`, every "
        "setting in `config.json`, every raw metric, including those of the choice of rates, in "
        "`metrics.jsonl`.\n\n"
        f"{describe_findings(rows)}\n\n"
        f"{to_markdown(rows)}\n"
        f"A method loses if its test loss is above that of `{BASELINE}` by a one-sided paired "
        f"t-test of the logarithms over seeds, at p < {SIGNIFICANCE:g}; p is not corrected for the "
        "number of methods. The test loss is compared, since rates were chosen by the loss on "
        "held-out examples; a higher rate alone can reduce the training loss, which is also "
        "listed. ± is the standard deviation over seeds. Ratios are to `mean`. Bytes are means "
        "over steps if their number varies. The compression error is ‖G - mean‖² / ‖mean‖² of an "
        "update G, averaged over logged steps and seeds; it exceeds 1 if G includes momentum or "
        "the residual of earlier steps.\n\n"
        f"{CAVEAT}\n\n"
        f"![Test loss against bytes]({figure.NAME})\n"
    )
