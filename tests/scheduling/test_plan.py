"""Plans that need no link: per layer, at the end, in buckets; and mistakes of all."""

import math
from typing import Any

import pytest

from jaxcomm.scheduling import (
    AlphaBeta,
    LayerTimes,
    at_end_plan,
    bucket_plan,
    merge_plan,
    priority_plan,
    sparsified_plan,
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


def test_buckets_close_at_their_bytes() -> None:
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
        (
            lambda times, link: bucket_plan(times, bucket_bytes=0),
            "`bucket_bytes` must be a Python float above 0, got",
        ),
        (
            lambda times, link: priority_plan(times, link, part_bytes=math.nan),
            "`part_bytes` must be a Python float above 0",
        ),
        (
            lambda times, link: sparsified_plan(times, link, max_compression=0.5),
            "`max_compression` must be a Python float of at least 1, got",
        ),
        (
            lambda times, link: sparsified_plan(times, link, expansion=0),
            "`expansion` must be a Python float of at least 1, got",
        ),
        (lambda times, link: merge_plan(times, link, method="best"), "`method` must be one of"),
        (lambda times, link: LayerTimes([1, -1], [1, 1]), "`sizes` must have a finite number per"),
        (lambda times, link: LayerTimes([1], [math.inf]), "`backward` must have a finite number"),
        (lambda times, link: LayerTimes([1], [1], decode=[1, 2]), "`decode` must have"),
        (lambda times, link: AlphaBeta(-1e-3, 1e9), "`latency` must be a finite number of at"),
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
