"""What `make test` leaves out: the marker `slow`, set by hand, or here for tests of a method."""

import zlib
from collections.abc import Iterable
from typing import Any

import pytest

# The laws of types, of the wire, and of the mean and one worker's NaN: for every method.
EVERY = {"test_update_types", "test_types", "test_bytes", "test_every_worker"}

# The others: a method of each kind, with its first parameters. Exact, summed, in two stages,
# gathered with feedback; mixed, mixed with memory, pushed; around an optimizer, in it, in parts.
KINDS = {
    *("mean", "global_qsgd", "two_stage_8_bits", "top_k_sgd"),
    *("dpsgd", "choco_sgd", "overlap_sgp"),
    *("diloco", "pr_sgd", "streaming_diloco"),
    *("bulk_synchronous", "stale_synchronous_2", "easgd", "ad_psgd", "decoupled_diloco"),
    *("nonzero_doubling", "error_feedback_s2_sketch"),
}
TABLES = (
    "tests.cases",
    "tests.laws",
    "tests.synchronization.events",
    "jaxcomm.catalogue",
)  # Whose rows are of a method.


def slow(*values: Any) -> Any:
    """One more parameter, or several of one test, that `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)


def is_in(part: str, row: str) -> bool:
    """Whether a row is in a part of all rows, `"2/5"` for the second of five."""
    number, of = map(int, part.split("/"))
    return zlib.crc32(row.encode()) % of == number - 1


def mark(items: Iterable[pytest.Item]) -> None:
    """Marks what is slow of tests that have a method as a parameter."""
    seen = set()
    for item in items:
        values = item.callspec.params.values() if hasattr(item, "callspec") else ()
        names = [x.name for x in values if type(x).__module__.startswith(TABLES)]
        for name in names:
            test = item.path, item.originalname
            if (test, name) in seen or not (test[1] in EVERY or name in KINDS):
                item.add_marker(pytest.mark.slow)
            seen.add((test, name))
