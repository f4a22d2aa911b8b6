"""Which bounds of the survey's table of convergence predict the measured rates?"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from experiments.cli import options
from experiments.cli.options import option, positive_integer
from experiments.study import readme
from experiments.study.claims import Claim, Finding, Judge, Outcome, Results
from experiments.study.columns import SEEDS, Column, Line, Table, key, only_in_csv
from experiments.study.exponents import Comparison, compare
from experiments.study.figure import Lines
from experiments.study.forest import Forest, Panel
from experiments.study.groups import Group, Value, first, interval
from experiments.study.judges import is_within
from experiments.study.late import late
from experiments.study.panels import Axis
from experiments.study.study import Study
from experiments.study.tidy import SCHEMA, Row, grouped, is_missing, of_kind
from experiments.training.power_laws import fit_exponent

MARGIN = 0.2
"""By which an exponent may differ from the predicted one."""

PROBLEMS = ("quadratic", "logistic", "constant rate")
EXAMPLE = "counterexample"
QUANTITIES = {"steps": "steps T", "workers": "workers n", "constant": "the constant"}
WORSE = 10.0
"""How many times farther a method that must fail ends than its control."""


@dataclasses.dataclass(frozen=True)
class Convergence:
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

    seeds: int = options.seeds_option()
    steps: int = option(1024, "steps of a run", positive_integer)
    event_steps: int = option(
        256, "steps of a run that simulates events, each of as many events as workers",
        positive_integer,
    )  # fmt: skip
    workers: tuple[int, ...] = option(
        (4, 16, 64), "numbers of workers, powers of 2", positive_integer, many=True
    )
    problems: tuple[str, ...] = option(PROBLEMS, "problems", choices=PROBLEMS, many=True)
    cells: tuple[str, ...] = option(("all",), "cells of the table, or all", many=True)
    record: str = options.record_option("convergence")
    records: str = options.records_option()
    resume: str | None = options.resume_option()


def _error(run: Mapping[str, Any]) -> float:
    return math.inf if is_missing(run["error"]) else run["error"]


def _slope(runs: Iterable[Row], name: str) -> float:
    """The exponent of the error in a column, over runs of one seed that differ in it."""
    by_value = {run[name]: _error(run) for run in runs}
    return fit_exponent([*by_value], [*by_value.values()]) if len(by_value) > 1 else math.nan


def _exponents(runs: Sequence[Row], problem: str) -> dict[str, float]:
    """The exponents of one seed of a cell."""
    most = max(run["workers"] for run in runs)
    usual = [run for run in runs if run["strength"] == 0]
    largest = [run for run in usual if run["workers"] == most]
    (longest, *_) = sorted(largest, key=lambda run: -run["steps"])
    common = {
        n: {r["steps"] for r in usual if r["workers"] == n} for n in {r["workers"] for r in usual}
    }
    shared = max(set.intersection(*common.values()), default=0)
    if problem == PROBLEMS[2]:
        by_steps, predicted = _slope(largest, "steps"), -0.5
    else:
        by_steps, predicted = longest["exponent"], -1.0
        by_steps = math.inf if is_missing(by_steps) else by_steps
    of_constant = [r for r in runs if r["workers"] == most and r["steps"] == longest["steps"]]
    by_constant = _slope(of_constant, "constant")
    return {
        "steps_exponent": by_steps,
        "steps_predicted": predicted,
        "workers_exponent": _slope([r for r in usual if r["steps"] == shared], "workers"),
        "workers_predicted": predicted,
        "constant_exponent": by_constant,
        "constant_predicted": math.nan
        if math.isnan(by_constant)
        else longest["predicted_constant"],
    }


KEPT = ("architecture", "synchronization", "compression", "symbol", "error")


def derive(rows: Sequence[Row]) -> list[Row]:
    """One run per problem, cell and seed, with the exponents; examples under a key of their own."""
    cells = [row for row in rows if row.get("problem") != EXAMPLE]
    found: list[Row] = [row for row in cells if row["kind"] != "run"]
    for keys, runs in grouped(of_kind(cells, "run"), ("problem", "cell", "seed")).items():
        if not any(run["strength"] == 0 for run in runs):
            continue
        problem, cell, seed = keys
        last = max(
            (r for r in runs if r["strength"] == 0), key=lambda r: (r["workers"], r["steps"])
        )
        exact = last.get("exact_error")
        found.append(
            {"schema": SCHEMA, "kind": "run", "problem": problem, "cell": cell, "seed": seed,
             **{name: last[name] for name in KEPT},
             "over_exact": math.nan if is_missing(exact) else last["error"] / exact,
             **_exponents(runs, problem)}
        )  # fmt: skip
    for row in rows:
        if row.get("problem") == EXAMPLE:
            rest = {name: each for name, each in row.items() if name not in ("problem", "cell")}
            kind = "point" if row["kind"] == "point" else "fact"  # Not a line of the table.
            found.append({**rest, "kind": kind, "example": row["cell"]})
    return found


def comparison(quantity: str) -> Callable[[Group], Comparison]:
    """The exponent in a quantity, compared with the predicted one."""
    return lambda group: compare(
        group.values(f"{quantity}_exponent"), group.runs[0][f"{quantity}_predicted"], MARGIN
    )


def verdict(quantity: str) -> Value:
    """The verdict about a quantity."""
    return lambda group: comparison(quantity)(group).verdict


def over_exact(group: Group) -> Any:
    """The error over its exact expectation; None where the latter is not computed."""
    found = interval("over_exact")(group)
    return None if math.isnan(found.mean) else found


def _columns(quantity: str, heading: str) -> tuple[Column, ...]:
    name = f"{quantity}_exponent"
    return (
        Column(f"{heading} [95 %]", interval(name), ".2f", name),
        Column("bound", first(f"{quantity}_predicted"), "g", f"{quantity}_predicted"),
        Column("verdict", verdict(quantity), name=f"{quantity}_verdict"),
    )


TABLE = Table(
    by=("problem", "cell"),
    columns=(
        key("problem"),
        key("cell"),
        *(only_in_csv(name, first(name)) for name in KEPT[:3]),
        SEEDS,
        Column("error", interval("error"), lambda error: f"{error.mean:.2e}", "error"),
        Column("of exact", over_exact, ".2f", "over_exact", hidden=True),
        *_columns("steps", "T"),
        *_columns("workers", "n"),
        Column("constant", first("symbol"), name="symbol"),
        *_columns("constant", "its exponent"),
    ),
    adjacent=("problem",),
)

OUTCOMES: Mapping[str, Outcome] = {
    "agreed": "holds", "refuted": "does not hold", "diverged": "does not hold",
    "not told apart": "not told apart",
}  # fmt: skip


def is_predicted(quantity: str, problem: str) -> Judge:
    """The claim that the exponents in a quantity are those of the bounds."""

    def findings(results: Results) -> list[Finding]:
        found = []
        for line in results.lines:
            each = comparison(quantity)(line.group)
            if line.group.keys["problem"] != problem or each.verdict == "-":
                continue
            numbers = (
                f"exponent {each.exponent:.2f} (95 % interval {each.low:.2f} to {each.high:.2f})"
            )
            numbers += f", bound {each.predicted:g}"
            found.append(Finding(line.group.keys["cell"], OUTCOMES[each.verdict], numbers))
        return found

    return findings


def examples_of(results: Results) -> dict[str, list[Row]]:
    """The ends of the runs of each example."""
    runs = grouped(of_kind(results.rows, "fact"), ("example",))
    return {name: of_example for (name,), of_example in runs.items()}


def fails(results: Results) -> list[Finding]:
    """One finding per example: whether the method that must fail ends farther than its control."""
    found = []
    for name, runs in examples_of(results).items():
        ratios = [run["end_failing"] / run["end_control"] for run in runs]
        outcome: Outcome = "holds" if min(ratios) >= WORSE else "does not hold"
        ends = f"errors {runs[0]['end_failing']:.2e} and {runs[0]['end_control']:.2e}"
        found.append(Finding(name, outcome, f"{ends} with seed 0, least ratio {min(ratios):.3g}"))
    return found


def is_as_published(results: Results) -> list[Finding]:
    """One finding per example: whether the number that theory gives was measured."""
    found = []
    for name, runs in examples_of(results).items():
        mean = sum(run["measured"] for run in runs) / len(runs)
        expected = runs[0]["expected"]
        # A growth of 1.02 per step is one of 0.02.
        least = 1.0 if runs[0]["what"] == "growth per step" else 0.0
        ratio = (mean - least) / (expected - least)
        outcome: Outcome = "holds" if 0.8 <= ratio <= 1.25 else "does not hold"
        found.append(
            Finding(name, outcome, f"{runs[0]['what']} {mean:.5g}, in theory {expected:.5g}")
        )
    return found


CLAIMS = (
    Claim(
        "Synchronous SGD on quadratics has the error of its exact recursion, within 15 %.",
        is_within("over_exact", 1 / 1.15, 1.15, methods={"problem": "quadratic"}),
    ),
    *(
        Claim(
            f"{title}: the exponent in {QUANTITIES[quantity]} is the bound's, within {MARGIN}.",
            is_predicted(quantity, problem),
        )
        for problem, title in zip(
            PROBLEMS,
            ("Quadratics, decreasing rate", "Logistic regression, decreasing rate",
             "Quadratics, a constant rate of the order of √(n/T), squared gradients"),
            strict=True,
        )
        for quantity in QUANTITIES
        if quantity != "constant" or problem == "quadratic"
    ),
    Claim(
        f"Every method that must fail ends with at least {WORSE:g} times the error of its control.",
        fails,
    ),
    Claim(
        "Every counterexample has the growth, distance or drift of its theory, within 25 %.",
        is_as_published,
    ),
)  # fmt: skip


def _values(quantity: str) -> Callable[[Line], tuple[float, float, float, str] | None]:
    def values(line: Line) -> tuple[float, float, float, str] | None:
        found = comparison(quantity)(line.group)
        if found.verdict == "-":
            return None
        off = found.predicted
        return found.exponent - off, found.low - off, found.high - off, found.verdict

    return values


GREEK = {"omega": "ω", "delta": "δ", "tau": "τ"}


def _note(line: Line) -> str:
    symbol, predicted = line["symbol"], line["constant_predicted"]
    if not symbol or is_missing(predicted):
        return ""
    for name, letter in GREEK.items():
        symbol = symbol.replace(name, letter)
    return f"error ∝ {symbol}" if predicted else f"no effect of {symbol}"


FASTER = "← error falls faster      fitted - predicted exponent      slower →"
FIGURE = Forest(
    file="exponents.png",
    caption="Fitted minus predicted exponents, with 95 % intervals over seeds",
    by="cell", within="problem",
    group=lambda line: f"{line['architecture']}, {line['synchronization']}",
    panels=(
        Panel("Does the error fall with the steps T?\n(1/T, or 1/√T at a constant rate)",
              FASTER, _values("steps")),
        Panel("... with the workers n?\n(1/n, or 1/√n at a constant rate)", FASTER,
              _values("workers")),
        Panel("... and grow with the constant of the row?\n(predicted at the right)",
              "← less than predicted      fitted - predicted exponent      more →",
              _values("constant"), _note),
    ),
    colors={"agreed": "tab:green", "not told apart": "tab:gray", "refuted": "tab:red",
            "diverged": "black"},
    margin=MARGIN, limit=1.0,
)  # fmt: skip
EXAMPLES = Lines(
    file="counterexamples.png", caption="Four methods that must fail, and their controls",
    by="role", across=("example",), x=(Axis("step", "steps"),), y=Axis("distance", "error"),
    style=lambda number, name: {"color": ("tab:red", "tab:green")[number]},
)  # fmt: skip


def explain(results: Results) -> list[str]:
    """Every cell that does not agree, with a reason if one is known."""
    from experiments.methods.convergence import reason

    found = []
    for line in results.lines:
        for quantity, name in QUANTITIES.items():
            each = comparison(quantity)(line.group)
            if each.verdict not in ("refuted", "diverged"):
                continue
            keys = line.group.keys
            why = reason(keys["problem"], keys["cell"], quantity, each.exponent > each.predicted)
            found.append(
                f"- {keys['problem']}, {keys['cell']}, {name}: {each.exponent:.2f} "
                f"[{each.low:.2f}, {each.high:.2f}] and not {each.predicted:g}. {why}"
            )
    return found


def prose(results: Results) -> list[str]:
    from experiments.methods.convergence import CELLS

    config = results.config
    names = dict.fromkeys(line.group.keys["cell"] for line in results.lines)
    sources = "\n".join(f"- {name}: {CELLS[name].bound}; {CELLS[name].source}" for name in names)
    disagreements = explain(results)
    return [
        f"Up to {max(config.workers)} simulated workers, whose losses differ, minimize the mean of "
        "their losses in 64 coordinates. Quadratics have curvatures from 1 to 4. The variance of a "
        "gradient is 1, plus a quarter of the squared norm of the worker's gradient. The logistic "
        "regression says whether one of scikit-learn's digits is below 5. It has the "
        f"regularization 0.1, and one example per gradient. There are {config.seeds} seeds, each "
        f"the mean of four runs, and {config.steps} steps. Methods on the event engine have "
        f"{config.event_steps}, of as many events as workers.",
        readme.PROVENANCE, readme.TUNING, MEASURE, readme.CLAIMS,
        *(["Refuted, and why:\n\n" + "\n".join(disagreements)] if disagreements
          else ["No cell is refuted."]),
        readme.TABLE,
        f"Leading terms of the bounds, for strongly convex losses:\n\n{sources}",
        readme.FIGURES,
    ]  # fmt: skip


MEASURE = (
    "With a decreasing rate 2 / (μ (t + γ)), as bounds assume, the error is ‖x̄ - x*‖², of the "
    "workers' mean. Bounds predict 1/(n T). γ is 2 L/μ times a stretch for codec and delay. "
    "The exponent in T is fitted to the error against t + γ, over the last 15/16 of the steps; the "
    "other exponents to the mean error of the last half. With a constant rate of the order of "
    "√(n/T), the error is the mean over the run of the squared gradient. Bounds for losses without "
    "convexity predict 1/√(n T), and quadratics attain it. The exponent in the constant is fitted "
    "over three codecs, delays, periods or graphs. Codecs have the constants that they claim.\n\n"
    "Fits are per seed, and intervals are Student's, over seeds. A bound is from above. If the "
    "error falls faster, the theorem is not contradicted. But the bound does not predict the rate, "
    "and the cell counts as refuted."
)

STUDY = Study(
    "convergence", Convergence, late("convergence.settings"), late("convergence.train"), TABLE,
    prose, (FIGURE, EXAMPLES), CLAIMS, shares=("cell", "workers", "strength"), derive=derive,
    headline=("steps_exponent", "workers_exponent", "constant_exponent"),
)  # fmt: skip
