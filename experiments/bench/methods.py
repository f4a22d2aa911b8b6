"""The rows of the bench: every method of the catalogue at the size of a model, by name."""

import functools
from collections.abc import Mapping, Sequence

from experiments.bench.programs import by_hand
from experiments.bench.updates import BenchMethod
from experiments.cli.choices import select
from jaxcomm.catalogue import LARGE, METHODS

Rows = Mapping[str, BenchMethod]

WORKERS = 8
GOAL: Mapping[str, float] = {
    "global_qsgd_8_bits": 2.5,
    "global_qsgd_exponential": 6,
    "qsgd": 3,
    "two_stage_8_bits": 4,
    "two_stage_4_bits": 6,
    "signum": 4,
    "ef_sign_sgd": 4,
    "terngrad": 5,
    "natural_compression": 4,
    "top_k_sgd": 15,
    "variance_based": 8,
    "gtop_k": 18,
    "deep_gradient_compression": 20,
}
"""The largest multiple of the baseline that an update should take."""

ROWS: Rows = {
    "by_hand_8_bits": BenchMethod(by_hand),
    **{
        name: BenchMethod(functools.partial(method.build, LARGE), GOAL.get(name))
        for name, method in METHODS.items()
        if method.family != "around"  # They send what goes through them.
    },
}
PER_WORKER = frozenset(
    name for name, method in METHODS.items() if method.kind in ("local", "gossip")
)
"""Rows with parameters per worker."""

TIMED: Rows = {name: row for name, row in ROWS.items() if name not in PER_WORKER}
"""Rows that a single worker can run. The others mix parameters of several workers."""
FAMILY: Mapping[str, str] = {
    name: METHODS[name].family if name in METHODS else "quantized" for name in ROWS
}
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
    families = [*dict.fromkeys(FAMILY.values())]
    selected = select(names, [GOALS, *families, *ROWS], "--only")
    return {
        name: family
        for name, family in FAMILY.items()
        if name in selected
        or family in selected
        or (GOALS in selected and ROWS[name].goal is not None)
    }
