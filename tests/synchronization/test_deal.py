"""No example is lost or taken twice, whatever the number of workers: an exact ledger."""

import itertools
import pathlib
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm.checkpoint import CheckpointError, Checkpoints
from jaxcomm.synchronization import (
    StaleParams,
    deadline,
    new_deal,
    next_examples,
    queues_of,
    redeal,
    resize_clock,
    shifted_exponential,
    stale_params,
    take_examples,
    window_batches,
    windows,
)
from jaxcomm.synchronization._deal import Deal, _order
from tests.slow import slow

BATCH, WINDOW, EXAMPLES = 3, 4, 40
KEY = jax.random.key(3)
CHANGES = [(4, 3), slow((8, 4, 3, 8)), slow((4, 8, 4)), slow((5, 1, 7, 2, 3))]


class Ledger:
    """Counts by hand which examples each worker has taken since the last deal, in order."""

    def __init__(self, workers: int, examples: int = EXAMPLES) -> None:
        self.examples, self.due = examples, Counter[int]()
        self.taken = Counter[int]()
        self.begin(workers, [[] for _ in range(workers)])

    def begin(self, workers: int, left: list[list[int]]) -> None:
        self.left, self.orders = left, [[] for _ in range(workers)]
        shards = np.array_split(np.arange(self.examples), workers)
        self.shards = [{*shard.tolist()} for shard in shards]

    def take(self, worker: int, numbers: list[int]) -> None:
        self.orders[worker] += numbers
        self.taken.update(numbers)

    def close(self) -> Counter[int]:
        """What is left of epochs begun; raises if an epoch repeats or misses an example."""
        rest = Counter[int]()
        for left, order, shard in zip(self.left, self.orders, self.shards, strict=True):
            assert order[: len(left)] == left[: len(order)]
            rest.update(left[len(order) :])
            own = order[len(left) :]
            for begin in range(0, len(own), len(shard)):
                epoch = own[begin : begin + len(shard)]
                assert len({*epoch}) == len(epoch)
                assert {*epoch} <= shard
                self.due.update(shard)
                rest.update(shard - {*epoch})
        return rest

    def redealt(self, deal: Deal) -> None:
        """Every example is either taken or left, as often as an epoch with it began."""
        rest = self.close()
        left = [[n for n in row if n >= 0] for row in deal.left.tolist()]
        assert Counter(itertools.chain(*left)) == rest
        assert self.taken + rest == self.due
        sizes = [len(row) for row in left]
        assert max(sizes) - min(sizes) <= 1
        np.testing.assert_array_equal(deal.taken, 0)
        self.begin(len(left), left)


def upcoming(deal: Deal) -> np.ndarray:
    return np.asarray(next_examples(deal, WINDOW * BATCH))


@pytest.mark.parametrize("in_flight", ["finish_late", "abort"])
@pytest.mark.parametrize("counts", CHANGES, ids=str)
def test_nothing_is_lost_on_a_simulated_clock(counts: tuple[int, ...], in_flight: Any) -> None:
    """Of 40 examples in mini-batches of 3, so epochs end within mini-batches and 3 cuts unevenly.

    In flight are mini-batches at every change.
    """
    deal, ledger, clock = new_deal(KEY, EXAMPLES, counts[0]), Ledger(counts[0]), None
    late = 0
    for round_number, workers in enumerate(counts):
        start, close = windows(
            shifted_exponential(mean=1.0),
            deadline(1.5),
            workers=workers,
            minibatches=WINDOW,
            in_flight=in_flight,
            seed=round_number,
        )
        if clock is None:
            clock = start
        else:
            deal = redeal(deal, workers)
            ledger.redealt(deal)
            clock = resize_clock(clock, workers)
        close = jax.jit(close)
        for _ in range((3, 1, 7, 4, 2)[round_number]):
            numbers = upcoming(deal).reshape(workers, WINDOW, BATCH)
            window, clock = close(clock)
            finished = np.asarray(window.finished).astype(int)
            for worker, count in enumerate(finished):
                ledger.take(worker, numbers[worker, :count].ravel().tolist())
            deal = take_examples(deal, window.finished * BATCH)
        np.testing.assert_array_equal(deal.taken, clock.queue.position * BATCH)
        late += int(jnp.sum(clock.queue.remaining_seconds > 0))
    assert (late > 0) == (in_flight == "finish_late")
    assert sum(ledger.taken.values()) == BATCH * int(clock.minibatches)
    ledger.redealt(redeal(deal, 1))


def test_a_worker_with_fewer_examples_ends_with_a_marker() -> None:
    deal = new_deal(KEY, 7, 2)
    orders = [np.asarray(_order(deal, jnp.int32(n), jnp.int32(0))) for n in range(2)]
    assert {*orders[0]} | {*orders[1]} == {*range(7), -1} and orders[1][-1] == -1


@pytest.mark.slow
def test_queues_follow_the_assignment_order() -> None:
    """After a change of workers, and from where a worker is."""
    data, deal = jnp.arange(EXAMPLES, dtype=jnp.float32), new_deal(KEY, EXAMPLES, 4)
    for counts in (jnp.array([0, 3, 6, 30]), jnp.array([1, 0, 20])):
        deal = take_examples(redeal(deal, len(counts)), counts.astype(jnp.int32))
        for queue, expected in zip(queues_of(deal, data, BATCH), upcoming(deal), strict=True):
            found = [np.asarray(next(queue)) for _ in range(WINDOW)]
            np.testing.assert_array_equal(np.concatenate(found), expected)


@pytest.mark.slow
def test_orders_match_window_batches() -> None:
    shards = jnp.arange(EXAMPLES).reshape(8, 5)
    taken = jnp.arange(8, dtype=jnp.int32) * BATCH
    expected = window_batches(
        KEY, shards, jnp.arange(8, dtype=jnp.int32), minibatches=WINDOW, batch_size=BATCH
    )
    found = upcoming(take_examples(new_deal(KEY, EXAMPLES, 8), taken))
    orders = [row[-BATCH * i % 5 :][:5] - 5 * i for i, row in enumerate(np.asarray(found))]
    assert len({*map(tuple, orders)}) > 2  # They are shuffled.
    np.testing.assert_array_equal(found, expected.reshape(8, -1))


def start_of(workers: int) -> dict[str, Any]:
    params = {"w": jnp.arange(3.0)}
    tx = optax.chain(jaxcomm.mean(), optax.sgd(0.1))
    clock, _ = windows(shifted_exponential(1.0), deadline(1.5), workers=workers, minibatches=WINDOW)
    stale = jax.tree.map(lambda x: jnp.zeros((workers, *x.shape)), params)
    return {
        "params": params,
        "opt_state": jaxcomm.init(tx, params, workers),
        "clock": clock,
        "deal": new_deal(KEY, EXAMPLES, workers),
        "stale": StaleParams(stale),
    }


@pytest.mark.slow
def test_a_checkpoint_of_another_number_of_workers(tmp_path: pathlib.Path) -> None:
    """Clock and deal follow, and nothing is in flight, so parameters are not stale."""
    state = start_of(8)
    tx = optax.chain(jaxcomm.mean(), optax.sgd(0.1))
    _, close = windows(shifted_exponential(1.0), deadline(1.5), workers=8, minibatches=WINDOW)
    window, clock = jax.jit(close)(state["clock"])
    stale = stale_params(window, clock.queue, *(state["stale"].params,) * 2, state["stale"].params)
    deal = take_examples(state["deal"], window.finished * BATCH)
    state |= {"clock": clock, "deal": deal, "stale": StaleParams(stale)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        with pytest.raises(CheckpointError, match="is of 8 workers, and `start` is for 3"):
            checkpoints.restore(start_of(3))
        found = checkpoints.restore(start_of(3), tx=tx, workers=3).state
        checkpoints.save(2, found)
    expected = redeal(deal, 3)
    np.testing.assert_array_equal(found["deal"].left, expected.left)
    np.testing.assert_array_equal(next_examples(found["deal"], 9), next_examples(expected, 9))
    assert found["clock"].seconds == clock.seconds > 0
    np.testing.assert_array_equal(found["clock"].queue.remaining_seconds, np.zeros(3))
    assert int(found["clock"].minibatches) == int(np.sum(window.finished))
    np.testing.assert_array_equal(
        found["stale"].params["w"], np.tile(np.arange(3, dtype=np.float32), (3, 1))
    )


def test_mistakes() -> None:
    deal = new_deal(KEY, 5, 2)
    with pytest.raises(ValueError, match="`examples` must be at least `workers`=6, got 5"):
        redeal(deal, 6)
    with pytest.raises(ValueError, match=r"`counts` must be int32\[2\], got"):
        take_examples(deal, jnp.zeros(3, jnp.int32))
