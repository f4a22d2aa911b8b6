"""Four processes of which one is slowed: what stale and lazy updates save, and what they do not."""

import json

import pytest

from tests.processes.late_program import LATE, SIZE
from tests.processes.running import run

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]

WORKERS = 4
Found = dict[str, dict[str, dict[str, float]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """By process: who was slowed, the method, and its seconds and bytes per step."""
    folder = tmp_path_factory.mktemp("late")
    command = ["-m", "jaxcomm.launch", "--processes", WORKERS, "--"]
    code, stdout, stderr = run(*command, "-m", "tests.processes.late_program", folder)
    assert code == 0, stdout[-2000:] + stderr[-4000:]
    everything = [json.loads((folder / f"{i}.json").read_text()) for i in range(WORKERS)]
    return everything


@pytest.mark.parametrize("method", ["mean", "delayed", "backup", "lazy"])
@pytest.mark.parametrize("slowed", ["the last", "each in turn"])
def test_no_method_saves_the_wait_for_a_slow_process(
    found: list[Found], slowed: str, method: str
) -> None:
    """Each step takes as long as its slowest worker, also for the workers that are not slow.

    A claim that fails on CPUs: two late steps could overlap with `delayed`, if a collective waited
    beside the computation; and with `backup`, if the last worker could be left behind.
    """
    for process in found:
        assert process[slowed][method]["seconds"] >= 0.95 * LATE
        assert process["none"][method]["seconds"] < LATE


def test_bytes_fall_where_all_skip_and_only_there(found: list[Found]) -> None:
    """As the kernel counts them on the sockets of each process."""
    for process in found:
        sent = {name: run["bytes"] for name, run in process["none"].items()}
        payload = 2 * 3 / 4 * 4 * SIZE
        for name in ("mean", "delayed", "backup"):
            assert sent[name] == pytest.approx(payload, rel=0.08)
        assert sent["lazy"] < 0.02 * payload
