"""Between processes on CPUs programs are others; what comes out, and the bytes, are the same."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jaxcomm
from jaxcomm import _axis
from jaxcomm.aggregation import two_stage_mean
from jaxcomm.compression.quantizers import dither
from jaxcomm.wire._account import Account
from tests.aggregation.runs import averaged, over
from tests.workers import mesh_of

Make = Callable[[], optax.GradientTransformation]

SHAPES = {"a": (512, 1024), "b": (70, 300), "c": (9,), "d": (11,)}


def _updates(workers: int, dtype: str = "float32") -> dict[str, jax.Array]:
    draw = np.random.default_rng(0).standard_normal
    return {name: jnp.asarray(draw((workers, *s)), dtype) for name, s in SHAPES.items()}


def _averaged(make: Make, workers: int, dtype: str) -> tuple[dict[str, jax.Array], Account]:
    run, updates = over(mesh_of(workers), "data", averaged(make())), _updates(workers, dtype)
    return run(updates), jaxcomm.wire.account(run, updates)


def _both(
    make: Make, workers: int, monkeypatch: pytest.MonkeyPatch, dtype: str = "float32"
) -> tuple[tuple[Any, Account], tuple[Any, Account]]:
    elsewhere = _averaged(make, workers, dtype)
    monkeypatch.setattr(_axis, "by_gloo", lambda: True)
    return elsewhere, _averaged(make, workers, dtype)


def _primitives(account: Account) -> list[str]:
    return [each.kind for each in account.collectives]


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "rounds"), [(2, 0), (3, 2), (4, 6)])
@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        pytest.param(lambda: jaxcomm.mean(wire_dtype=jnp.bfloat16), "float32", id="bfloat16"),
        pytest.param(lambda: two_stage_mean(dither(bits=8)), "float32", id="8 bits"),
        pytest.param(jaxcomm.mean, "bfloat16", id="mean of bfloat16"),
    ],
)
def test_rounds_equal_all_to_all(
    make: Make, dtype: str, workers: int, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (expected, before), (found, after) = _both(make, workers, monkeypatch, dtype)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert after.bytes_per_worker == pytest.approx(before.bytes_per_worker)
    assert _primitives(before).count("all_to_all") == 1
    assert _primitives(after).count("all_to_all") == (0 if rounds else 1)
    assert _primitives(after).count("ppermute") == rounds


def test_summed_codes_are_sent_in_one_array(monkeypatch: pytest.MonkeyPatch) -> None:
    (expected, before), (found, after) = _both(lambda: jaxcomm.global_qsgd(bits=8), 4, monkeypatch)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert after.bytes_per_worker == pytest.approx(before.bytes_per_worker)
    assert len(after.collectives) == 2 < len(before.collectives)


def test_leaves_of_the_mean_are_sent_in_one_array(monkeypatch: pytest.MonkeyPatch) -> None:
    (_, before), (found, after) = _both(jaxcomm.mean, 4, monkeypatch)
    expected = jax.tree.map(lambda x: np.mean(np.asarray(x, np.float64), axis=0), _updates(4))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, expected)
    assert after.bytes_per_worker == pytest.approx(before.bytes_per_worker)
    assert len(after.collectives) == 1 and len(before.collectives) == len(SHAPES)


def test_the_mean_does_not_join_sharded_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_axis, "by_gloo", lambda: True)
    mesh = jax.make_mesh((2, 2), ("data", "model"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    run = over(mesh, "data", averaged(jaxcomm.mean()), axis_names={"data"})
    assert len(jaxcomm.wire.account(run, _updates(2)).collectives) == len(SHAPES)
