"""The rounds of an all-to-all: everything arrives, and no two workers send to each other."""

import pytest

from jaxcomm import _collectives

WORKERS = (3, 4, 5, 6, 7, 8, 10, 16)


@pytest.mark.parametrize("workers", WORKERS)
def test_every_part_is_sent_once_to_each_worker(workers: int) -> None:
    """And no two send to each other in a round."""
    schedule = _collectives.rounds(workers)
    assert schedule is not None
    sent = [
        (worker, int(target), int(number))
        for targets, numbers in zip(schedule.targets, schedule.numbers, strict=True)
        for worker, (target, number) in enumerate(zip(targets, numbers, strict=True))
    ]
    others = [(i, j) for i in range(workers) for j in range(workers) if i != j]
    assert sorted(sent) == [(i, j, p) for i, j in others for p in range(schedule.parts)]
    for targets in schedule.targets:
        assert sorted(targets) == [*range(workers)]
        assert all(i not in (j, targets[j]) for i, j in enumerate(targets))


def test_two_workers_have_no_rounds() -> None:
    assert _collectives.rounds(2) is None and _collectives.rounds(1) is None
