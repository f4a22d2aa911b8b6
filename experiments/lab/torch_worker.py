"""One process of PyTorch's `DistributedDataParallel` (DDP) on Gloo, on one thread of a CPU."""

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from experiments.cli.errors import ExperimentError
from experiments.lab import curves, inputs
from experiments.lab.peers import METHODS, Peer
from experiments.lab.serve import bytes_sent
from experiments.lab.torch_models import Network, held_out_loss

import torch  # isort: skip  # After the check of its version, in torch_models.
from torch import Tensor, distributed  # isort: skip
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook  # isort: skip
from torch.nn.parallel import DistributedDataParallel  # isort: skip

START = 2  # The least `start_powerSGD_iter` under error feedback: DDP rebuilds its buckets first.
WARM_UP = START + 2
ONE_BUCKET = 1000  # MB. With the default buckets, `powerSGD_hook` aborts on Gloo.

ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "momentum": lambda params, lr: torch.optim.SGD(params, lr, momentum=0.9),
    "adam": torch.optim.Adam,  # Its defaults are those of `optax.adam`.
}


class TorchWorker:
    """Steps and training of one worker. All workers make the same calls in the same order.

    The environment has `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`. Gloo sends through
    the interface in `GLOO_SOCKET_IFNAME`. A second worker of the same process needs another
    `MASTER_PORT`: with the same port its group may hang.

    Args:
      model: `mlp` or `transformer`.
      seed: The seed of weights and batches of `prepare` and `measure`.
      data: A plain-text file for the transformer. Default: see `read_text`.

    Raises:
      ExperimentError: If there is no such model, a variable of the environment is missing, or the
        workers cannot connect.
    """

    def __init__(self, model: str, seed: int, data: Path | None = None) -> None:
        self._model, self._seed = model, seed
        self._inputs = inputs.load(model, data)
        self._prepared: dict[str, _Replica] = {}
        if missing := [name for name in ENVIRONMENT if name not in os.environ]:
            raise ExperimentError(f"A PyTorch worker needs {', '.join(missing)} to be set.")
        torch.set_num_threads(1)
        try:
            distributed.init_process_group("gloo")
        except distributed.DistNetworkError as error:
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            reason = str(error).splitlines()[0]
            raise ExperimentError(
                f"A PyTorch worker cannot connect at {where}: {reason}"
            ) from error
        self.rank, self.workers = distributed.get_rank(), distributed.get_world_size()

    def prepare(self, method: str, learning_rate: float, optimizer: str = "sgd") -> dict[str, Any]:
        """Builds a replica and runs `WARM_UP` steps; `measure` continues from there.

        A prepared method keeps its weights and DDP's bucket, and under PowerSGD the residual and
        the factors. Gradients are freed after each step.

        Returns:
          The `losses` of the steps.
        """
        replica = self._replica(method, learning_rate, optimizer, self._seed)
        self._prepared[method] = replica
        return {"losses": [replica.step(self._batch(replica, self._seed)) for _ in range(WARM_UP)]}

    def measure(self, method: str, warm_up: int, steps: int) -> dict[str, Any]:
        """Measures steps of a prepared method, after `warm_up` steps that are not measured.

        Those bring the memory of the method into the caches, after other methods have run.

        Returns:
          `milliseconds` and `losses` per step, and `sent`: the bytes that the interface eth0 sent
          during all measured steps, or None if there is no such interface.
        """
        if method not in self._prepared:
            raise ValueError(f"The method {method!r} must be prepared before it is measured.")
        replica = self._prepared[method]
        for _ in range(warm_up):
            replica.step(self._batch(replica, self._seed))
        batches = [self._batch(replica, self._seed, ahead) for ahead in range(steps)]
        milliseconds, losses = [], []
        distributed.barrier()
        before = bytes_sent()
        for batch in batches:
            began = time.perf_counter()
            losses.append(replica.step(batch))
            milliseconds.append(1e3 * (time.perf_counter() - began))
        distributed.barrier()
        after = bytes_sent()
        sent = None if before is None or after is None else after - before
        return {"milliseconds": milliseconds, "sent": sent, "losses": losses}

    def train(
        self,
        method: str,
        learning_rate: float,
        steps: int,
        seed: int,
        evaluate_every: int,
        optimizer: str = "sgd",
        split: str = "held_out",
    ) -> dict[str, Any]:
        """Trains a replica from the first weights of `seed`; see `curves.train`.

        The evaluated loss is that of the rows `split`: `held_out` or `validation`.
        """
        replica = self._replica(method, learning_rate, optimizer, seed)
        rows = getattr(self._inputs, split)
        return curves.train(
            lambda number: replica.step(self._batch(replica, seed)),
            lambda: self._evaluate(replica, rows),
            steps,
            evaluate_every,
        )

    def close(self) -> None:
        """Frees the prepared methods and leaves the group."""
        self._prepared.clear()
        distributed.destroy_process_group()

    def _replica(self, method: str, learning_rate: float, optimizer: str, seed: int) -> "_Replica":
        for name, value, known in (
            ("method", method, METHODS),
            ("optimizer", optimizer, OPTIMIZERS),
        ):
            if value not in known:
                raise ExperimentError(f"{name} must be one of {', '.join(known)}, got {value!r}.")
        network = Network(self._model, self._inputs.first_weights(seed))
        return _Replica(METHODS[method], network, learning_rate, optimizer)

    def _batch(self, replica: "_Replica", seed: int, ahead: int = 0) -> Tensor:
        return torch.from_numpy(self._inputs.batch(seed, self.rank, replica.steps + ahead))

    def _evaluate(self, replica: "_Replica", rows: np.ndarray) -> float:
        """The loss on rows. Each worker computes it on its share of them.

        The sum over workers makes all of them wait, so no step begins during an evaluation.
        """
        own = rows[self.rank :: self.workers]
        total = torch.tensor(held_out_loss(replica.network, own) * len(own), dtype=torch.float64)
        distributed.all_reduce(total)
        return total.item() / len(rows)


class _Replica:
    """A network under DDP, with its optimizer and the number of its steps."""

    def __init__(self, peer: Peer, network: Network, learning_rate: float, optimizer: str) -> None:
        self.network, self.steps = network, 0
        bucket = ONE_BUCKET if peer.is_one_bucket or peer.rank is not None else None
        # Without init_sync, which sends the weights: they are the same on all workers.
        self._ddp = DistributedDataParallel(network, bucket_cap_mb=bucket, init_sync=False)
        if peer.is_fp16:
            self._ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        if peer.rank is not None:
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=peer.rank, start_powerSGD_iter=START
            )
            self._ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        self._context = contextlib.nullcontext if peer.communicates else self._ddp.no_sync
        self._optimizer = OPTIMIZERS[optimizer](network.parameters(), lr=learning_rate)

    def step(self, batch: Tensor) -> float:
        """One step of the optimizer. Returns this worker's loss before it."""
        with self._context():
            loss = self._ddp(batch)
            loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.steps += 1
        return loss.item()
