"""The owner: any order of arrivals, deaths and returns; every example and update accounted for."""

import collections
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxcomm.asynchronous._examples import Examples
from jaxcomm.asynchronous._messages import Happening, Job, Row, row_of
from jaxcomm.asynchronous._owner import Owner
from jaxcomm.asynchronous._replay import Replay
from jaxcomm.asynchronous._summary import Summary
from jaxcomm.asynchronous._train import _Run
from jaxcomm.checkpoint import Checkpoints
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.quantizers import dither
from jaxcomm.compression.sparsifiers import top_k
from jaxcomm.synchronization import deterministic, events
from tests.asynchronous.simulated import (
    EXAMPLES,
    INPUTS,
    START,
    TARGETS,
    WORKERS,
    Simulated,
    batches,
    job_of,
    limits_of,
    loss,
    trained,
)
from tests.slow import slow

OUTER = optax.sgd(0.7, momentum=0.5, nesterov=True)
POLICIES = {
    "server": lambda: events.parameter_server(optax.sgd(0.02)),
    "server_aware": lambda: events.parameter_server(
        optax.sgd(0.05), weight=events.inverse_staleness, codec=error_feedback(top_k(k=1))
    ),
    "stale_synchronous": lambda: events.stale_synchronous(optax.sgd(0.05), 2),
    "backup_workers": lambda: events.backup_workers(optax.sgd(0.05), 1),
    "easgd": lambda: events.easgd(optax.sgd(0.05), elasticity=0.9 / 4, period=3),
    "eamsgd": lambda: events.eamsgd(0.01, 0.8, elasticity=0.9 / 4),
    "lag_wk": lambda: events.lag_wk(0.1, threshold=0.5, memory=3, max_skip=2),
    "laq": lambda: events.laq(0.1, 6, threshold=0.5, memory=3, max_skip=2),
    "decoupled": lambda: events.decoupled_diloco(
        optax.sgd(0.02), OUTER, 5, quorum=2, grace=1.0
    ),
    "decoupled_4_bits": lambda: events.decoupled_diloco(
        optax.sgd(0.02), OUTER, 5, quorum=2, grace=1.0, codec=dither(bits=4)
    ),
    "decoupled_top_k": lambda: events.decoupled_diloco(
        optax.sgd(0.02), OUTER, 5, quorum=2, grace=1.0, codec=error_feedback(top_k(k=1))
    ),
    "decoupled_8_bits": lambda: events.decoupled_diloco(
        optax.sgd(0.02), OUTER, 5, quorum=2, grace=1.0, codec=dither(bits=8), most_stale=3
    ),
}  # fmt: skip


def untimed(rows: list[Row]) -> list[str]:
    """The rows without what a replay measures again; NaN is equal to NaN."""
    return [repr(row._replace(work_seconds=0.0)) for row in rows]


@pytest.mark.parametrize("name", ["server", "decoupled_8_bits", *map(slow, [*POLICIES][1:-1])])
def test_a_run_with_deaths_is_replayed_bit_for_bit(name: str) -> None:
    job, limits = job_of(POLICIES[name]()), limits_of(600)
    owner, rows = trained(job, limits, Simulated, 1, deaths=0.05)
    again, same = trained(job, limits, Replay, rows)
    assert untimed(rows) == untimed(same)
    np.testing.assert_array_equal(owner.model["w"], again.model["w"])
    np.testing.assert_allclose(owner.model["w"], [1, 2, 3], atol=0.05)
    kinds = collections.Counter((row.kind, row.outcome) for row in rows)
    assert kinds["left", "lost"] > 3 and kinds["joined", ""] >= kinds["left", "lost"]
    finished = [row for row in rows if row.kind == "arrived"]
    assert sum(row.examples for row in finished if row.outcome == "used") >= limits.total
    assert owner.is_done and all(np.isfinite(row.loss) for row in finished)


class InOrder(Replay):
    """The events of a simulation, each after a row of its time, at which a worker may hear."""

    def __init__(self, job: Job, rows: list[Row], heard: list[tuple[int, int] | None]) -> None:
        super().__init__(job, rows)
        self.heard, self.latest = iter(heard), {}
        self.views: dict[tuple[int, int], Any] = {}
        self.hears: tuple[int, int] | None = None

    def hear(self, worker: int, version: int, view: Any) -> None:
        self.latest[worker] = version, view

    def next(self, due: float) -> Happening:
        if self.hears is not None:
            self.views[self.hears] = self.latest[self.hears[0]]
        self.hears = next(self.heard, None)
        return super().next(due)

    def news(self, row: Row, number: int) -> Any:
        return self.views.get((row.worker, number))


IN_ORDER = ["decoupled", "server", "stale_synchronous", "backup_workers", "easgd", "eamsgd", "laq"]


@pytest.mark.parametrize("name", [*IN_ORDER, "lag_wk"])
def test_an_event_loop_and_an_owner_make_the_same_parameters(name: str) -> None:
    """In the order of the simulation."""
    policy, count = POLICIES[name](), 200 if name == "decoupled" else 40
    job = job_of(policy, batches=lambda numbers, worker: (INPUTS, TARGETS))

    def work(params: Any, task: Any) -> Any:
        # All batches are the same one, since an owner deals in the order of beginnings.
        return jax.value_and_grad(loss)(params, (INPUTS, TARGETS))

    loop = events.event_loop(policy, work, deterministic([1.0, 1.3, 1.7, 5.2]), workers=4)
    progress, records = jax.jit(loop.run, static_argnums=1)(loop.start(START), count)
    rows = [Row("joined", 0.0, worker) for worker in range(WORKERS)]
    heard: list[tuple[int, int] | None] = [None] * WORKERS
    for i in range(count):
        of_worker = int(records.worker[i]), int(records.number[i])
        rows.append(Row("time", float(records.seconds[i])))
        heard.append(of_worker if name == "decoupled" and records.sent.downloads[i] else None)
        # A lazy worker that skips says so.
        if policy.talks is None or policy.talks(of_worker[1]):
            rows.append(Row("arrived", float(records.seconds[i]), *of_worker))
            heard.append(None)
    owner, again = trained(job, limits_of(10**6), InOrder, rows, heard)
    # The same bits, unless XLA fuses a step with its reply into one multiply-add.
    np.testing.assert_array_max_ulp(owner.model["w"], np.asarray(loop.model(progress)["w"]), 4)
    if name == "decoupled":
        assert progress.policy.merges > 5 and any(row.heard for row in again)
    elif policy.talks is None:
        arrived = [row.staleness for row in again if row.kind == "arrived"]
        assert arrived == records.staleness.tolist()


def test_a_run_ends_in_time_if_no_worker_joins() -> None:
    class Empty(Simulated):
        def next(self, due: float) -> Happening:
            assert due == 5.0
            return Happening("time", np.float32(due))

    owner, rows = trained(job_of(POLICIES["server"]()), limits_of(10, seconds=5.0), Empty)
    assert not owner.is_done and rows == []


def test_every_example_is_dealt_once_an_epoch_whoever_dies() -> None:
    seen: list[int] = []

    def recorded(numbers: np.ndarray, worker: int) -> Any:
        seen.extend(numbers.tolist())
        return batches(numbers, worker)

    job = job_of(POLICIES["server"](), batches=recorded)
    _, rows = trained(job, limits_of(200), Simulated, 3, deaths=0.1)
    # A simulated death comes before the worker computes.
    assert sum(row.outcome == "lost" for row in rows) > 5
    epochs = len(seen) // EXAMPLES
    counts = np.bincount(seen, minlength=EXAMPLES)
    # What runs at the end has not been seen.
    assert epochs == 10 and counts.min() >= epochs - 1 and counts.max() <= epochs + 1


def test_lost_examples_come_first_and_positions_are_kept() -> None:
    dealt = Examples(0, 10)
    first = [dealt.take(4) for _ in range(3)]
    assert sorted([*first[0], *first[1], *first[2][:2]]) == [*range(10)]
    dealt.give_back(first[1])
    position = dealt.position([first[2]])
    other = Examples(0, 10)
    other.restore(position)
    expected = [*first[1], *first[2], *dealt.take(12)[4:]]
    assert other.take(16).tolist() == expected


def test_messages_that_are_not_finite_are_dropped_and_counted() -> None:
    calls = collections.Counter()

    def broken(numbers: np.ndarray, worker: int) -> Any:
        calls[worker] += 1
        inputs, targets = batches(numbers, worker)
        return inputs, targets * np.float32(np.nan if worker == 1 and calls[1] % 7 == 3 else 1)

    for name in ("server_aware", "decoupled", "stale_synchronous"):
        calls.clear()
        owner, rows = trained(job_of(POLICIES[name](), batches=broken), limits_of(400))
        outcomes = collections.Counter(row.outcome for row in rows if row.kind == "arrived")
        assert outcomes["nonfinite"] > 2 and outcomes["used"] > 60, (name, outcomes)
        assert {row.worker for row in rows if row.outcome == "nonfinite"} == {1}
        np.testing.assert_allclose(owner.model["w"], [1, 2, 3], atol=0.2)


def test_a_run_without_a_finite_message_ends() -> None:
    job = job_of(POLICIES["server"](), batches=lambda numbers, worker: (INPUTS, TARGETS * np.nan))
    with pytest.raises(FloatingPointError, match="were not finite"):
        trained(job, limits_of(400))


@pytest.mark.parametrize("name", ["server", "decoupled"])
def test_what_is_too_stale_is_dropped_and_counted(name: str) -> None:
    policy = (
        events.parameter_server(optax.sgd(0.02), most_stale=2)
        if name == "server"
        else events.decoupled_diloco(optax.sgd(0.02), OUTER, 5, quorum=1, most_stale=2)
    )
    owner, rows = trained(job_of(policy), limits_of(400))
    stale = [row for row in rows if row.outcome == "stale"]
    assert owner._state.dropped == len(stale) > 5 and 3 in {row.worker for row in stale}
    late = [row.outcome == "stale" for row in rows if row.kind == "arrived" and row.staleness > 2]
    assert name == "decoupled" or (all(late) and len(late) == len(stale))
    np.testing.assert_allclose(owner.model["w"], [1, 2, 3], atol=0.2)


def test_a_gradient_is_clipped_if_asked() -> None:
    policy = events.parameter_server(optax.sgd(1.0))
    job = job_of(policy, clip=0.01)
    owner, rows = trained(job, limits_of(30))
    assert np.linalg.norm(owner.model["w"]) < 0.01 * 30 + 1e-6
    assert all(row.outcome == "used" for row in rows if row.kind == "arrived")


@pytest.mark.parametrize("name", ["stale_synchronous", *map(slow, ["decoupled", "easgd", "laq"])])
def test_a_worker_compiles_its_program_once(name: str) -> None:
    """Also if its memory is what the program has returned."""
    clocks: list[Any] = []

    def clock(job: Any) -> Any:
        clocks.append(Simulated(job))
        return clocks[0]

    trained(job_of(POLICIES[name]()), limits_of(40), clock)
    assert clocks[0].programs.step._cache_size() == 1


@pytest.mark.parametrize("name", POLICIES)
def test_parameters_in_bfloat16_and_keys_for_the_loss(name: str) -> None:
    """Keys are those of the gradient, so they too are the same in a replay."""
    start = {"w": jnp.zeros(3, jnp.bfloat16)}

    def noisy(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        noise = 0.1 * jax.random.normal(key, (3,), jnp.bfloat16)
        return loss({"w": (params["w"] + noise).astype(jnp.float32)}, batch)

    job, limits = job_of(POLICIES[name](), loss_fn=noisy, has_key=True), limits_of(60)
    owner, rows = trained(job, limits, Simulated, 1, deaths=0.05, start=start)
    again, _ = trained(job, limits, Replay, rows, start=start)
    assert owner.model["w"].dtype == jnp.bfloat16 and owner.model["w"].any()
    np.testing.assert_array_equal(owner.model["w"], again.model["w"])


def test_a_run_begins_with_fewer_workers_and_others_join() -> None:
    class Late(Simulated):
        def start(self, worker: int) -> None:
            if worker:
                super().start(worker)

        def next(self, due: float) -> Any:
            if self.now > 20 and 0 not in self.workers and not self.starting:
                self.starting.append(0)
            return super().next(due)

    job = job_of(POLICIES["backup_workers"]())
    owner, rows = trained(job, limits_of(300, start=3), Late)
    of_zero = [row.seconds for row in rows if row.worker == 0]
    assert of_zero[0] > 20 and len(of_zero) > 20
    np.testing.assert_allclose(owner.model["w"], [1, 2, 3], atol=0.05)


@pytest.mark.parametrize("name", ["decoupled_8_bits", slow("server"), slow("stale_synchronous")])
def test_an_owner_goes_on_at_a_checkpoint(name: str, tmp_path: Any) -> None:
    job, limits = job_of(POLICIES[name]()), limits_of(200, checkpoint_seconds=30.0)
    rows: list[Row] = []
    with Checkpoints(tmp_path) as checkpoints:
        first = Owner(
            job, START, limits, Simulated(job, 5, deaths=0.02), checkpoints, rows.append,
            unsent=lambda: rows[-3:],
        )  # fmt: skip
        first.run()
    more = limits._replace(total=2 * limits.total)
    with Checkpoints(tmp_path) as checkpoints:
        second = Owner(job, START, more, Simulated(job, 6), checkpoints, rows.append)
        second.run()
    (cut,) = (number for number, row in enumerate(rows) if row.kind == "restored")
    kept = rows[: rows[cut].number] + rows[cut:]
    assert repr(rows[cut - 3 : cut]) == repr(kept[rows[cut].number - 3 : rows[cut].number])
    again, same = trained(job, more, Replay, kept)
    np.testing.assert_array_equal(second.model["w"], again.model["w"])
    assert untimed(same) == untimed(kept)


def test_a_program_keeps_the_rows_of_a_checkpoint_that_it_did_not_have() -> None:
    def arrived(*numbers: int) -> list[Row]:
        return [Row("arrived", float(i), 0, i, outcome="used") for i in numbers]

    def restored(number: int) -> Row:
        return Row("restored", float(number), number=number)

    heard: list[Row] = []
    run = _Run(None, None, ([], {}, 1.0), Summary(1), heard.append, False)
    for of_an_owner in (
        arrived(0, 1, 2, 3),
        [*arrived(1), restored(2), *arrived(3)],  # Two rows are undone.
        [*arrived(1), restored(2), *arrived(3, 4), restored(5), *arrived(6)],  # One was not sent.
        [restored(6), *arrived(7)],  # One is undone.
    ):
        run._is_first = True
        run._add(of_an_owner)
    expected = [*arrived(0, 1), restored(2), *arrived(3, 4), restored(5), restored(6), *arrived(7)]
    assert run._rows == expected and run._summary.undone == 3
    assert heard == [*arrived(0, 1, 2, 3), *expected[2:6], *arrived(6), *expected[6:]]
    other = _Run(None, None, ([], {}, 1.0), Summary(1), None, False)
    other._add([*arrived(4), restored(5), *arrived(6)])  # Of a directory of another program.
    assert other._rows == [restored(5), *arrived(6)]


def test_staleness_counts_from_what_a_worker_has_read_also_after_a_message_with_nan() -> None:
    calls = collections.Counter()

    def broken(numbers: np.ndarray, worker: int) -> Any:
        calls[worker] += 1
        return np.float32([np.nan if worker == 3 and calls[3] % 2 else 1] * len(numbers))

    def read(params: Any, batch: Any) -> jax.Array:
        """The number of updates in the parameters."""
        count = jnp.mean(batch) * params["updates"]
        return jax.lax.stop_gradient(params["updates"] + count) - count

    policy = events.parameter_server(optax.sgd(1.0), most_stale=20)
    job, start = job_of(policy, batches=broken, loss_fn=read), {"updates": np.float32(0)}
    owner, rows = trained(job, limits_of(400), start=start)
    used = [row for row in rows if row.outcome == "used"]
    assert owner.model["updates"] == len(used)
    assert any(row.outcome == "stale" for row in rows)
    assert max(number - row.loss for number, row in enumerate(used)) <= 20


def test_a_row_that_json_has_held_is_the_same() -> None:
    inner = Row("arrived", 0.5, 1, outcome="used", loss=0.25, heard=((1, 2), (3, 4)))
    row = Row("arrived", 1.0, 0, loss=2.0, heard=((5, 6),), inner=(inner, inner))
    again = row_of(json.loads(json.dumps(row)))
    assert again == row and hash(again) == hash(row)
