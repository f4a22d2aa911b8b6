"""The README of a comparison of stragglers."""

import inspect
import math
from collections.abc import Sequence

from experiments import straggler_figure
from experiments.configs import Stragglers
from experiments.straggler_methods import BUDGET, DEAD_SLOWDOWN, PARETO_SHAPE, STRATEGIES, WORKERS
from experiments.straggler_table import CLAIMED_SPEEDUP, Gain, Row, to_markdown


def verdict(gains: Sequence[Gain]) -> str:
    """What became of the claim, in a few sentences."""
    claimed = [gain for gain in gains if gain.waiting in ("dpsgd", "matcha")]
    known = [gain for gain in claimed if not math.isnan(gain.ratio)]
    if not known:
        return "The claim was not put to the test, which takes D-PSGD or MATCHA and its own form."
    best, worst = max(known, key=lambda g: g.ratio), min(known, key=lambda g: g.ratio)
    slower = [gain for gain in known if gain.ratio <= 1]
    two = [gain for gain in known if gain.ratio >= CLAIMED_SPEEDUP]
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
    """Which strategy takes the least time in each setting, in a sentence."""
    settings = dict.fromkeys((row.dataset, row.speeds) for row in rows)
    best = []
    for setting in settings:
        known = [r for r in rows if (r.dataset, r.speeds) == setting and r.reached == r.seeds]
        if known:
            row = min(known, key=lambda row: row.seconds_to_loss)
            best.append(f"{row.strategy} ({', '.join(setting)}: {row.seconds_to_loss:.2f} s)")
    return f"The fastest of all are {'; '.join(best)}."


def write_readme(
    config: Stragglers,
    command: str,
    rows: Sequence[Row],
    gains: Sequence[Gain],
    at_edge: Sequence[str],
) -> str:
    """The text of the README, every number of it from the record."""
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
        f"{WORKERS} simulated workers, each with its own part of the training set; windows of "
        f"{config.minibatches} mini-batches of {config.minibatch_size} examples; plain SGD, its "
        "rate from "
        f"{', '.join(f'{rate:g}' for rate in config.learning_rates)} by the loss on a held-out "
        "fifth of the "
        f"training set, for each strategy and kind of slow workers; {config.seeds} seeds. All runs "
        f"end with as many finished mini-batches as {config.steps} full windows hold, of the text "
        f"{config.text_steps}.\n\n"
        f"A mini-batch takes a fast worker {milliseconds:g} ms. Slow workers: `3:1`, half of them "
        f"three times slower; `exponential` and `pareto` (with the exponent {PARETO_SHAPE:g}), "
        "each "
        "mini-batch of each worker at random with the same mean; `dead_slow`, one worker "
        f"{DEAD_SLOWDOWN:g} times slower. A link sends {config.bandwidth:,.0f} bytes a second with "
        f"{1e3 * config.latency:g} ms a message, one message after the other and while nobody "
        "computes: seconds are those of bytes that `wire.account` reads from the program. Windows "
        "end when the first worker is done, and a mini-batch in flight is begun anew but for "
        "`non_blocking_late`. All of it is simulated, and none of it measured time.\n\n"
        f"Command: `{command}`. Versions and machine are in `environment.txt`, every "
        "setting in `config.json`, every raw metric in `metrics.jsonl`.\n\n"
        f"{verdict(gains)} {fastest(rows)}\n\n"
        + "".join(f"- {gain.sentence}\n" for gain in gains)
        + f"\nStrategies; D-PSGD and MATCHA on the graph of figure 1a of MATCHA's paper, with the "
        f"budget {BUDGET:g}; local SGD meets every {config.period} mini-batches:\n\n{legend}\n"
        f"{to_markdown(rows)}{edge}\n"
        "Seconds to the loss are those until the training loss of the mean of all workers' "
        f"parameters is first logged to be as low as {losses}: the lowest that every run reaches "
        "which does not diverge. It is that of the whole training set, of the text of 200 "
        f"examples, logged every {config.log_every} windows. ± is the standard "
        "deviation over seeds. An idle window is one in which nobody has finished anything. With "
        "one worker as good as dead, windows that end with the first never see its examples.\n\n"
        f"![Training loss against simulated seconds]({straggler_figure.NAME})\n"
    )
