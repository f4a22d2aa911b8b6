"""The lab's models: the same losses and gradients in JAX and PyTorch."""

import importlib.metadata
import importlib.util
import tomllib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.cli.errors import ExperimentError
from experiments.lab import inputs, models
from experiments.lab.peers import TORCH, require_torch

ROOT = Path(__file__).parents[3]
MODELS = ["mlp", "transformer"]


@pytest.fixture
def torch_models() -> Any:
    """The module in PyTorch. Skips if the version that the lab runs is not installed."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("no PyTorch")
    if importlib.metadata.version("torch").split("+")[0] != TORCH:
        pytest.skip(f"no PyTorch {TORCH}")
    from experiments.lab import torch_models

    return torch_models


def _weights(read: inputs.Inputs, seed: int = 0) -> dict[str, jax.Array]:
    return jax.tree.map(jnp.asarray, read.first_weights(seed))


@pytest.mark.parametrize("model", MODELS)
def test_weights_and_batches_follow_from_their_seeds(model: str) -> None:
    read = inputs.load(model)
    first, other = read.first_weights(3), read.first_weights(4)
    jax.tree.map(np.testing.assert_array_equal, first, read.first_weights(3))
    assert any((first[name] != other[name]).any() for name in first)
    assert all(array.dtype == np.float32 for array in first.values())
    batch = read.batch(1, 2, 3)
    np.testing.assert_array_equal(batch, read.batch(1, 2, 3))
    for place in [(0, 2, 3), (1, 0, 3), (1, 2, 0)]:
        assert (batch != read.batch(*place)).any()
    assert (read.validation != read.held_out).any(axis=1).all()


def test_the_models_have_as_many_parameters_as_documented() -> None:
    sizes = [sum(w.size for w in inputs.load(model).first_weights(0).values()) for model in MODELS]
    assert sizes == [10_496_000, 3_307_008]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["peers"] == [f"torch=={TORCH}"]


def test_batches_and_held_out_rows_are_windows_of_the_text(tmp_path: Path) -> None:
    text = np.random.default_rng(0).bytes(100_000)
    (tmp_path / "text").write_bytes(text)
    read = inputs.load("transformer", tmp_path / "text")
    # The test set begins at a whole window.
    start = text.find(read.held_out[0, :-1].astype(np.uint8).tobytes())
    assert 89_900 < start < 90_100
    middle = text.find(read.validation[0, :-1].astype(np.uint8).tobytes())
    assert 80_900 < middle < 81_100
    for rows, part in (
        (np.concatenate([read.batch(0, 0, step) for step in range(50)]), text[:middle]),
        (read.validation, text[middle : start + 1]),
        (read.held_out, text[start:]),
    ):
        assert all(row.astype(np.uint8).tobytes() in part for row in rows)


@pytest.mark.slow
def test_no_prediction_depends_on_a_later_byte() -> None:
    read = inputs.load("transformer")
    weights, rows = _weights(read), read.batch(0, 0, 0)[:2, :-1]
    changed = rows.copy()
    changed[:, 20:] += 1
    logits, others = (
        models.transformer_logits(weights, jnp.asarray(each % 256)).reshape(*rows.shape, -1)
        for each in (rows, changed)
    )
    np.testing.assert_array_equal(logits[:, :20], others[:, :20])
    assert (logits[:, 20:] != others[:, 20:]).any(axis=(0, 2)).all()


@pytest.mark.parametrize("model", MODELS)
def test_both_frameworks_have_the_same_loss_and_gradients(model: str, torch_models: Any) -> None:
    import torch

    read = inputs.load(model)
    rng = np.random.default_rng(1)
    # Away from the first weights, where biases are zero and scales one.
    weights = {
        name: array + 0.05 * rng.standard_normal(array.shape, np.float32)
        for name, array in read.first_weights(0).items()
    }
    batch = read.batch(0, 0, 0)
    params = jax.tree.map(jnp.asarray, weights)
    loss, gradients = jax.value_and_grad(models.LOSSES[model])(params, jnp.asarray(batch))
    network = torch_models.Network(model, weights)
    theirs = network(torch.from_numpy(batch))
    theirs.backward()
    np.testing.assert_allclose(loss, theirs.item(), rtol=1e-5)
    assert [name for name, _ in network.named_parameters()] == list(weights)
    for name, parameter in network.named_parameters():
        gradient = gradients[name]
        largest = float(np.abs(gradient).max())
        assert largest > 0
        np.testing.assert_allclose(
            gradient, parameter.grad, rtol=1e-3, atol=1e-4 * largest, err_msg=name
        )
    held_out = models.LOSSES[model](params, jnp.asarray(read.held_out))
    np.testing.assert_allclose(
        held_out, torch_models.held_out_loss(network, read.held_out), rtol=1e-5
    )


def test_both_frameworks_have_the_same_adam(torch_models: Any) -> None:
    import torch

    from experiments.lab.jax_worker import OPTIMIZERS
    from experiments.lab.torch_worker import OPTIMIZERS as THEIRS

    rng = np.random.default_rng(0)
    first = rng.standard_normal(1000, np.float32)
    tx = OPTIMIZERS["adam"](0.01)
    ours, theirs = jnp.asarray(first), torch.nn.Parameter(torch.tensor(first))
    state, optimizer = tx.init(ours), THEIRS["adam"]([theirs], lr=0.01)
    for step in range(3):
        gradient = 10.0 ** -rng.uniform(0, 10, 1000) * rng.standard_normal(1000)
        gradient = np.where(np.arange(1000) % 7 == step, 0, gradient).astype(np.float32)
        with jax.numpy_dtype_promotion("standard"):  # As optax needs it.
            updates, state = tx.update(jnp.asarray(gradient), state, ours)
        ours = ours + updates
        theirs.grad = torch.tensor(gradient)
        optimizer.step()
        np.testing.assert_allclose(ours, theirs.detach(), rtol=1e-5, atol=1e-6)


def test_another_torch_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.9.1+cpu")
    with pytest.raises(ExperimentError, match=r"PyTorch 2.13.0, found 2.9.1\+cpu: pip install"):
        require_torch()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"{TORCH}+cpu")
    require_torch()
