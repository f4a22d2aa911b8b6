"""Six mistakes are caught in a row of each kind of exchange.

Each check is one that is applied to the unchanged row, too, in the same program.
"""

import functools

import pytest

from tests.cases import CASES, Case
from tests.cases._gossip import GOSSIP, GossipCase
from tests.cases._local import LOCAL, LocalCase
from tests.gossip import test_methods
from tests.gossip.workers import initial_of_start
from tests.laws import test_local
from tests.laws.test_every_worker import check_every_worker, first_state
from tests.mutants import FORGETFUL, WORKERS, honest, remembers, uncaught

# One for each way in which updates are exchanged and memory is kept, and for each kind of message.
EXCHANGES = {
    *("mean", "majority_vote", "global_qsgd", "global_qsgd_exponential", "two_stage_8_bits"),
    *("sharded_server", "top_k_sgd", "diana"),
}
MESSAGES = {"dpsgd", "matcha", "choco_sgd", "choco_sgd_over_matcha", "overlap_sgp"}


@pytest.mark.parametrize("case", [c for c in CASES if c.name in EXCHANGES], ids=repr)
def test_caught(case: Case) -> None:
    exempt = set() if remembers(first_state(case)) else {FORGETFUL}
    assert not uncaught(functools.partial(check_every_worker, case), exempt)


@pytest.mark.parametrize("case", [c for c in GOSSIP if c.name in MESSAGES], ids=repr)
def test_caught_in_gossip(case: GossipCase) -> None:
    forgets = remembers(initial_of_start(case.make(WORKERS), WORKERS))
    exempt = set() if forgets else {FORGETFUL}
    assert not uncaught(functools.partial(test_methods.check, case, WORKERS), exempt)


@pytest.mark.parametrize("case", LOCAL, ids=repr)
def test_caught_in_local_steps(case: LocalCase) -> None:
    check = functools.partial(test_local.check_equation, case)
    check(honest(test_local.N))
    assert not uncaught(check, set(), test_local.N)
