"""Six mistakes are caught in the quick run, in every row of the tables that can make them.

Each check is one that the quick run applies to the unchanged row, in the same program.
"""

import functools

import pytest

from tests.cases import CASES, Case
from tests.cases._gossip import GOSSIP, GossipCase, gossip_rows
from tests.cases._local import LOCAL, LocalCase
from tests.gossip import test_methods
from tests.gossip.workers import initial_of_start
from tests.laws import test_local
from tests.laws.test_every_worker import check_every_worker, first_state
from tests.mutants import FORGETFUL, WORKERS, honest, mutants, remembers, uncaught


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_caught(case: Case) -> None:
    forgets = remembers(first_state(case))
    exempt = {*dict(case.exempt), *([] if forgets else [FORGETFUL])}
    assert not uncaught(functools.partial(check_every_worker, case), exempt)


@pytest.mark.parametrize("case", gossip_rows(WORKERS, {case.name for case in GOSSIP}), ids=repr)
def test_caught_in_gossip(case: GossipCase) -> None:
    forgets = remembers(initial_of_start(case.make(WORKERS), WORKERS))
    exempt = {*dict(case.exempt), *([] if forgets else [FORGETFUL])}
    assert not uncaught(functools.partial(test_methods.check, case, WORKERS), exempt)


@pytest.mark.parametrize("case", LOCAL, ids=repr)
def test_caught_in_local_steps(case: LocalCase) -> None:
    check = functools.partial(test_local.check_equation, case)
    check(honest(test_local.N))
    assert not uncaught(check, {*dict(case.exempt)}, test_local.N)


@pytest.mark.parametrize("case", [*CASES, *GOSSIP, *LOCAL], ids=repr)
def test_an_exemption_names_a_mistake_and_a_reason(case: Case | GossipCase | LocalCase) -> None:
    assert dict(case.exempt).keys() <= mutants().keys() and all(dict(case.exempt).values())
