"""Groups of two and four processes of PyTorch DDP on this machine."""

import hashlib
import itertools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from experiments.errors import ExperimentError
from experiments.lab import inputs
from experiments.lab.peers import AS_SHIPPED, require_torch

try:
    require_torch()
except ExperimentError as error:
    pytest.skip(f"no PyTorch: {error}", allow_module_level=True)

import torch

from experiments.lab import torch_worker

ROOT = Path(__file__).parents[3]
RATE = 5.0


def main(file: Path) -> None:
    """What each process of a group runs: it writes what it has computed."""
    worker, written = torch_worker.Worker("mlp"), {}
    for method in AS_SHIPPED:
        losses = worker.prepare(method, RATE)["losses"]
        weights = [x.detach().numpy() for x in worker.prepared[method].network.parameters()]
        written[method] = losses, hashlib.sha256(b"".join(map(bytes, weights))).hexdigest()
    worker.prepared.clear()
    torch.distributed.destroy_process_group()
    file.write_text(json.dumps(written))


@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ddp_is_one_process_with_the_whole_batch(workers: int, tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path[1:]),
        "GLOO_SOCKET_IFNAME": "lo",
        "WORLD_SIZE": str(workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    files = [tmp_path / f"{rank}.json" for rank in range(workers)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.experiments.lab.test_torch_worker", str(file)],
            env={**environment, "RANK": str(rank)},
            cwd=ROOT,
            stderr=subprocess.PIPE,
        )
        for rank, file in enumerate(files)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert not any(process.returncode for process in processes), errors
    written = [json.loads(file.read_text()) for file in files]
    weights = [{each[method][1] for each in written} for method in AS_SHIPPED]
    assert all(len(replicas) == 1 for replicas in weights)  # of all workers
    assert len(set.union(*weights)) == len(AS_SHIPPED)  # Hooks differ.
    read = inputs.load("mlp")
    network = torch_worker.Network("mlp", read.first_weights(0))
    optimizer = torch.optim.SGD(network.parameters(), lr=RATE)
    for step, *losses in zip(itertools.count(), *(each["ddp"][0] for each in written)):
        rows = [read.batch(0, worker, step) for worker in range(workers)]
        loss = network(torch.from_numpy(np.concatenate(rows)))
        np.testing.assert_allclose(np.mean(losses), loss.item(), rtol=1e-5)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert step == torch_worker.WARM_UP - 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))
