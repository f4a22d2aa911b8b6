"""What each process of a group runs for `test_torch_worker`; it writes what it has computed."""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from experiments.lab import torch_worker
from experiments.lab.peers import AS_SHIPPED


def main(folder: Path) -> None:
    worker = torch_worker.TorchWorker("mlp", seed=1)
    written: dict[str, Any] = {"workers": worker.workers}
    for method in AS_SHIPPED:
        prepared = worker.prepare(method, 0.5)
        weights = {
            name: parameter.detach().numpy()
            for name, parameter in worker._prepared[method].network.named_parameters()
        }
        joined = b"".join(array.tobytes() for array in weights.values())
        written[method] = {"weights": hashlib.sha256(joined).hexdigest(), "prepared": prepared}
        if method == "ddp" and worker.rank == 0:
            np.savez(folder / "ddp.npz", **weights)
    worker.close()
    (folder / f"{worker.rank}.json").write_text(json.dumps(written))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
