"""The README of a survey: question, table, which methods lose and why, figure."""

import inspect
import math
from collections.abc import Sequence

from experiments import survey_figure
from experiments.configs import Compare, Survey
from experiments.digits_table import BASELINE, OPTIMIZER_TITLES
from experiments.recording import describe_command
from experiments.survey_table import SIGNIFICANCE, Row, to_markdown

# What the methods of a kind have in common, which is why they may lose.
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
    "One small network on one small dataset, equally many steps for all: what loses here may not "
    "on a longer run, where feedback has more time, nor need what ties here tie on a larger model. "
    "Thresholds were set by hand, once, and all else is the default of each method. One device "
    "stands for all workers; nothing here is about time."
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
    kept = sorted(
        (row for row in judged if row.saves and not row.loses), key=lambda row: row.bytes_ratio
    )
    if kept:
        named = ", ".join(f"`{row.method}` ({row.bytes_ratio:.3f}; {_times(row)})" for row in kept)
        sentences.append(
            f"Not told apart from `{BASELINE}` in loss, for these parts of its bytes: {named}."
        )
    return sentences


def describe_findings(rows: Sequence[Row]) -> str:
    """Which methods lose to the mean and why, which save nothing, and what the others save."""
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
    """The text of the README, every number of it from the record."""
    question = (inspect.getdoc(Survey) or "").splitlines()[0]
    grid = ", ".join(f"{rate:g}" for rate in config.learning_rates or ())
    last = config.seeds + config.tuning_seeds - 1
    return (
        f"# {question}\n\n"
        f"{config.dataset}, {workers} simulated workers, {config.steps} steps of {config.batch} "
        f"examples, {config.seeds} seeds, each with the same weights and batches for all methods. "
        f"Learning rates are of the grid {grid}: of each method the one of least loss on a fifth "
        f"of the training set, held out, over seeds {config.seeds} to {last}. With that rate it is "
        f"trained on the whole training set with seeds 0 to {config.seeds - 1}, which alone are in "
        "the table. SGD has momentum 0.9, but for methods that gather momentum themselves.\n\n"
        f"Command: `{describe_command()}`. Versions and machine are in `environment.txt`, every "
        "setting in `config.json`, every raw metric, those of the choice of rates among them, in "
        "`metrics.jsonl`.\n\n"
        f"{describe_findings(rows)}\n\n"
        f"{to_markdown(rows)}\n"
        f"A method loses if its test loss is above that of `{BASELINE}` by a paired t-test over "
        f"seeds of the logarithms, one-sided, at p < {SIGNIFICANCE:g}; p is not corrected for how "
        "many methods there are. It is the test loss that is compared, since rates were chosen by "
        "the loss of examples that were not trained on; the training loss, which a higher rate "
        "alone makes smaller, stands beside it. ± is the standard deviation over seeds, ratios are "
        "to `mean`, bytes are means over steps where a method does not always send the same, and "
        "the compression error is ‖G - mean‖² / ‖mean‖² of an update G, averaged over logged steps "
        "and seeds: over 1 where it holds momentum, or what was left out before.\n\n"
        f"{CAVEAT}\n\n"
        f"![Test loss against bytes]({survey_figure.NAME})\n"
    )
