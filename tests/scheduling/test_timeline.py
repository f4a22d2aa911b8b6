"""The timeline against a simulation in small steps of time, and against closed forms."""

import itertools
import math

import numpy as np
import pytest

from jaxcomm.scheduling import (
    AlphaBeta,
    LayerTimes,
    Plan,
    at_end_plan,
    bucket_plan,
    merge_plan,
    priority_plan,
    sparsified_plan,
    timeline,
    wait_free_plan,
)
from jaxcomm.scheduling._timeline import Timeline
from tests.scheduling.cases import random_case
from tests.scheduling.ticks import step_seconds
from tests.slow import slow


def plans(times: LayerTimes, link: AlphaBeta) -> dict[str, Plan]:
    return {
        "at end": at_end_plan(times),
        "at end, by layer": wait_free_plan(times)._replace(overlap=False),
        "wait-free": wait_free_plan(times),
        "buckets": bucket_plan(times, bucket_bytes=50),
        "merged": merge_plan(times, link),
        "sparsified": sparsified_plan(times, link),
        "priority": priority_plan(times, link),
    }


def random_plan(seed: int, count: int) -> Plan:
    """Any groups, also of layers that are not neighbors, with any priorities and parts."""
    rng = np.random.default_rng(seed)
    owners = rng.integers(0, int(rng.integers(1, count + 1)), count)
    groups = tuple(
        tuple(int(i) for i in np.flatnonzero(owners == owner)) for owner in np.unique(owners)
    )
    return Plan(
        groups,
        tuple(float(x) for x in rng.integers(1, 40, count)),
        tuple(int(x) for x in rng.choice([1, 2, 4], len(groups))),
        tuple(int(x) for x in rng.integers(0, 4, len(groups))),
        (1.0,) * count,
        overlap=bool(rng.integers(0, 4)),
        barrier=bool(rng.integers(0, 2)),
    )


@pytest.mark.parametrize("seeds", [range(40), slow(range(40, 640))])
def test_the_timeline_equals_the_slow_simulation(seeds: range) -> None:
    for seed in seeds:
        times, link = random_case(seed, most=8)
        plan = random_plan(seed, len(times))
        assert timeline(times, link, plan).step_seconds == step_seconds(times, link, plan), seed


def check_streams(times: LayerTimes, plan: Plan, found: Timeline) -> None:
    """Streams do one thing at a time, everything happens once, and causes precede effects."""
    for stream in ("compute", "link"):
        own = [event for event in found.events if event.stream == stream]
        for before, after in itertools.pairwise(own):
            assert before.start <= before.end <= after.start
    order = ("backward", "encode", "send", "decode", "forward")
    for layer in range(len(times)):
        own = [event for event in found.events if layer in event.layers]
        by_kind = {kind: [event for event in own if event.kind == kind] for kind in order}
        assert by_kind["send"]
        there = [events for events in by_kind.values() if events]
        for before, after in itertools.pairwise(there):
            assert max(e.end for e in before) <= min(e.start for e in after)
    sent = [event for event in found.events if event.kind == "send"]
    assert len(sent) == plan.messages
    work = sum(sum(getattr(times, k)) for k in ("backward", "encode", "decode", "forward"))
    assert found.compute_seconds == pytest.approx(work)
    assert found.link_seconds == pytest.approx(sum(e.end - e.start for e in sent))
    assert found.step_seconds >= max(work, max(event.end for event in found.events)) - 1e-9


def test_events_of_all_plans() -> None:
    free = AlphaBeta(latency=0.0, bytes_per_second=math.inf)
    for seed in range(40):
        times, link = random_case(seed)
        seconds = {}
        for name, plan in plans(times, link).items():
            found = timeline(times, link, plan)
            check_streams(times, plan, found)
            seconds[name] = found.step_seconds
            hidden = timeline(times, free, plan)
            assert hidden.step_seconds == hidden.compute_seconds, name
            assert hidden.exposed_seconds == 0.0 and hidden.overlap == 1.0, name
        plan = random_plan(seed, len(times))
        check_streams(times, plan, timeline(times, link, plan))
        assert seconds["merged"] <= min(seconds[n] for n in ("at end", "wait-free", "buckets"))
        assert seconds["wait-free"] <= seconds["at end, by layer"]


def test_one_layer_takes_the_sum_of_its_parts() -> None:
    times = LayerTimes(sizes=[8], backward=[5], encode=[1], decode=[2], forward=[3])
    link = AlphaBeta(latency=4, bytes_per_second=2)
    for name, plan in plans(times, link).items():
        sent = link.latency + plan.sizes[0] / 2 if name == "sparsified" else 8.0
        found = timeline(times, link, plan)
        # Parts of the only layer would only add latencies.
        assert plan.messages == 1 and found.step_seconds == pytest.approx(11 + sent)
        assert found.exposed_seconds == pytest.approx(sent) and found.overlap == pytest.approx(0)


def test_names_of_events() -> None:
    times = LayerTimes([4, 4], [1, 1], names=["head", "body"])
    link = AlphaBeta(0, 1)
    names = {e.name for e in timeline(times, link, at_end_plan(times)).events}
    assert names == {"head", "body", "head-body"}
    parts = timeline(times, link, priority_plan(times, link, part_bytes=2)).events
    sent = [e.name for e in parts if e.kind == "send"]
    assert sent == ["head 1/2", "body 1/2", "body 2/2", "head 2/2"]
