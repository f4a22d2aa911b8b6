"""Which cluster a process belongs to, as it is told or as JAX detects it."""

import os

import pytest

from jaxcomm.launch import LaunchError
from jaxcomm.launch._address import Address
from jaxcomm.launch._cluster import bind_address, find_cluster
from jaxcomm.launch._environment import heartbeat_seconds, start_seconds

TOLD = {
    "JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234",
    "JAX_NUM_PROCESSES": "4",
    "JAX_PROCESS_ID": "3",
}

SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_NODELIST": "node[007-010],other",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_NODES": "4",
}

OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}


@pytest.fixture(autouse=True)
def _nobody_has_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*TOLD, *SLURM, *OPEN_MPI, "KUBERNETES_SERVICE_HOST"]:
        monkeypatch.delenv(name, raising=False)
    for name in ("JAX_COORDINATOR_PORT", "JAX_LOCAL_DEVICE_IDS"):
        monkeypatch.delenv(name, raising=False)


def test_what_the_environment_says() -> None:
    assert find_cluster(TOLD, 1.0) == (Address("10.0.0.1", 1234), 4, 3, None)
    devices = {"JAX_LOCAL_DEVICE_IDS": "6,7"}
    assert find_cluster({**TOLD, **devices}, 1.0).local_devices == [6, 7]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"JAX_LOCAL_DEVICE_IDS": "0,a"}, "must be comma-separated numbers, got '0,a'"),
        ({"JAX_PROCESS_ID": "4"}, "numbered from 0 to 3: there is no process 4"),
        (
            {"JAX_LOCAL_DEVICE_IDS": "7" * 5000},
            "must be comma-separated numbers, got '7{40}'... of 5000",
        ),
        ({"JAX_NUM_PROCESSES": "four"}, "must be an integer from 1 to 65536, got 'four'"),
        ({"JAX_NUM_PROCESSES": "0"}, "must be an integer from 1 to 65536, got '0'"),
        ({"JAX_NUM_PROCESSES": "99999999999"}, "from 1 to 65536, got '99999999999'"),
        (
            {"JAX_NUM_PROCESSES": "9" * 5000},
            r"from 1 to 65536, got '9{40}'\.\.\. of 5000 characters",
        ),
        ({"JAX_PROCESS_ID": "-1"}, "JAX_PROCESS_ID must be an integer from 0 to 65536, got '-1'"),
        ({"JAX_COORDINATOR_ADDRESS": "10.0.0.1"}, "write HOST:PORT"),
        ({"JAX_COORDINATOR_ADDRESS": "a..b:1234"}, "'a..b:1234' is not a coordinator address"),
        ({"JAX_NUM_PROCESSES": None}, "needs JAX_NUM_PROCESSES in the environment"),
        (
            {"JAX_COORDINATOR_ADDRESS": None, "JAX_PROCESS_ID": None},
            "needs JAX_COORDINATOR_ADDRESS and JAX_PROCESS_ID in",
        ),
    ],
)
def test_what_is_told_wrong(change: dict[str, str | None], message: str) -> None:
    told = {name: value for name, value in {**TOLD, **change}.items() if value is not None}
    with pytest.raises(LaunchError, match=message):
        find_cluster(told, 1.0)


def test_slurm_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    # The port is JAX's choice by the number of the job, from 2**16 - 2**12 upwards.
    assert find_cluster(os.environ, 1.0) == (Address("node007", 61440 + 1), 8, 5, [1])
    monkeypatch.setenv("JAX_COORDINATOR_PORT", "1234")
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "0,1,2,3")  # One process a node.
    assert find_cluster(os.environ, 1.0) == (Address("node007", 1234), 8, 5, [0, 1, 2, 3])


def test_open_mpi_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OPEN_MPI.items():
        monkeypatch.setenv(name, value)
    found = find_cluster(os.environ, 1.0)
    assert found[1:] == (2, 1, [0]) and found.coordinator.host == "10.96.0.1"


def test_no_cluster_is_an_error_that_says_what_to_set() -> None:
    with pytest.raises(
        LaunchError, match=r"there is no cluster to join: .* JAX_COORDINATOR_ADDRESS"
    ):
        find_cluster(os.environ, 1.0)


@pytest.mark.parametrize(
    ("coordinator", "told", "expected"),
    [
        ("127.0.0.1", None, "127.0.0.1"),
        ("localhost", None, "localhost"),
        ("::1", None, "::1"),
        ("10.0.0.1", "10.0.0.2:7", "10.0.0.2"),
    ],
)
def test_loopback_stays_on_loopback(coordinator: str, told: str | None, expected: str) -> None:
    environment = {"JAX_COORDINATOR_BIND_ADDRESS": told} if told else {}
    assert bind_address(environment, Address(coordinator, 7)) == Address(expected, 7)


def test_a_cluster_elsewhere_listens_on_all_interfaces() -> None:
    assert bind_address({}, Address("10.0.0.1", 7)).host in ("::", "0.0.0.0")


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1e10", "soon", "9" * 5000])
def test_seconds_are_of_a_week_at_most(text: str) -> None:
    with pytest.raises(
        LaunchError, match="JAXCOMM_START_TIMEOUT must be a number of seconds above 0"
    ) as told:
        start_seconds({"JAXCOMM_START_TIMEOUT": text}, None)
    assert len(str(told.value)) < 200
    assert start_seconds({}, None) == 300
    assert start_seconds({"JAXCOMM_START_TIMEOUT": "7"}, None) == 7
    assert start_seconds({"JAXCOMM_START_TIMEOUT": "7"}, 2.5) == 2.5
    with pytest.raises(
        LaunchError, match="`timeout` must be a number of seconds above 0 and at most 604800"
    ):
        start_seconds({}, 1e10)


def test_the_heartbeat_timeout_is_of_whole_seconds() -> None:
    assert heartbeat_seconds({}, None) == 100
    assert heartbeat_seconds({"JAXCOMM_HEARTBEAT_TIMEOUT": "7"}, None) == 7
    assert heartbeat_seconds({"JAXCOMM_HEARTBEAT_TIMEOUT": "7"}, 3) == 3
    with pytest.raises(LaunchError, match="JAXCOMM_HEARTBEAT_TIMEOUT must be an integer of sec"):
        heartbeat_seconds({"JAXCOMM_HEARTBEAT_TIMEOUT": "0.5"}, None)
    with pytest.raises(LaunchError, match="`heartbeat_timeout` must be an integer of seconds"):
        heartbeat_seconds({}, 0)
