"""Islands: two tiers, each with a policy and a codec of its own, replayed bit for bit."""

import importlib.util
import os
import signal
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxcomm import asynchronous
from jaxcomm.asynchronous import Island, Row
from jaxcomm.asynchronous._islands import IslandWorker, ReplayOfIslands, job_of_island
from jaxcomm.asynchronous._messages import Job, Order
from jaxcomm.compression.quantizers import dither
from jaxcomm.synchronization import events
from tests.asynchronous.program import options_of, paced, processes
from tests.asynchronous.simulated import (
    EXAMPLES,
    START,
    Simulated,
    batches,
    job_of,
    limits_of,
    loss,
    trained,
)
from tests.slow import slow

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="no Ray")
OUTER = optax.sgd(0.5, momentum=0.3, nesterov=True)
# HALoS: gradients to the owner of an island, and pseudo-gradients with momentum to the other one.
UPPER = {
    "server": events.parameter_server(OUTER, codec=dither(bits=8)),
    "stale_synchronous": events.stale_synchronous(optax.sgd(0.5), 1),
    "decoupled": events.decoupled_diloco(
        optax.sgd(1.0), OUTER, 1, quorum=1, grace=1.0, codec=dither(bits=8)
    ),
}  # fmt: skip
LOWER = {
    "server": Island(events.parameter_server(optax.sgd(0.02)), 2, 5),
    "local_steps": Island(
        events.decoupled_diloco(
            optax.sgd(0.02), optax.sgd(1.0), 3, quorum=1, codec=dither(bits=8)
        ), 2, 4,
    ),
    "easgd": Island(events.easgd(optax.sgd(0.05), elasticity=0.4), 2, 5),
    "stale_synchronous": Island(events.stale_synchronous(optax.sgd(0.05), 1), 2, 5),
    "backup_workers": Island(events.backup_workers(optax.sgd(0.05), 1), 2, 5),
}  # fmt: skip


class Archipelago(Simulated):
    """A clock of islands, whose workers have clocks of their own, and die."""

    def __init__(self, job: Job, seed: int = 0, deaths: float = 0.0) -> None:
        super().__init__(job, seed, deaths)
        self.job = job

    def worker(self, index: int) -> Any:
        return IslandWorker(
            self.job, index, lambda inner: Simulated(inner, 10 + index, self.deaths)
        )


def untimed(rows: Any) -> list[str]:
    return [repr(row._replace(work_seconds=0.0, inner=untimed(row.inner))) for row in rows]


TIERS = ["decoupled-local_steps", "stale_synchronous-easgd", "server-backup_workers"]
TIERS += ["decoupled-stale_synchronous"]


@pytest.mark.parametrize("tiers", ["server-server", *map(slow, TIERS)])
def test_two_tiers_with_deaths_are_replayed_bit_for_bit(tiers: str) -> None:
    upper, lower = tiers.split("-")
    job = job_of(UPPER[upper], workers=3, island=LOWER[lower])
    limits = limits_of(1500, start=3)
    owner, rows = trained(job, limits, Archipelago, 1, deaths=0.03)
    again, same = trained(job, limits, ReplayOfIslands, rows)
    assert untimed(rows) == untimed(same)
    np.testing.assert_array_equal(owner.model["w"], again.model["w"])
    np.testing.assert_allclose(owner.model["w"], [1, 2, 3], atol=0.1)
    used = [row for row in rows if row.outcome == "used"]
    inner = [each for row in used for each in row.inner if each.outcome == "used"]
    assert sum(row.examples for row in used) == sum(each.examples for each in inner) >= 3000
    assert any(row.kind == "left" for row in rows)
    assert any(each.kind == "left" for row in rows for each in row.inner)


def test_one_worker_on_each_island_is_local_steps() -> None:
    """An island with one worker takes its steps; the pseudo-gradient is their sum."""
    island = Island(events.parameter_server(optax.sgd(0.02)), 1, 5)
    job = job_of(
        events.parameter_server(optax.sgd(1.0)), workers=1, island=island
    )  # fmt: skip
    owner, rows = trained(job, limits_of(20, start=1), Archipelago)
    flat = job_of(events.parameter_server(optax.sgd(0.02)), workers=1)
    flat = flat._replace(seed=job_of_island(job, 0, 0, 0).seed)
    expected, _ = trained(flat, limits_of(20, start=1))
    np.testing.assert_allclose(owner.model["w"], expected.model["w"], rtol=1e-5)
    assert [row.examples for row in rows if row.kind == "arrived"] == [10] * 4


def test_islands_have_examples_and_workers_of_their_own() -> None:
    seen: set[tuple[int, int]] = set()

    def recorded(numbers: np.ndarray, worker: int) -> Any:
        seen.update((worker, int(number)) for number in numbers)
        return batches(numbers, worker)

    job = job_of(UPPER["server"], workers=3, island=LOWER["server"], batches=recorded)
    trained(job, limits_of(600, start=3), Archipelago)
    assert {worker for worker, _ in seen} == set(range(6))
    assert {number for _, number in seen} == set(range(EXAMPLES))
    assert all(number % 3 == worker // 2 for worker, number in seen)


def test_an_island_whose_parameters_overflow_begins_again() -> None:
    def broken(numbers: np.ndarray, worker: int) -> Any:
        return *batches(numbers, worker), np.float32([3e38 * (7 in numbers)] * len(numbers))

    def steep(params: Any, batch: Any) -> jax.Array:
        return loss(params, batch[:2]) + params["w"][0] * batch[2][0]

    def overflows(updates: Any, params: Any) -> Any:
        """An update that is infinite, of a gradient that is not."""
        return jax.tree.map(lambda x: jnp.where(jnp.abs(x) > 1e30, jnp.inf, -0.02 * x), updates)

    tx = optax.stateless(overflows)
    job = job_of(
        events.parameter_server(optax.sgd(0.5)), workers=3, batches=broken, loss_fn=steep,
        island=Island(events.parameter_server(tx), 2, 5),
    )  # fmt: skip
    limits = limits_of(600, start=3)
    owner, rows = trained(job, limits, Archipelago)
    again, same = trained(job, limits, ReplayOfIslands, rows)
    assert untimed(rows) == untimed(same)
    np.testing.assert_array_equal(owner.model["w"], again.model["w"])
    assert any(row.outcome == "nonfinite" for row in rows)
    np.testing.assert_allclose(owner.model["w"], [1, 2, 3], atol=0.5)


def test_a_message_of_an_island_whose_own_were_too_late_is_finite() -> None:
    island = Island(events.backup_workers(optax.sgd(0.05), 1), 2, 1)
    job = job_of(UPPER["server"], workers=2, island=island)
    _, rows = trained(job, limits_of(100, start=2), Archipelago)
    assert any(each.outcome == "stale" for row in rows for each in row.inner)
    assert not any(row.outcome == "nonfinite" for row in rows)


def test_an_island_that_has_died_deals_in_another_order() -> None:
    def dealt(life: int) -> list[int]:
        seen: list[int] = []

        def recorded(numbers: np.ndarray, worker: int) -> Any:
            seen.extend(numbers.tolist())
            return batches(numbers, worker)

        given = {"island": LOWER["server"], "batches": recorded}
        island = IslandWorker(job_of(UPPER["server"], workers=1, **given), 0, Simulated)
        island.run(Order(0, np.zeros((1, 0), np.int32), START, life=life), lambda number: None)
        return seen

    assert dealt(0) == dealt(0) and dealt(0)[:8] != dealt(1)[:8]


@needs_ray
@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_processes_of_two_tiers_make_the_same_bits_as_a_replay() -> None:
    """One process of each kind dies."""
    killed: list[str] = []

    def act(row: Row) -> None:
        kind = ["WorkerProcess.run", "island"][len(killed)] if len(killed) < 2 else ""
        if kind and row.kind == "arrived" and row.number > 3 * (len(killed) + 1):
            found = processes("WorkerProcess")
            killed.append(kind)
            os.kill(found[-1] if kind == "island" else found[0], signal.SIGKILL)

    options = options_of(UPPER["decoupled"], workers=2, total=1200, island=LOWER["local_steps"])
    result = asynchronous.train(loss, START, paced, **options, on_row=act)
    again = asynchronous.train(loss, START, batches, **options, replay=result.rows)
    np.testing.assert_array_equal(result.params["w"], again.params["w"])
    assert result.is_done and not processes("") and len(killed) == 2
    left = [row for row in result.rows if row.kind == "left"]
    inner = [each for row in result.rows for each in row.inner if each.kind == "left"]
    assert len(left) + len(inner) >= 2
    np.testing.assert_allclose(result.params["w"], [1, 2, 3], atol=0.3)
    # 8 bits and a float32 travel up, and 3 float32 with the number of the anchor down.
    assert result.summary.upload_bytes == 7 * sum(row.upload_bytes > 0 for row in result.rows)


def loaded(numbers: np.ndarray, worker: int) -> Any:
    """Batches that a new process has to load first."""
    if not hasattr(loaded, "is_done"):
        time.sleep(6.0)
        loaded.is_done = True  # type: ignore[attr-defined]
    return paced(numbers, worker)


@needs_ray
@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_an_island_that_waits_for_a_new_process_is_not_silent() -> None:
    killed: list[int] = []
    rows: list[Row] = []

    class Returned(Exception):
        pass

    def act(row: Row) -> None:
        rows.append(row)
        if killed and any(each.kind == "joined" for each in row.inner):
            raise Returned
        if not killed and row.kind == "arrived" and row.number > 10:
            killed.append(processes("WorkerProcess")[-1])
            os.kill(killed[0], signal.SIGKILL)

    island = Island(events.parameter_server(optax.sgd(0.02)), 1, 2)
    options = options_of(
        events.parameter_server(optax.sgd(1.0)), workers=2, island=island, total=None, seconds=300.0
    )
    with pytest.raises(Returned):
        asynchronous.train(loss, START, loaded, **options, on_row=act)
    assert killed and not any(row.kind == "left" for row in rows)
    inner = [each.kind for row in rows for each in row.inner]
    assert inner.count("left") == 1 and inner.count("joined") == 3
