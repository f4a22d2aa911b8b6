"""Which bounds of the survey's table of convergence predict the measured rates?"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from experiments.cli import options
from experiments.cli.options import option, positive_integer
from experiments.study import readme
from experiments.study.claims import Claim, Results
from experiments.study.columns import SEEDS, Column, Line, Table, key, only_in_csv
from experiments.study.figure import Lines
from experiments.study.forest import Forest, Panel
from experiments.study.groups import Group, first, interval
from experiments.study.judges import is_within
from experiments.study.late import late
from experiments.study.panels import Axis
from experiments.study.rates import (
    KEPT,
    MARGIN,
    PROBLEMS,
    QUANTITIES,
    WORSE,
    comparison,
    derive,
    fails,
    is_as_published,
    is_predicted,
    verdict,
)
from experiments.study.study import Study
from experiments.study.tidy import is_missing


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


FASTER = "fitted - predicted exponent\n← error falls faster      slower →"
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
              "fitted - predicted exponent\n← error grows less      more →",
              _values("constant"), _note),
    ),
    colors={"agreed": "tab:green", "not told apart": "tab:gray", "refuted": "tab:red",
            "diverged": "black"},
    margin=MARGIN, limit=1.0,
)  # fmt: skip
COMPARED = {
    "top-1, three workers": ("top-1", "top-1 with feedback"),
    "D-PSGD, dissimilar workers": ("D-PSGD", "D2"),
    "sign SGD, skewed noise": ("signs", "scaled signs with feedback"),
    "stale gradients": ("5 % above the stable rate", "5 % below"),
}
"""The methods of each counterexample: the one that must fail, and its control."""

COLORS = "tab:red", "tab:green"


def _name_methods(axes: Any, results: Results, keys: Mapping[str, Any]) -> None:
    for place, text in enumerate(COMPARED[keys["example"]]):
        axes.text(0.04, 0.13 - 0.08 * place, text, transform=axes.transAxes, color=COLORS[place],
                  size=9)  # fmt: skip


EXAMPLES = Lines(
    file="counterexamples.png", caption="Four methods that must fail, and their controls",
    by="role", across=("example",), x=(Axis("step", "steps", log=False),),
    y=Axis("distance", "error"), style=lambda number, name: {"color": COLORS[number]},
    finish=_name_methods, banded=lambda name: False,
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
