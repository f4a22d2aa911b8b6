"""Ratios per layer that hide their messages behind computation."""

import math

import numpy as np
import pytest

from jaxcomm.scheduling import (
    AlphaBeta,
    LayerTimes,
    merge_plan,
    sparsified_plan,
    timeline,
    wait_free_plan,
)
from tests.scheduling.cases import random_case


def test_by_hand() -> None:
    # Windows of 5, 3, 20 and 0 seconds, of which the latency takes 1; two bytes a second.
    times = LayerTimes(sizes=[100, 100, 10, 100], backward=[7, 5, 3, 20])
    plan = sparsified_plan(times, AlphaBeta(1.0, 2.0), max_compression=50, expansion=2, merge=False)
    assert plan.sizes == (8.0, 4.0, 10.0, 4.0) and plan.ratios == (0.04, 0.02, 1.0, 0.02)


def test_a_busy_link_shortens_a_window() -> None:
    # The first layer needs 5 s even at the largest compression, and then 3 of 8 s are left.
    times = LayerTimes(sizes=[200, 100, 100], backward=[1, 2, 8])
    plan = sparsified_plan(
        times, AlphaBeta(1.0, 1.0), max_compression=100, expansion=2, merge=False
    )
    assert plan.sizes == (4.0, 4.0, 2.0)
    busy = timeline(times, AlphaBeta(1.0, 1.0), plan)
    assert [event.end for event in busy.events if event.kind == "send"] == [6.0, 11.0, 14.0]


def test_ratios_are_bounded_and_layers_overlap() -> None:
    for seed in range(60):
        times, link = random_case(seed)
        for merge in (False, True):
            plan = sparsified_plan(times, link, max_compression=20, expansion=2, merge=merge)
            for ratio, size, dense in zip(plan.ratios, plan.sizes, times.sizes, strict=True):
                assert 1 / 20 * (1 - 1e-12) <= ratio <= 0.5 or ratio == 1.0
                assert size == pytest.approx(dense if ratio == 1.0 else 2 * ratio * dense)
        plan = sparsified_plan(times, link, max_compression=20, merge=False)
        sent = [event for event in timeline(times, link, plan).events if event.kind == "send"]
        ready = np.cumsum(np.add(times.backward, times.encode))
        for event, ratio, next_ready in zip(sent, plan.ratios, ready[1:], strict=False):
            assert ratio <= 1 / 20 * (1 + 1e-9) or event.end <= next_ready + 1e-9, seed


def test_fewer_bytes_and_merging_are_never_slower() -> None:
    for seed in range(60):
        times, link = random_case(seed)
        seconds = {
            (most, merge): timeline(
                times, link, sparsified_plan(times, link, max_compression=most, merge=merge)
            ).step_seconds
            for most in (5, 50, 500)
            for merge in (False, True)
        }
        merged, by_layer = (
            timeline(times, link, plan).step_seconds + 1e-9
            for plan in (merge_plan(times, link), wait_free_plan(times))
        )
        assert seconds[5, True] <= merged and seconds[5, False] <= by_layer
        for few, many in ((50, 5), (500, 50)):
            assert seconds[few, False] <= seconds[many, False] + 1e-9
            assert seconds[few, True] <= seconds[few, False] + 1e-9


def test_without_compression_or_on_a_free_link_all_is_sent() -> None:
    times, link = random_case(3)
    for plan in (
        sparsified_plan(times, link, max_compression=1),
        sparsified_plan(times, link, max_compression=2, expansion=2),
        sparsified_plan(times, AlphaBeta(0.0, math.inf)),
    ):
        assert plan.ratios == (1.0,) * len(times) and plan.sizes == times.sizes
