"""The two models in PyTorch: the same losses over the same arrays as in `models`."""

from collections.abc import Callable, Mapping

import numpy as np

from experiments.lab.inputs import BLOCKS, HEADS, LAYERS, WIDTH, Weights
from experiments.lab.peers import require_torch

require_torch()

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402

Params = Mapping[str, Tensor]


def mlp_loss(params: Params, batch: Tensor) -> Tensor:
    """float32[rows, 1024] -> the mean squared error of the network against its input."""
    x = batch
    for layer in range(LAYERS):
        x = torch.tanh(torch.addmm(params[f"bias_{layer}"], x, params[f"weight_{layer}"]))
    return functional.mse_loss(x, batch)


def transformer_loss(params: Params, batch: Tensor) -> Tensor:
    """int32[rows, length + 1] -> the mean cross-entropy of each next byte, in nats."""
    inputs, labels = batch[:, :-1], batch[:, 1:].long()
    rows, length = inputs.shape
    x = functional.embedding(inputs, params["embedding"]) + params["positions"][:length]
    x = x.reshape(rows * length, WIDTH)
    for block in range(BLOCKS):
        own = f"block_{block}"
        x = x + _attention(params, own, _norm(params, f"{own}_attention_norm", x), rows)
        hidden = _dense(params, f"{own}_up", _norm(params, f"{own}_mlp_norm", x))
        x = x + _dense(params, f"{own}_down", functional.gelu(hidden, approximate="tanh"))
    logits = _norm(params, "final_norm", x) @ params["head"]
    return functional.cross_entropy(logits, labels.reshape(-1))


def _attention(params: Params, block: str, x: Tensor, rows: int) -> Tensor:
    """Causal attention: [rows * length, width] -> the same shape."""
    qkv = _dense(params, f"{block}_qkv", x).view(rows, -1, 3, HEADS, WIDTH // HEADS)
    query, key, value = qkv.permute(2, 0, 3, 1, 4)
    mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return _dense(params, f"{block}_mix", mixed.transpose(1, 2).reshape(x.shape))


def _dense(params: Params, name: str, x: Tensor) -> Tensor:
    return torch.addmm(params[f"{name}_bias"], x, params[name])


def _norm(params: Params, name: str, x: Tensor) -> Tensor:
    scale, shift = params[f"{name}_scale"], params[f"{name}_shift"]
    return functional.layer_norm(x, (WIDTH,), scale, shift, eps=1e-5)


LOSSES: dict[str, Callable[[Params, Tensor], Tensor]] = {
    "mlp": mlp_loss,
    "transformer": transformer_loss,
}


class Network(nn.Module):
    """A model whose forward pass returns the loss of a batch.

    Attributes:
      loss: The entry of `LOSSES`.
    """

    def __init__(self, model: str, weights: Weights) -> None:
        super().__init__()
        self.loss = LOSSES[model]
        for name, array in weights.items():  # A copy: the optimizer writes in place.
            self.register_parameter(name, nn.Parameter(torch.tensor(array)))

    def forward(self, batch: Tensor) -> Tensor:
        """The loss of a batch, of the form of `Inputs.batch`."""
        return self.loss(dict(self.named_parameters()), batch)


def held_out_loss(network: Network, held_out: np.ndarray) -> float:
    """The loss on rows of `Inputs.held_out`, without gradients."""
    with torch.no_grad():
        return network(torch.from_numpy(held_out)).item()
