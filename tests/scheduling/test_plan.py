"""Plans that need no link: per layer, at the end, in buckets; and mistakes of all."""

import math
from typing import Any

import pytest

from jaxcomm.scheduling import (
    AlphaBeta,
    LayerTimes,
    at_end_plan,
    bucket_plan,
    timeline,
    wait_free_plan,
)
from tests.scheduling.cases import random_case


def test_groups() -> None:
    times = LayerTimes(sizes=[3, 1, 2], backward=[1, 1, 1])
    assert wait_free_plan(times).groups == ((0,), (1,), (2,)) and wait_free_plan(times).overlap
    assert at_end_plan(times).groups == ((0, 1, 2),) and not at_end_plan(times).overlap
    plan = at_end_plan(times)
    assert plan.messages == 1 and plan.message_bytes(0) == 6.0 and plan.ratios == (1.0, 1.0, 1.0)


def test_buckets_are_closed_once_full() -> None:
    for seed in range(50):
        times, _ = random_case(seed)
        plan = bucket_plan(times, bucket_bytes=30)
        assert [layer for group in plan.groups for layer in group] == [*range(len(times))]
        sizes = [plan.message_bytes(number) for number in range(len(plan.groups))]
        # All but the last are full, and without their last layer none is.
        assert all(size >= 30 for size in sizes[:-1])
        assert all(
            size - times.sizes[group[-1]] < 30
            for size, group in zip(sizes, plan.groups, strict=True)
        )


def test_the_default_bucket_is_that_of_ddp() -> None:
    times = LayerTimes(sizes=[25 * 2**20, 1, 25 * 2**20], backward=[1, 1, 1])
    assert bucket_plan(times).groups == ((0,), (1, 2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda times, link: LayerTimes([1, -1], [1, 1]), "`sizes` must have a finite number per"),
        (lambda times, link: LayerTimes([1], [1], decode=[1, 2]), "`decode` must have"),
        (lambda times, link: AlphaBeta(0, math.nan), "`bytes_per_second` must be a finite number"),
        *(
            (
                lambda times, link, groups=groups: timeline(
                    times, link, wait_free_plan(times)._replace(groups=groups)
                ),
                r"`plan\.groups` must have each of 1 layers exactly once",
            )
            for groups in ((), ((0,), (0,)), ((0,), ()))
        ),
    ],
)
def test_mistakes(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(LayerTimes([1], [1]), AlphaBeta(0, 1))
