"""What gossip sends, in the traced and in the compiled program."""

from typing import Any

import jax.numpy as jnp
import pytest

import jaxcomm
from jaxcomm import gossip
from tests.cases._gossip import GossipCase, gossip_rows
from tests.gossip.workers import initial, on_mesh, start


def program(tx: Any) -> tuple[Any, tuple[Any, ...]]:
    x = start(8)
    return on_mesh(tx, 8), (jnp.asarray(x), initial(tx, x, on_mesh=True), jnp.zeros((8, 12)))


def compiled(tx: Any) -> Any:
    """The collectives of the compiled program."""
    run, args = program(tx)
    return jaxcomm.wire.account(run.lower(*args)).collectives


@pytest.mark.parametrize("case", gossip_rows(8), ids=repr)
def test_bytes(case: GossipCase) -> None:
    run, args = program(case.make(8))
    account = jaxcomm.wire.account(run, *args)
    sent = [c for c in account.collectives if c.kind == "ppermute"]
    together = case.mixing(8)
    exact = sum(c.bytes_per_worker for c in account.collectives if c.kind == "all_reduce")
    assert account.bytes_per_worker - exact == case.sends * case.message
    assert account.bytes_of_branches - exact == sum(c.bytes_per_worker for c in sent)
    # What is not always sent stands in a conditional.
    always = all(p == 1 for p in together.probabilities)
    assert all(any("cond" in part for part in c.path) != always for c in sent)
    assert together.bytes_per_step(jnp.zeros(12)) == pytest.approx(together.messages.max() * 48)


def test_a_ring_is_permutations_only() -> None:
    found = compiled(gossip.dpsgd(gossip.ring(8)))
    assert [(c.kind, c.path) for c in found] == [("ppermute", ())] * 2


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("mixing", "workers", "sent"),
    [(gossip.ring(8), 8, 2), *((gossip.random_pairs(n), n, 1) for n in (2, 4, 5, 8))],
)
def test_a_round_of_noloco_is_counted_once(
    mixing: Any, workers: int, sent: int, weighted: bool
) -> None:
    """Of random pairs, too; a weight adds four bytes to a message."""

    def gradients(loss_fn: Any, x: Any, batch: Any) -> Any:
        found = jaxcomm.local_value_and_grad(loss_fn)(x, batch)
        return (*found, batch[0]) if weighted else found

    tx = gossip.noloco(mixing, period=4)
    x: Any = jaxcomm.replicate(jnp.zeros(1000), workers)
    step = jaxcomm.simulate(
        lambda x, batch: jnp.sum(x * batch), tx, workers, gradients=gradients, metrics="own"
    )
    account = jaxcomm.wire.account(step, x, jaxcomm.init(tx, x, workers), jnp.ones(workers))
    message = sent * (4000 + 4 * weighted)
    assert account.bytes_per_worker == message
    assert account.amortized_bytes_per_worker(1 / 4) == message / 4
    assert account.amortized_bytes_per_worker(0) == 0
    assert account.bytes_of_branches == len(gossip.to_mixing(mixing).matrices) * message


def test_permutations_of_matcha_are_inside_conditionals() -> None:
    found = compiled(gossip.matcha(gossip.matcha_plan(gossip.ring(8), budget=0.5)))
    assert [(c.kind, c.path[0].split()[0]) for c in found] == [("ppermute", "cond")] * 2


def test_16_bit_parameters_are_sent_in_16_bits() -> None:
    params = jaxcomm.replicate(jnp.zeros(12, jnp.bfloat16), 8)
    tx = gossip.dpsgd(gossip.ring(8))
    step = jaxcomm.simulate(lambda w, b: jnp.sum(w.astype(jnp.float32)) * jnp.mean(b), tx, 8)
    account = jaxcomm.wire.account(step, params, jaxcomm.init(tx, params, 8), jnp.zeros(8))
    permuted = [c for c in account.collectives if c.kind == "ppermute"]
    assert [c.bytes_per_worker for c in permuted] == [24, 24]
