"""The lab's models: the same losses and gradients in JAX and PyTorch."""

import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.lab import inputs, models
from experiments.lab.peers import TORCH, has_torch
from experiments.tasks.data import load_text

ROOT = Path(__file__).parents[3]
MODELS = ["mlp", "transformer"]


def test_the_models_have_as_many_parameters_as_documented() -> None:
    sizes = [sum(w.size for w in inputs.load(model).first_weights(0).values()) for model in MODELS]
    assert sizes == [10_496_000, 3_307_008]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["peers"] == [f"torch=={TORCH}"]


def test_batches_and_held_out_rows_are_windows_of_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = np.random.default_rng(0).bytes(100_000)
    (tmp_path / "text").write_bytes(text)
    monkeypatch.setattr(
        inputs, "load_text", lambda data, window: load_text(tmp_path / "text", window=window)
    )
    read = inputs.load("transformer")
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
    weights = jax.tree.map(jnp.asarray, read.first_weights(0))
    rows = read.batch(0, 0, 0)[:2, :-1]
    changed = rows.copy()
    changed[:, 20:] += 1
    logits, others = (
        models.transformer_logits(weights, jnp.asarray(each % 256)).reshape(*rows.shape, -1)
        for each in (rows, changed)
    )
    np.testing.assert_array_equal(logits[:, :20], others[:, :20])
    assert (logits[:, 20:] != others[:, 20:]).any(axis=(0, 2)).all()


@pytest.mark.parametrize("model", MODELS)
def test_both_frameworks_have_the_same_loss_and_gradients(model: str) -> None:
    if not has_torch():
        pytest.skip("no PyTorch")
    import torch

    from experiments.lab import torch_worker

    read, rng = inputs.load(model), np.random.default_rng(1)
    # Away from the first weights, where biases are zero and scales one.
    weights = {
        name: array + 0.05 * rng.standard_normal(array.shape, np.float32)
        for name, array in read.first_weights(0).items()
    }
    batch, params = read.batch(0, 0, 0), jax.tree.map(jnp.asarray, weights)
    loss, gradients = jax.value_and_grad(models.LOSSES[model])(params, jnp.asarray(batch))
    network = torch_worker.Network(model, weights)
    theirs = network(torch.from_numpy(batch))
    theirs.backward()
    np.testing.assert_allclose(loss, theirs.item(), rtol=1e-5)
    assert [name for name, _ in network.named_parameters()] == list(weights)
    for name, parameter in network.named_parameters():
        largest = float(np.abs(gradients[name]).max())
        assert largest > 0
        np.testing.assert_allclose(
            gradients[name], parameter.grad, rtol=1e-3, atol=1e-4 * largest, err_msg=name
        )
