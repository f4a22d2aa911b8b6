"""Groups of two and four processes of PyTorch DDP on this machine."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.cli.errors import ExperimentError
from experiments.lab import inputs
from experiments.lab.peers import AS_SHIPPED, require_torch

try:
    require_torch()
except ExperimentError as error:
    pytest.skip(f"no PyTorch: {error}", allow_module_level=True)

import torch

from experiments.lab import torch_worker
from experiments.lab.torch_models import Network

ROOT = Path(__file__).parents[3]
SYNCHRONIZED = [name for name, peer in AS_SHIPPED.items() if peer.communicates]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def group(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Any]]:
    """The folder of a group that has ended, and what each process wrote."""
    folder = tmp_path_factory.mktemp("group")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "GLOO_SOCKET_IFNAME": "lo",
        "WORLD_SIZE": str(request.param),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    program = ["-m", "tests.experiments.lab.torch_program", str(folder)]
    processes = [
        subprocess.Popen(
            [sys.executable, *program],
            env={**environment, "RANK": str(rank)},
            cwd=ROOT,
            stderr=subprocess.PIPE,
        )
        for rank in range(request.param)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert not any(process.returncode for process in processes), errors
    return folder, [
        json.loads((folder / f"{rank}.json").read_text()) for rank in range(len(errors))
    ]


def test_replicas_are_equal_after_steps_and_hooks_differ(group: tuple[Path, list[Any]]) -> None:
    _, written = group
    for method in AS_SHIPPED:
        replicas = {each[method]["weights"] for each in written}
        assert len(replicas) == (1 if method in SYNCHRONIZED else len(written)), method
    assert len({written[0][method]["weights"] for method in AS_SHIPPED}) == len(AS_SHIPPED)


def test_plain_ddp_is_one_process_with_the_whole_batch(group: tuple[Path, list[Any]]) -> None:
    folder, written = group
    read = inputs.load("mlp")
    network = Network("mlp", read.first_weights(1))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
    for step in range(torch_worker.WARM_UP):
        rows = [read.batch(1, worker, step) for worker in range(len(written))]
        loss = network(torch.from_numpy(np.concatenate(rows)))
        loss.backward()
        own = [each["ddp"]["prepared"]["losses"][step] for each in written]
        np.testing.assert_allclose(np.mean(own), loss.item(), rtol=1e-5)
        optimizer.step()
        optimizer.zero_grad()
    first, distributed = read.first_weights(1), np.load(folder / "ddp.npz")
    for name, parameter in network.named_parameters():
        moved = parameter.detach().numpy() - first[name]
        largest = np.abs(moved).max()
        assert largest > 0
        np.testing.assert_allclose(
            distributed[name] - first[name], moved, rtol=1e-3, atol=1e-3 * largest, err_msg=name
        )
