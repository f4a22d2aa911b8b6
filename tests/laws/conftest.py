"""When a law runs: `make test` takes what is written here, `make test-all` everything."""

import pathlib

import pytest

# The laws of types, of the wire, and of the mean and one worker's NaN: for every method.
EVERY = {"test_update_types", "test_types", "test_bytes", "test_every_worker"}

# The others: a method of each kind of exchange and of memory, with its first parameters.
KINDS = {
    *("mean", "votes", "global_qsgd", "global_qsgd_exponential", "two_stage_8_bits"),
    *("sharded_server", "top_k_sgd", "diana"),
    *("dpsgd", "matcha", "choco_sgd", "choco_sgd_over_matcha", "overlap_sgp"),
    *("diloco", "pr_sgd", "streaming_diloco"),
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what is `slow` among laws with a parameter `case`."""
    here, seen = pathlib.Path(__file__).parent, set()
    for item in items:
        case = item.callspec.params.get("case") if hasattr(item, "callspec") else None
        if item.path.parent != here or case is None:
            continue
        law, name = item.originalname, case.name
        if (item.path, law, name) in seen or not (law in EVERY or name in KINDS):
            item.add_marker(pytest.mark.slow)
        seen.add((item.path, law, name))
