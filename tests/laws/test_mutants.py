"""Six mistakes are caught in the quick run, in every row of the table that can make them."""

import jax
import pytest

from tests.cases import CASES, Case
from tests.laws.test_every_worker import check_every_worker
from tests.mutants import FORGETFUL, MUTANTS, is_memory
from tests.workers import gradients, initial


def remembers(case: Case) -> bool:
    state = initial(case.make(), gradients(8), "vmap")
    return any(is_memory(leaf) for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_caught(case: Case) -> None:
    assert case.exempt.keys() <= MUTANTS.keys() and all(case.exempt.values())
    exempt = {*case.exempt} if remembers(case) else {*case.exempt, FORGETFUL}
    for name in MUTANTS.keys() - exempt:
        try:
            check_every_worker(case, MUTANTS[name])
        except AssertionError:
            continue
        pytest.fail(f"{name}: not caught")
