"""The README of a comparison of stragglers."""

import inspect
import math
from collections.abc import Sequence

from experiments.cli.configs import Stragglers
from experiments.methods.stragglers import BUDGET, DEAD_SLOWDOWN, PARETO_SHAPE, STRATEGIES, WORKERS
from experiments.studies.stragglers import figure
from experiments.studies.stragglers.table import CLAIMED_SPEEDUP, Gain, Row, to_markdown
from experiments.study.record import describe_command


def verdict(gains: Sequence[Gain]) -> str:
    """The result of the claim, in a few sentences."""
    claimed = [gain for gain in gains if gain.waiting in ("dpsgd", "matcha")]
    finite = [gain for gain in claimed if not math.isnan(gain.ratio)]
    if not finite:
        return "The claim was not put to the test, which takes D-PSGD or MATCHA and its own form."
    best, worst = max(finite, key=lambda g: g.ratio), min(finite, key=lambda g: g.ratio)
    slower = [gain for gain in finite if gain.ratio <= 1]
    two = [gain for gain in finite if gain.ratio >= CLAIMED_SPEEDUP]
    text = (
        "The paper claims up to half the time of D-PSGD and MATCHA where workers are not alike. "
        f"Here their non-blocking forms are {best.ratio:.2f} times faster at best ({best.dataset}, "
        f"{best.speeds}, {best.strategy}) and {worst.ratio:.2f} times at worst ({worst.dataset}, "
        f"{worst.speeds}, {worst.strategy}); they are at least {CLAIMED_SPEEDUP:g} times faster "
        f"in {len(two)} of {len(claimed)} comparisons, and no faster in {len(slower)}"
    )
    if slower:
        text += ": " + "; ".join(f"{g.dataset}, {g.speeds}, {g.strategy}" for g in slower)
    if missing := [gain for gain in claimed if math.isnan(gain.ratio)]:
        text += f". In {len(missing)} one of the two diverged with a seed: " + "; ".join(
            f"{g.dataset}, {g.speeds}, {g.strategy}" for g in missing
        )
    return text + "."


def fastest(rows: Sequence[Row]) -> str:
    """The fastest strategy per setting, in a sentence."""
    settings = dict.fromkeys((row.dataset, row.speeds) for row in rows)
    best = []
    for setting in settings:
        finite = [r for r in rows if (r.dataset, r.speeds) == setting and r.reached == r.seeds]
        if finite:
            row = min(finite, key=lambda row: row.seconds_to_loss)
            best.append(f"{row.strategy} ({', '.join(setting)}: {row.seconds_to_loss:.2f} s)")
    return f"The fastest strategies are {'; '.join(best)}."


def write_readme(
    config: Stragglers,
    rows: Sequence[Row],
    gains: Sequence[Gain],
    at_edge: Sequence[str],
) -> str:
    """The text of the README; all its numbers are in the record."""
    question = (inspect.getdoc(Stragglers) or "").splitlines()[0]
    used = {row.strategy for row in rows}
    legend = "".join(
        f"- `{name}`: {strategy.description}\n"
        for name, strategy in STRATEGIES.items()
        if name in used
    )
    by_dataset = dict.fromkeys((row.dataset, row.loss) for row in rows)
    losses = " and ".join(f"{loss:.4g} ({dataset})" for dataset, loss in by_dataset)
    milliseconds = 1e3 * config.minibatch_seconds
    edge = ""
    if at_edge:
        edge = f"\nAt an edge of the grid: {'; '.join(at_edge)}.\n"
    return (
        f"# {question}\n\n"
        f"{WORKERS} simulated workers, each with its shard of the training set; windows of "
        f"{config.minibatches} mini-batches of {config.minibatch_size} examples; plain SGD; "
        f"{config.seeds} seeds. For each strategy and kind of slow workers, the learning rate is "
        f"the one of {', '.join(f'{rate:g}' for rate in config.learning_rates)} with the least "
        "loss on a held-out fifth of the training set. All runs end with the number of finished "
        f"mini-batches of {config.steps} full windows, or {config.text_steps} for the text.\n\n"
        f"A mini-batch takes {milliseconds:g} ms on a fast worker. Slow workers: `3:1`, half of "
        "them three times slower; `exponential` and `pareto` (with the exponent "
        f"{PARETO_SHAPE:g}), random times for each mini-batch of each worker with the same mean; "
        f"`dead_slow`, one worker {DEAD_SLOWDOWN:g} times slower. A link sends "
        f"{config.bandwidth:,.0f} bytes per second with {1e3 * config.latency:g} ms per message. "
        "Messages are sequential and do not overlap with computation; their bytes are those that "
        "`wire.account` reads from the program. Windows of non-blocking strategies end when the "
        "fastest worker has finished; a mini-batch in flight is restarted, except by "
        "`non_blocking_late`. All times are simulated; none is measured.\n\n"
        f"Command: `{describe_command()}`. Versions and machine are in `environment.txt`, every "
        "setting in `config.json`, every raw metric in `metrics.jsonl`.\n\n"
        f"{verdict(gains)} {fastest(rows)}\n\n"
        + "".join(f"- {gain.sentence}\n" for gain in gains)
        + "\nStrategies; D-PSGD and MATCHA are on the graph of figure 1a of MATCHA's paper, with "
        f"the budget {BUDGET:g}; local SGD averages every {config.period} mini-batches:\n\n"
        f"{legend}\n"
        f"{to_markdown(rows)}{edge}\n"
        "Seconds to the loss are those until the logged training loss of the mean of all workers' "
        f"parameters first reaches {losses}, the lowest loss that all runs that do not diverge "
        "reach. The loss is over the whole training set, or over 200 examples of the text, logged "
        f"every {config.log_every} windows. ± is the standard deviation over seeds. An idle window "
        "is one in which no worker finished a mini-batch. With `dead_slow`, windows that end with "
        "the fastest worker never use the examples of the slow one.\n\n"
        f"![Training loss against simulated seconds]({figure.NAME})\n"
    )
