"""Which bounds of the survey's table of convergence predict the measured rates?"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.errors import ExperimentError, select
from experiments.studies import _counterexamples as counterexamples
from experiments.studies._convergence_cells import CELLS, STRATEGIES, Cell
from experiments.studies._convergence_runs import (
    CHUNK,
    PROBLEMS,
    compiled,
    eventwise,
    make_schedule,
    stepwise,
)
from experiments.studies._counterexamples import EXAMPLES
from experiments.study import run as readme
from experiments.study.claims import Claim, Finding, Judge, Results, is_within
from experiments.study.plot import Axis, Lines, save
from experiments.study.record import Row, grouped, is_missing, of_kind
from experiments.study.run import Options, Study
from experiments.study.table import (
    SEEDS,
    Column,
    Estimate,
    Group,
    Table,
    first,
    interval,
    key,
)
from experiments.tasks import objectives

EXAMPLE = "counterexample"


@dataclasses.dataclass(frozen=True)
class Convergence(Options):
    """Which bounds of the survey's table of convergence predict the measured rates?

    Question: the survey of Tang et al. (2020, arXiv 2003.06307) has a table of bounds by
    architecture, synchronization and compression. Quadratics with known constants and a regularized
    logistic regression on scikit-learn's digits are minimized by up to 64 simulated workers that
    differ. How does the error depend on the number of steps, on the number of workers, and on the
    constant of the codec, the delay, the local steps or the graph? Is this what the bound predicts?
    Do four published counterexamples fail as published?

    Command: `python -m experiments convergence`. Expected time: 15 minutes on two CPU cores.

    Number: the fitted exponents, their 95 % intervals over seeds, and the predicted exponents. A
    cell agrees if the interval is within 0.2 of the prediction, and is refuted if it is outside.
    """

    seeds: int = 5
    """number of seeds"""
    steps: int = 1024
    """steps of a run"""
    workers: tuple[int, ...] = (4, 16, 64)
    """numbers of workers, powers of 2"""
    cells: tuple[str, ...] = ("all",)
    """cells of the table, or all"""


EVENT_STEPS = 256
"""Steps of a run that simulates events, each of as many events as workers. Of the least length."""
HORIZONS = (16, 4, 1)
"""Divisors of the steps of runs with a constant rate and the most workers."""
COMMON = 4
"""The same with fewer workers."""
KEYS = ("problem", "cell", "workers", "strength", "steps")


def settings(config: Convergence) -> list[dict[str, Any]]:
    """All settings; those that share a program follow each other.

    The exponents in the steps and in the constant are fitted with the most workers.
    """
    if any(workers < 4 or workers & (workers - 1) for workers in config.workers):
        raise ExperimentError("--workers must be powers of 2, of at least 4: a hypercube has them.")
    if config.steps % EVENT_STEPS:
        raise ExperimentError(f"--steps {config.steps} is not divisible by {EVENT_STEPS}.")
    counts = sorted({*config.workers}, reverse=True)
    found = [(EXAMPLE, name, each.workers, 0, each.steps) for name, each in EXAMPLES.items()]
    for name in select(config.cells, [*CELLS], "--cells"):
        strengths = range(1, len(CELLS[name].choices(counts[0])))
        programs = [(workers, 0) for workers in counts] + [(counts[0], each) for each in strengths]
        for workers, strength in programs:
            for problem in PROBLEMS if strength == 0 else ["quadratic"]:
                parts = [1]
                if PROBLEMS[problem].has_constant_rate:
                    parts = HORIZONS if workers == counts[0] else [COMMON]
                steps = steps_of(CELLS[name], config)
                found += [(problem, name, workers, strength, steps // part) for part in parts]
    return [dict(zip(KEYS, values, strict=True)) for values in found]


def steps_of(cell: Cell, config: Convergence) -> int:
    """The steps of the longest runs of a cell."""
    return EVENT_STEPS if STRATEGIES[cell.strategy].is_simulated else config.steps


# How one run trains, and what is fitted to it.


BINS, TAIL = 10, 16  # The fit is over the last 15/16 of the steps, in so many intervals.


def fit_exponent(x: Sequence[float], y: Sequence[float]) -> float:
    r"""The exponent :math:`a` of :math:`y \approx c\, x^a`, by least squares of logarithms.

    It is NaN for fewer than two different `x`, and infinite if a run diverged.
    """
    if len({*x}) < 2:
        return math.nan
    if not np.isfinite(y).all():
        return math.inf
    across = np.log(x) - np.log(x).mean()
    return float(across @ np.log(y) / (across @ across))


def binned(x: np.ndarray, y: np.ndarray, bins: int) -> Iterator[list[float]]:
    """The means of `x` and `y` in intervals that are equally long on a logarithmic axis.

    A fit of points at equal distances would mostly be one of the end of the run. Empty intervals
    are skipped.
    """
    cuts = np.searchsorted(x, np.geomspace(x[0], x[-1], bins + 1)[1:-1])
    return ([part.mean() for part in np.split(each, cuts) if len(part)] for each in (x, y))


EXACT = {
    "problem": "quadratic",
    "cell": "exact mean",
}  # Of which the expected error follows from a recursion.


def train(config: Convergence, setting: Mapping[str, Any]) -> Callable[..., Iterator[Any]]:
    """What runs a program for all problems and horizons."""
    if setting["problem"] == EXAMPLE:
        return counterexamples.train
    cell, workers, strength = CELLS[setting["cell"]], setting["workers"], setting["strength"]
    strategy, choice = STRATEGIES[cell.strategy], cell.choices(workers)[strength]
    make = eventwise if strategy.is_simulated else stepwise
    run_program = compiled(*make(strategy, choice, workers))
    most, shortest = max(config.workers), steps_of(cell, config) // max(HORIZONS)

    def run(setting, seed, parameters, *, validation):
        """Yields the points of one seed, and at last what is fitted to them."""
        problem, steps = PROBLEMS[setting["problem"]], setting["steps"]
        objective = problem.objective(workers)
        schedule = make_schedule(
            problem, objective, choice.stretch, workers / most * shortest / steps
        )
        errors, gradients = run_program(objective, schedule, seed, steps)
        values = {
            "symbol": cell.symbol,
            "constant": choice.constant,
            "predicted_constant": cell.exponent,
            "error": gradients.mean(),
        }
        if not problem.has_constant_rate:
            offset = float(schedule.offset)
            times, left_out = offset + CHUNK * (np.arange(len(errors)) + 0.5), len(errors) // TAIL
            across, up = binned(times[left_out:], errors[left_out:], BINS)
            if (strength, workers) == (0, most):
                for x, y in zip(across, up, strict=True):
                    yield {"step": x - offset, "error": y}
            values |= {
                "error": errors[len(errors) // 2 :].mean(),
                "exponent": fit_exponent(across, up),
            }
            if setting.items() >= EXACT.items():
                rates = np.float64(schedule.scale) / (schedule.offset + np.arange(steps))
                exact = objectives.exact_distances(objective, rates, np.float64(schedule.start))
                values["exact_error"] = exact[steps // 2 :].mean()
        yield values

    return run


# Exponents from the rows, and their comparison with those of bounds.


def _slope(runs: Iterable[Row], name: str) -> float:
    """The exponent of the error in a column, over runs of one seed that differ in it."""
    by_value = {run[name]: run["error"] for run in runs}
    return fit_exponent([*by_value], [*by_value.values()])


def exponents(runs: Sequence[Row]) -> Row:
    """One run of a line of the table, from those of a problem, a cell and a seed."""
    usual = [run for run in runs if run["strength"] == 0]
    last = max(usual, key=lambda run: (run["workers"], run["steps"]))
    shared = min(usual, key=lambda run: run["workers"])["steps"]
    of_most = [run for run in usual if run["workers"] == last["workers"]]
    same = [run for run in runs if all(run[name] == last[name] for name in ("workers", "steps"))]
    if PROBLEMS[last["problem"]].has_constant_rate:
        by_steps = _slope(of_most, "steps")
    else:
        by_steps = math.inf if is_missing(last["exponent"]) else last["exponent"]
    return {
        **last,
        "over_exact": last["error"] / last.get("exact_error", math.nan),
        "steps_exponent": by_steps,
        "workers_exponent": _slope((run for run in usual if run["steps"] == shared), "workers"),
        "constant_exponent": _slope(same, "constant"),
    }


def derive(rows: Sequence[Row]) -> list[Row]:
    """A run per problem, cell and seed; and the examples, which are no lines of the table."""
    cells = [row for row in of_kind(rows, "run") if row["problem"] != EXAMPLE]
    examples = [
        {**row, "kind": "fact"} if row["kind"] == "run" else row
        for row in rows
        if row["problem"] == EXAMPLE
    ]
    groups = grouped(cells, ("problem", "cell", "seed")).values()
    return [*map(exponents, groups), *examples]


MARGIN = 0.2
"""By which an exponent may differ from the predicted one."""

QUANTITIES = {"steps": "steps T", "workers": "workers n", "constant": "the constant"}


def compare(group: Group, quantity: str) -> tuple[Estimate, float, str]:
    """The exponent in a quantity over seeds, the one of the bound, and the verdict."""
    found = interval(f"{quantity}_exponent")(group)
    predicted = PROBLEMS[group.keys["problem"]].exponent
    if quantity == "constant":
        predicted = group.runs[0]["predicted_constant"]
    low, high = found.low - predicted, found.high - predicted
    verdict = "inconclusive"
    if math.isnan(found.mean):
        predicted, verdict = math.nan, "-"
    elif math.isinf(found.mean):
        verdict = "diverged"
    elif low >= -MARGIN and high <= MARGIN:
        verdict = "agreed"
    elif high < -MARGIN or low > MARGIN:
        verdict = "refuted"
    return found, predicted, verdict


# What is claimed.

OUTCOMES = {"agreed": "holds", "refuted": "does not hold", "diverged": "does not hold"}
WORSE = 10.0
"""How many times farther a method that must fail ends than its control."""


def is_predicted(quantity: str, problem: str) -> Judge:
    """The claim that the exponents in a quantity are those of the bounds."""

    def findings(results):
        found = []
        for line in results.lines:
            exponent, predicted, verdict = compare(line.group, quantity)
            if line.group.keys["problem"] == problem and verdict != "-":
                numbers = (
                    f"exponent {exponent.mean:.2f} (95 % interval {exponent.low:.2f} to "
                    f"{exponent.high:.2f}), bound {predicted:g}"
                )
                found.append(
                    Finding(line.group.keys["cell"], OUTCOMES.get(verdict, verdict), numbers)
                )
        return found

    return findings


def of_examples(test: Callable[[list[Row]], tuple[bool, str]]) -> Judge:
    """The claim that a test holds of the runs of every counterexample."""

    def findings(results):
        found = []
        for (name,), runs in grouped(of_kind(results.rows, "fact"), ["cell"]).items():
            holds, numbers = test(runs)
            found.append(Finding(name, "holds" if holds else "does not hold", numbers))
        return found

    return findings


def fails(runs: list[Row]) -> tuple[bool, str]:
    """Whether the method that must fail ends farther than its control."""
    least = min(run["end_failing"] / run["end_control"] for run in runs)
    ends = f"errors {runs[0]['end_failing']:.2e} and {runs[0]['end_control']:.2e}"
    return least >= WORSE, f"{ends} with seed 0, least ratio {least:.3g}"


def is_as_published(runs: list[Row]) -> tuple[bool, str]:
    """Whether the number that theory gives was measured."""
    what, expected = runs[0]["what"], runs[0]["expected"]
    measured = sum(run["measured"] for run in runs) / len(runs)
    least = float("growth" in what)  # A growth of 1.02 per step is one of 0.02.
    holds = 0.8 <= (measured - least) / (expected - least) <= 1.25
    return holds, f"{what} {measured:.5g}, in theory {expected:.5g}"


CLAIMS = (
    Claim(
        "Synchronous SGD on quadratics has the error of its exact recursion, within 15 %.",
        is_within("over_exact", 1 / 1.15, 1.15, methods=EXACT),
    ),
    *(
        Claim(
            f"{problem.title}: the exponent in {words} is the bound's, within {MARGIN}.",
            is_predicted(quantity, name),
        )
        for name, problem in PROBLEMS.items()
        for quantity, words in QUANTITIES.items()
        if quantity != "constant" or name == "quadratic"
    ),
    Claim(
        f"Every method that must fail ends with at least {WORSE:g} times the error of its control.",
        of_examples(fails),
    ),
    Claim(
        "Every counterexample has the growth, distance or drift of its theory, within 25 %.",
        of_examples(is_as_published),
    ),
)


# What the record shows.


def _columns(quantity: str, heading: str) -> tuple[Column, ...]:
    name = f"{quantity}_exponent"
    return (
        Column(f"{heading} [95 %]", interval(name), ".2f", name),
        Column("bound", lambda group: compare(group, quantity)[1], "g", f"{quantity}_predicted"),
        Column("verdict", lambda group: compare(group, quantity)[-1],
               name=f"{quantity}_verdict"),
    )  # fmt: skip


TABLE = Table(
    by=("problem", "cell"),
    columns=(
        *map(key, ("problem", "cell")),
        SEEDS,
        Column("error", interval("error"), lambda error: f"{error.mean:.2e}", "error"),
        Column("of exact", interval("over_exact"), ".2f", "over_exact", hidden=True),
        *_columns("steps", "T"),
        *_columns("workers", "n"),
        Column("constant", first("symbol"), name="symbol"),
        *_columns("constant", "its exponent"),
    ),
    adjacent=("problem",),
)

MARKERS = dict(zip(PROBLEMS, "osD", strict=True))
VERDICTS = {"agreed": "tab:green", "inconclusive": "tab:gray", "refuted": "tab:red"}
PANELS = {
    "steps": "Does the error fall with the steps T?\n(1/T, or 1/√T at a constant rate)",
    "workers": "... with the workers n?\n(1/n, or 1/√n at a constant rate)",
    "constant": "... and grow with the constant?\n(in proportion, or not at all)",
}


class Exponents:
    """A figure with a row per cell, and a column of panels per quantity."""

    file = "exponents.png"
    caption = "Fitted minus predicted exponents, with 95 % intervals over seeds"

    def draw(self, folder: Path, results: Results) -> Path:
        """Draws the lines of the table; returns the path of the figure."""
        cells = {line.group.keys["cell"]: line["symbol"] for line in results.lines}
        figure = Figure(figsize=(12, 2 + 0.4 * len(cells)), layout="constrained")
        panels = figure.subplots(1, len(PANELS), sharey=True)
        for axes, (quantity, title) in zip(panels, PANELS.items(), strict=True):
            axes.axvspan(-MARGIN, MARGIN, color="black", alpha=0.07)
            axes.axvline(0, color="black", linewidth=1)
            for line in results.lines:
                found, predicted, verdict = compare(line.group, quantity)
                problem, cell = line.group.keys.values()
                if verdict in VERDICTS:
                    axes.errorbar(
                        found.mean - predicted,
                        [*cells].index(cell) + 0.25 * [*PROBLEMS].index(problem),
                        xerr=[[found.mean - found.low], [found.high - found.mean]],
                        marker=MARKERS[problem],
                        color=VERDICTS[verdict],
                    )
            axes.set(
                title=title,
                xlabel="fitted - predicted exponent",
                xlim=(-1, 1),
            )
            axes.grid(axis="x", alpha=0.3)
        labels = [f"{cell}  [{symbol}]" if symbol else cell for cell, symbol in cells.items()]
        axes.set_yticks(np.arange(len(cells)) + 0.25, labels)
        axes.set_ylim(len(cells), -0.5)
        for problem, marker in MARKERS.items():
            axes.plot([], [], marker, color="black", label=problem)
        for verdict, color in VERDICTS.items():
            axes.plot([], [], linewidth=3, color=color, label=verdict)
        figure.legend(loc="outside lower center", ncols=6, frameon=False)
        return save(figure, folder / self.file)


COLORS = "tab:red", "tab:green"
COUNTEREXAMPLES = Lines(
    file="counterexamples.png", caption="Four methods that must fail, and their controls",
    by="role", across=("cell",), x=(Axis("step", "steps", log=False),),
    y=Axis("distance", "error"), style=lambda number, name: {"color": COLORS[number]},
    banded=lambda name: False,
)  # fmt: skip


def prose(results: Results) -> list[str]:
    """The paragraphs of the README."""
    config, names = results.config, dict.fromkeys(line.group.keys["cell"] for line in results.lines)
    sources = "\n".join(
        f"- {name}: {'(1 + ω) ' if CELLS[name].exponent else ''}σ²/(μ n T); {CELLS[name].source}"
        for name in names
    )
    return [
        f"Up to {max(config.workers)} simulated workers, whose losses differ, minimize the mean of "
        "their losses in 64 coordinates. Quadratics have curvatures from 1 to 4. The variance of a "
        "gradient is 1, plus a quarter of the squared norm of the worker's gradient. The logistic "
        "regression says whether one of scikit-learn's digits is below 5. It has the "
        f"regularization 0.1, and one example per gradient. There are {config.seeds} seeds, each "
        f"the mean of four runs, and {config.steps} steps. Methods on the event engine have "
        f"{EVENT_STEPS}, of as many events as workers.",
        readme.PROVENANCE, readme.TUNING,
        "With a decreasing rate 2 / (μ (t + γ)), as bounds assume, the error is ‖x̄ - x*‖², of the "
        "workers' mean. Bounds predict 1/(n T). γ is 2 L/μ times a stretch for codec and delay. "
        "The exponent in T is fitted to the error against t + γ, over the last 15/16 of the steps; "
        "the other exponents to the mean error of the last half. With a constant rate of the order "
        "of √(n/T), the error is the mean over the run of the squared gradient. Bounds for losses "
        "without convexity predict 1/√(n T), and quadratics attain it. The exponent in the "
        "constant is fitted over three codecs, delays, periods or graphs. Codecs have the "
        "constants that they claim.",
        "Fits are per seed, and intervals are Student's, over seeds. A bound is from above. If the "
        "error falls faster, the theorem is not contradicted. But the bound does not predict the "
        "rate, and the cell counts as refuted. Reasons are in `docs/convergence.md`.",
        "The controls of the counterexamples are top-1 with feedback, D2, scaled signs with "
        "feedback, and a rate 5 % below the stable one.",
        readme.CLAIMS, readme.TABLE,
        f"Leading terms of the bounds, for strongly convex losses:\n\n{sources}",
        readme.FIGURES,
    ]  # fmt: skip


CONVERGENCE = Study(
    "convergence", Convergence, settings, train, TABLE, prose, (Exponents(), COUNTEREXAMPLES),
    CLAIMS, shares=("cell", "workers", "strength"), derive=derive,
)  # fmt: skip
