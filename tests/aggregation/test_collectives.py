"""How many collectives a step takes does not depend on the scope, nor on the number of leaves."""

from typing import Any

import jax.numpy as jnp
import pytest

import jaxcomm
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.quantizers import dither, signs
from jaxcomm.compression.sparsifiers import top_k
from tests.aggregation.runs import WORKERS, compiled
from tests.slow import slow

METHODS: dict[str, Any] = {
    "summed": (lambda scope: jaxcomm.global_qsgd(bits=8, scope=scope), 2),
    "merged": (lambda scope: jaxcomm.global_qsgd(dithering="exponential", scope=scope), 3),
    "gathered": (lambda scope: jaxcomm.qsgd(scope=scope), 1),
    "gathered sparse": (
        lambda scope: jaxcomm.all_gather_mean(error_feedback(top_k(ratio=0.1)), scope=scope),
        1,
    ),
    "two-stage": (lambda scope: jaxcomm.two_stage_mean(dither(bits=8), scope=scope), 3),
    # A bitmap is agreed in two collectives, the flag beside it in one.
    "bitmap": (
        lambda scope: jaxcomm.s2_reducer(density=0.5, sketch_ratio=2.0, granularity=2, scope=scope),
        4,
    ),
}


def collectives(tx: Any, leaves: int) -> int:
    """Of the compiled program of one update, of leaves of which half are vectors."""
    shapes = [(3 + leaf // 2, 5) if leaf % 2 else (3 + leaf // 2,) for leaf in range(leaves)]
    updates = {f"leaf {leaf}": jnp.ones((WORKERS, *shape)) for leaf, shape in enumerate(shapes)}
    return len({c.group for c in compiled(tx, updates).collectives})


ROWS = [(method, scope) for method in METHODS for scope in ("leaf", "bucket")]


@pytest.mark.parametrize(
    ("method", "scope", "leaves"),
    [("summed", "leaf", 5), *(slow(*row, 8) for row in ROWS)],
)
def test_one_collective_per_exchange(method: str, scope: str, leaves: int) -> None:
    build, number = METHODS[method]
    assert collectives(build(scope), leaves) == number


@pytest.mark.slow
def test_votes() -> None:
    assert collectives(jaxcomm.majority_vote(codec=signs()), 5) == 3


@pytest.mark.slow
def test_sums_of_more_arrays_than_are_combined() -> None:
    assert collectives(jaxcomm.global_qsgd(bits=8, scope="leaf"), 300) == 2
