"""Front layers first, in parts: P3 and ByteScheduler."""

import dataclasses

import numpy as np

from jaxcomm.scheduling import AlphaBeta, LayerTimes, priority_plan, timeline, wait_free_plan
from tests.scheduling.cases import random_case


def test_parts_have_at_most_their_bytes() -> None:
    for seed in range(50):
        times, link = random_case(seed)
        plan = priority_plan(times, link, part_bytes=7.0)
        for parts, size in zip(plan.parts, times.sizes, strict=True):
            assert size / parts <= 7.0 and (parts == 1 or size / (parts - 1) > 7.0)
        # The smallest number goes first, and belongs to the first layer of the model.
        assert plan.priorities == tuple(range(len(times)))[::-1] and not plan.barrier


def test_without_latency_small_parts_are_optimal() -> None:
    # Parts of a second end when layers are ready, since all times are whole seconds. Then the order
    # of the forward pass is that of the earliest due date, which is the best with preemption.
    for seed in range(40):
        times, _ = random_case(seed, most=8, codec=False)
        link = AlphaBeta(0.0, 1.0)
        plan = priority_plan(times, link, part_bytes=1.0)
        best = timeline(times, link, plan).step_seconds
        rng = np.random.default_rng(seed)
        for _ in range(10):
            other = tuple(int(x) for x in rng.permutation(len(times)))
            assert best <= timeline(times, link, plan._replace(priorities=other)).step_seconds
        first_come = wait_free_plan(times)._replace(barrier=False)
        assert best <= timeline(times, link, first_come).step_seconds
        assert best <= timeline(times, link, wait_free_plan(times)).step_seconds


def test_the_gain_is_the_earlier_forward_pass() -> None:
    # The large last layer is ready first. First come, first served, the forward pass waits for it.
    times = LayerTimes(sizes=[20, 1], backward=[1, 1], forward=[10, 10])
    link = AlphaBeta(0.0, 1.0)
    waits = timeline(times, link, wait_free_plan(times)).step_seconds
    found = timeline(times, link, priority_plan(times, link, part_bytes=1.0))
    assert waits == 42.0 and found.step_seconds == 32.0
    starts = [event.start for event in found.events if event.kind == "forward"]
    assert starts == [3.0, 22.0]


def test_the_chosen_parts_are_the_best_of_their_ladder() -> None:
    for seed in range(10):
        times, link = random_case(seed)
        link = dataclasses.replace(link, latency=link.latency / 16)
        chosen = timeline(times, link, priority_plan(times, link)).step_seconds
        for doublings in range(7):
            size = max(times.sizes) / 2**doublings
            plan = priority_plan(times, link, part_bytes=size)
            assert chosen <= timeline(times, link, plan).step_seconds * (1 + 1e-9)


def test_layers_without_a_gain_are_not_split() -> None:
    times, link = random_case(1)
    assert set(priority_plan(times, dataclasses.replace(link, latency=1e4)).parts) == {1}
    # Without a forward pass, all that matters is when the link is done.
    for seed in range(20):
        times, link = random_case(seed, codec=False)
        times = dataclasses.replace(times, forward=[0.0] * len(times))
        free = dataclasses.replace(link, latency=0.0)
        assert set(priority_plan(times, free).parts) == {1}, seed
        waits = timeline(times, link, wait_free_plan(times)).step_seconds
        found = timeline(times, link, priority_plan(times, link)).step_seconds
        assert found >= waits * (1 - 1e-12)
