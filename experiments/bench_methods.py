"""What the bench measures: every row of the tables of cases, by its name."""

from collections.abc import Mapping, Sequence

from experiments.bench_aggregators import AGGREGATORS, Rows
from experiments.bench_mixing import GOSSIP, LOCAL
from experiments.errors import ExperimentError

FAMILIES: Mapping[str, Rows] = {**AGGREGATORS, "local": LOCAL, "gossip": GOSSIP}
PER_WORKER = frozenset({*LOCAL, *GOSSIP})
"""Of which parameters differ by worker."""

ROWS: Rows = {name: row for rows in FAMILIES.values() for name, row in rows.items()}
TIMED: Rows = {name: row for rows in AGGREGATORS.values() for name, row in rows.items()}
"""One worker has an update of these; of the others, which mix parameters, it has nobody to meet."""
QUICK = (
    "mean",
    "global_qsgd_8_bits",
    "qsgd",
    "two_stage_4_bits",
    "ef_sign_sgd",
    "top_k",
    "random_k_feedback",
    "s2_reducer",
    "diana",
    "local_sgd",
    "dpsgd",
)
"""Some of each way in which updates are exchanged and memory is kept."""


def select_families(names: Sequence[str]) -> dict[str, str]:
    """The family of each row that is named, or is of a family that is; `all` is all of them.

    Raises:
      ExperimentError: If there is neither such a row nor such a family.
    """
    families = {name: family for family, rows in FAMILIES.items() for name in rows}
    if unknown := set(names) - {"all", *families, *FAMILIES}:
        raise ExperimentError(
            f"the bench has no row or family {', '.join(sorted(unknown))}; there are "
            f"{', '.join([*FAMILIES, *families])}."
        )
    return {name: family for name, family in families.items() if {"all", name, family} & set(names)}
