"""One process of PyTorch's `DistributedDataParallel` (DDP) on Gloo, on one thread of a CPU.

The two models have the same losses over the same arrays as in `models`.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from experiments.lab import inputs, worker
from experiments.lab.inputs import BLOCKS, HEADS, LAYERS, WIDTH, Weights
from experiments.lab.peers import PEERS, START
from experiments.lab.worker import LEARNING_RATE, MOMENTUM

WARM_UP = START + 2
ONE_BUCKET = 1000  # MB. With the default buckets, `powerSGD_hook` aborts on Gloo.

Params = Mapping[str, Tensor]


def mlp_loss(params: Params, batch: Tensor) -> Tensor:
    """float32[rows, 1024] -> the mean squared error of the network against its input."""
    x = batch
    for layer in range(LAYERS):
        x = torch.tanh(torch.addmm(params[f"bias_{layer}"], x, params[f"weight_{layer}"]))
    return functional.mse_loss(x, batch)


def transformer_loss(params: Params, batch: Tensor) -> Tensor:
    """int32[rows, length + 1] -> the mean cross-entropy of each next byte, in nats."""
    tokens, labels = batch[:, :-1], batch[:, 1:].long()
    rows, length = tokens.shape
    x = functional.embedding(tokens, params["embedding"]) + params["positions"][:length]
    x = x.reshape(rows * length, WIDTH)
    for block in (f"block_{number}" for number in range(BLOCKS)):
        qkv = _dense(params, f"{block}_qkv", _norm(params, f"{block}_attention_norm", x))
        heads = qkv.view(rows, -1, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + _dense(params, f"{block}_mix", mixed.transpose(1, 2).reshape(x.shape))
        hidden = _dense(params, f"{block}_up", _norm(params, f"{block}_mlp_norm", x))
        x = x + _dense(params, f"{block}_down", functional.gelu(hidden, approximate="tanh"))
    logits = _norm(params, "final_norm", x) @ params["head"]
    return functional.cross_entropy(logits, labels.reshape(-1))


def _dense(params: Params, name: str, x: Tensor) -> Tensor:
    return torch.addmm(params[f"{name}_bias"], x, params[name])


def _norm(params: Params, name: str, x: Tensor) -> Tensor:
    scale, shift = params[f"{name}_scale"], params[f"{name}_shift"]
    return functional.layer_norm(x, (WIDTH,), scale, shift, eps=1e-5)


LOSSES = {"mlp": mlp_loss, "transformer": transformer_loss}

OPTIMIZERS = {  # The other defaults are those of optax.
    "sgd": lambda params, rate, momentum: torch.optim.SGD(params, rate),
    "adam": lambda params, rate, momentum: torch.optim.Adam(params, rate, (momentum, 0.999)),
}


class Network(nn.Module):
    """A model whose forward pass returns the loss of a batch."""

    def __init__(self, model: str, weights: Weights) -> None:
        super().__init__()
        self._loss = LOSSES[model]
        for name, array in weights.items():  # A copy: the optimizer writes in place.
            self.register_parameter(name, nn.Parameter(torch.tensor(array)))

    def forward(self, batch: Tensor) -> Tensor:
        """The loss of a batch, of the form of `Inputs.batch`."""
        return self._loss(dict(self.named_parameters()), batch)


class Replica:
    """A network under DDP, with its optimizer and the number of its steps."""

    def __init__(
        self,
        method: str,
        network: Network,
        optimizer: str,
        learning_rate: float,
        momentum: float = MOMENTUM,
    ) -> None:
        peer = PEERS[method]
        self.network, self.steps = network, 0
        has_factors = "powerSGD" in peer.hook
        bucket = ONE_BUCKET if peer.is_one_bucket or has_factors else None
        # Without init_sync, which sends the weights: they are the same on all workers.
        self._ddp = DistributedDataParallel(network, bucket_cap_mb=bucket, init_sync=False)
        if has_factors:
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=peer.rank, start_powerSGD_iter=START
            )
            self._ddp.register_comm_hook(state, getattr(powerSGD_hook, f"{peer.hook}_hook"))
        elif peer.hook:
            self._ddp.register_comm_hook(None, getattr(default_hooks, f"{peer.hook}_hook"))
        self._optimizer = OPTIMIZERS[optimizer](network.parameters(), learning_rate, momentum)

    def step(self, batch: Tensor) -> float:
        """One step of the optimizer. Returns this worker's loss before it."""
        loss = self._ddp(batch)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.steps += 1
        return loss.item()

    def loss(self, rows: np.ndarray) -> float:
        """The loss of rows, without gradients."""
        with torch.no_grad():
            return self.network(torch.from_numpy(rows)).item()


class Worker(worker.BaseWorker):
    """A worker that wraps a network in DDP per method.

    The environment has `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`. Gloo sends through
    the interface in `GLOO_SOCKET_IFNAME`. A second worker of the same process needs another
    `MASTER_PORT`: with the same port its group may hang.
    """

    def __init__(self, model: str, optimizer: str = "sgd") -> None:
        """Joins the other workers."""
        self._model, self._optimizer = model, optimizer
        self.inputs = inputs.load(model)
        self.prepared = {}
        torch.set_num_threads(1)
        distributed.init_process_group("gloo")
        self.rank, self.workers = distributed.get_rank(), distributed.get_world_size()

    def replica(
        self, method: str, learning_rate: float, seed: int, momentum: float = MOMENTUM
    ) -> Replica:
        """A new network under DDP."""
        network = Network(self._model, self.inputs.first_weights(seed))
        return Replica(method, network, self._optimizer, learning_rate, momentum)

    def measured(self, method: str) -> Replica:
        """The prepared replica, which continues.

        It keeps its weights and DDP's bucket, and under PowerSGD the residual and the factors.
        """
        return self.prepared[method]

    def batch(self, replica: Replica, seed: int, number: int) -> Tensor:
        """The batch of this worker."""
        return torch.from_numpy(self.inputs.batch(seed, self.rank, number))

    def batches(self, replica: Replica, count: int) -> list[Tensor]:
        """The next batches."""
        return [self.batch(replica, 0, replica.steps + ahead) for ahead in range(count)]

    def total(self, value: float) -> float:
        """The sum over workers."""
        total = torch.tensor(value, dtype=torch.float64)
        distributed.all_reduce(total)
        return total.item()

    def prepare(self, method: str, learning_rate: float = LEARNING_RATE) -> worker.Answer:
        """Builds the replica that is measured, and runs `WARM_UP` steps."""
        replica = self.prepared[method] = self.replica(method, learning_rate, 0)
        return {"losses": [replica.step(batch) for batch in self.batches(replica, WARM_UP)]}
