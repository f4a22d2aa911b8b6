"""MG-WFBP: the dynamic program and the greedy rule against all partitions."""

import dataclasses
import itertools
from typing import Any

import pytest

from jaxcomm.scheduling import (
    AlphaBeta,
    LayerTimes,
    Plan,
    at_end_plan,
    merge_plan,
    timeline,
    wait_free_plan,
)
from tests.scheduling.cases import partitions, random_case, seconds_of
from tests.slow import slow

# Seeds of the cases, and the most layers of a case, which has a partition per set of cuts.
RUNS = [(range(60), 7), slow(range(60, 360), 12)]


def _seconds(times: LayerTimes, link: AlphaBeta, plan: Plan) -> float:
    return seconds_of(times, link, plan.groups)


@pytest.mark.parametrize(("seeds", "most"), RUNS)
def test_the_dynamic_program_is_the_best_partition(seeds: range, most: int) -> None:
    for seed, codec in itertools.product(seeds, (False, True)):
        times, link = random_case(seed, most=most, codec=codec)
        best = min(seconds_of(times, link, groups) for groups in partitions(len(times)))
        found = _seconds(times, link, merge_plan(times, link))
        assert found == best, (seed, found, best)  # Equal: all times are multiples of 1/8 s.


@pytest.mark.parametrize(("seeds", "most"), RUNS)
def test_the_greedy_rule_against_the_best_partition(seeds: range, most: int) -> None:
    worse = 0
    for seed in seeds:
        times, link = random_case(seed, most=most, codec=False)
        best = _seconds(times, link, merge_plan(times, link))
        greedy = _seconds(times, link, merge_plan(times, link, method="greedy"))
        assert greedy <= _seconds(times, link, wait_free_plan(times)), seed
        assert greedy <= _seconds(times, link, at_end_plan(times)), seed
        assert best <= greedy <= 1.35 * best
        worse += greedy > best
    assert worse  # The rule is not optimal.


def test_the_greedy_rule_by_hand() -> None:
    # Of three equal layers, the second is ready while the first is sent: less than a latency later
    # than the first could begin, so that the two merge; the third is ready much later.
    link = AlphaBeta(latency=2.0, bytes_per_second=1.0)
    times = LayerTimes(sizes=[4, 4, 4], backward=[3, 1, 20])
    assert merge_plan(times, link, method="greedy").groups == ((0, 1), (2,))
    # A latency later than the first could begin, it is no longer worth waiting.
    times = LayerTimes(sizes=[4, 4, 4], backward=[3, 2, 20])
    assert merge_plan(times, link, method="greedy").groups == ((0,), (1,), (2,))


@pytest.mark.parametrize("method", ["optimal", "greedy"])
def test_a_plan_is_a_partition_in_order_and_the_timeline_agrees(method: Any) -> None:
    for seed in range(100):
        times, link = random_case(seed)
        plan = merge_plan(times, link, method=method)
        assert [layer for group in plan.groups for layer in group] == [*range(len(times))]
        sent = sum(plan.message_bytes(group) for group in range(len(plan.groups)))
        assert sent == sum(times.sizes) and plan.messages == len(plan.groups)
        step = timeline(times, link, plan).step_seconds
        assert step == _seconds(times, link, plan) + sum(times.forward), seed
        assert _seconds(times, link, plan) <= _seconds(times, link, at_end_plan(times)), seed
        slow_link = dataclasses.replace(link, latency=1e6)
        assert merge_plan(times, slow_link, method=method).messages == 1, seed
        # Without latency, merging gains nothing.
        times, link = random_case(seed, codec=method == "optimal")
        link = dataclasses.replace(link, latency=0.0)
        found = _seconds(times, link, merge_plan(times, link, method=method))
        assert found == _seconds(times, link, wait_free_plan(times)), seed


def test_ties_prefer_plans_that_send_early() -> None:
    # All plans of these layers end one message after the last layer is ready; the first two layers
    # could wait for each other at no cost.
    times, link = LayerTimes(sizes=[1, 1, 1], backward=[50, 50, 50]), AlphaBeta(1.0, 1.0)
    assert seconds_of(times, link, ((0, 1), (2,))) == seconds_of(times, link, ((0,), (1,), (2,)))
    assert merge_plan(times, link).groups == ((0,), (1,), (2,))


def test_the_unit_of_time_does_not_matter() -> None:
    times, link = random_case(5)
    fields = ("backward", "encode", "decode", "forward")
    fast = dataclasses.replace(times, **{f: [x * 1e-3 for x in getattr(times, f)] for f in fields})
    faster = AlphaBeta(link.latency * 1e-3, link.bytes_per_second * 1e3)
    assert merge_plan(fast, faster).groups == merge_plan(times, link).groups
