"""Updates keep their structure, shapes and dtypes, and come out equal on all workers."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.cases import CASES, FRAME, Case, rows
from tests.workers import MODE_ROWS, Mode, aggregator, gradients, initial


def check_shapes_and_replicas(case: Case, mode: Mode, workers: int) -> None:
    plain = gradients(workers)
    updates = {
        "float32": plain["kernel"],
        "bfloat16": plain["bias"].astype(jnp.bfloat16),
        "float16": (plain["scale"].astype(jnp.float16), plain["kernel"].astype(jnp.float16)),
        "none": None,
    }
    tx = case.make()
    results, _ = aggregator(tx, workers, mode)(
        updates, initial(tx, updates, mode), jnp.ones(workers)
    )
    chex.assert_trees_all_equal_shapes_and_dtypes(results, updates)
    for leaf in jax.tree.leaves(results):
        replicas = np.asarray(leaf.astype(jnp.float32))
        np.testing.assert_array_equal(replicas, np.broadcast_to(replicas[:1], replicas.shape))


@pytest.mark.quick(1)
@pytest.mark.parametrize("mode", MODE_ROWS)
@pytest.mark.parametrize("case", rows(CASES, FRAME | {"two_stage_8_bits"}), ids=repr)
def test_shapes_and_replicas(case: Case, mode: Mode) -> None:
    check_shapes_and_replicas(case, mode, workers=3)
