"""The rows of the bench: every row of the tables of cases in the tests, by name."""

from collections.abc import Mapping, Sequence

from experiments.bench.aggregators import AGGREGATORS, Rows
from experiments.bench.mixing import GOSSIP, LOCAL
from experiments.cli.choices import select

FAMILIES: Mapping[str, Rows] = {**AGGREGATORS, "local": LOCAL, "gossip": GOSSIP}
PER_WORKER = frozenset({*LOCAL, *GOSSIP})
"""Rows with parameters per worker."""

ROWS: Rows = {name: row for rows in FAMILIES.values() for name, row in rows.items()}
TIMED: Rows = {name: row for rows in AGGREGATORS.values() for name, row in rows.items()}
"""Rows that a single worker can run. The others mix parameters of several workers."""
GOALS = "goals"
"""The name that selects all rows with a goal."""

QUICK = (
    "mean",
    "global_qsgd_8_bits",
    "qsgd",
    "two_stage_4_bits",
    "ef_sign_sgd",
    "top_k_sgd",
    "random_k_feedback",
    "s2_reducer",
    "diana",
    "local_sgd",
    "dpsgd",
)
"""Rows that cover each way of exchanging updates and keeping memory."""


def select_families(names: Sequence[str]) -> dict[str, str]:
    """Maps each selected row to its family. A name is a row, a family, `goals` or `all`.

    Raises:
      ExperimentError: If a name is none of these.
    """
    families = {name: family for family, rows in FAMILIES.items() for name in rows}
    selected = select(names, [GOALS, *FAMILIES, *families], "--only")
    return {
        name: family
        for name, family in families.items()
        if name in selected
        or family in selected
        or (GOALS in selected and ROWS[name].goal is not None)
    }
