"""The sparse form: what it saves by the paper, and that too small a capacity is reported."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from jaxcomm import wire
from jaxcomm.compression.quantizers import sparse_dither
from tests.workers import abstract, aggregator, draws

D = 2**16


@pytest.mark.slow
def test_bytes_shrink_by_the_root_of_the_workers() -> None:
    workers = 4
    given = jnp.asarray(np.random.default_rng(0).normal(size=(workers, D)), jnp.float32)
    # The capacity for one worker: its share of the expected non-zeros and six standard deviations.
    shares = {"common": (D / workers) ** 0.5, "own": D**0.5}
    capacity = {name: int(share + 6 * share**0.5) for name, share in shares.items()}
    sent = {}
    for name, tx in {
        "common": jaxcomm.sparse_global_qsgd(capacity=capacity["common"]),
        "own": jaxcomm.all_gather_mean(sparse_dither(capacity=capacity["own"])),
    }.items():
        step = aggregator(tx, workers, "checked")
        arguments = given, abstract(tx, given, "checked"), jnp.ones(workers)
        messages = wire.account(step, *arguments).collectives
        sent[name] = sum(c.bytes_per_worker for c in messages if c.kind == "all_gather")
        assert np.isfinite(draws(tx, given, 3)).all()  # The capacity sufficed.
    # The margin for chance is relatively larger where fewer are expected.
    assert 0.8 * workers**0.5 < sent["own"] / sent["common"] <= 1.05 * workers**0.5


def test_indices_are_as_narrow_as_they_can_be() -> None:
    # Eight indices, the word that holds eight codes, and a count, in one message.
    for size, dtype, words in ((2**16 - 1, "uint16", 8 + 2 + 2), (2**16, "uint32", 8 + 1 + 1)):
        tx = jaxcomm.sparse_global_qsgd(capacity=8)
        given = jax.ShapeDtypeStruct((2, size), jnp.float32)
        run = aggregator(tx, 2, "checked")
        account = wire.account(run, given, abstract(tx, given, "checked"), jnp.ones(2))
        gathered = [c for c in account.collectives if c.kind == "all_gather"]
        assert [(str(c.dtype), c.shape) for c in gathered] == [(dtype, (words,))]
