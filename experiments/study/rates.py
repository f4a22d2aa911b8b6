"""The study of convergence: exponents from rows, and judges of them and of counterexamples."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from experiments.study.claims import Finding, Judge, Outcome, Results
from experiments.study.exponents import Comparison, compare
from experiments.study.groups import Group, Value
from experiments.study.tidy import SCHEMA, Row, grouped, is_missing, of_kind
from experiments.training.power_laws import fit_exponent

MARGIN = 0.2
"""By which an exponent may differ from the predicted one."""

PROBLEMS = ("quadratic", "logistic", "constant rate")
EXAMPLE = "counterexample"
QUANTITIES = {"steps": "steps T", "workers": "workers n", "constant": "the constant"}
WORSE = 10.0
"""How many times farther a method that must fail ends than its control."""


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
