"""The cluster that the environment defines, and mistakes in it."""

import os
import socket

import jax
import pytest

from jaxcomm.launch import LaunchError, initialize
from jaxcomm.launch._join import _cluster_settings

CLUSTER = {
    "JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234",
    "JAX_NUM_PROCESSES": "4",
    "JAX_PROCESS_ID": "3",
}
SOURCES = ("SLURM_JOB_ID", "OMPI_MCA_orte_hnp_uri", "KUBERNETES_SERVICE_HOST")


@pytest.fixture
def preemption_service() -> None:
    before = jax.config.jax_enable_preemption_service
    yield
    jax.config.update("jax_enable_preemption_service", before)


def test_a_coordinator_on_loopback_binds_to_loopback() -> None:
    for address, bound, expected in [
        ("10.0.0.1:7", {}, "[::]:7"),
        ("10.0.0.1:7", {"JAX_COORDINATOR_BIND_ADDRESS": "10.0.0.2:7"}, "10.0.0.2:7"),
        ("localhost:7", {}, "localhost:7"),
        ("[::1]:7", {}, "[::1]:7"),
    ]:
        assert _cluster_settings({**CLUSTER, "JAX_COORDINATOR_ADDRESS": address, **bound}) == {
            "coordinator_address": address,
            "num_processes": 4,
            "process_id": 3,
            "cluster_detection_method": "deactivate",
            "coordinator_bind_address": expected,
        }


@pytest.mark.usefixtures("preemption_service")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"JAX_NUM_PROCESSES": "four"}, "JAX_NUM_PROCESSES must be an integer, got 'four'"),
        ({"JAX_COORDINATOR_ADDRESS": "10.0.0.1"}, "must be HOST:PORT, got '10.0.0.1'"),
        ({"JAX_NUM_PROCESSES": None}, "needs JAX_NUM_PROCESSES in the environment"),
        ({"JAX_PROCESS_ID": "4"}, "process 4 of 4 cannot join the others: process_id and num_pr"),
        (dict.fromkeys(CLUSTER), "there is no cluster to join: .* or set JAX_COORDINATOR_ADDRESS"),
    ],
)
def test_wrong_cluster_settings(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, str | None], message: str
) -> None:
    monkeypatch.setattr("jax._src.xla_bridge.backends_are_initialized", lambda: False)
    for name in SOURCES:
        monkeypatch.delenv(name, raising=False)
    for name, value in {**CLUSTER, **change}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match=message) as error:
        initialize(5.0)
    assert "\n" not in str(error.value)


def test_a_port_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        settings = {"JAX_COORDINATOR_ADDRESS": address, "JAX_PROCESS_ID": "0"}
        for name, value in {**CLUSTER, **settings}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(LaunchError, match=f"cannot listen at {address}: the port is in use"):
            initialize(5.0)
    assert "JAX_COORDINATOR_BIND_ADDRESS" not in os.environ
