"""Each port of docs/porting.md ends with the parameters of the program before it."""

import functools
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax.sharding import PartitionSpec as P

import jaxcomm
from jaxcomm.training import loss_scaled, loss_scaled_gradients
from tests.programs import program
from tests.workers import mesh_of

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "porting.md"
FIRST, *SECTIONS = re.split(r"^## (?=.+$)", PAGE.read_text(encoding="utf-8"), flags=re.M)
PORTS = {text.partition("\n")[0]: text for text in SECTIONS}
NAMES = {
    "flax `TrainState` under `jax.pmap`",
    "`optax.MultiSteps`",
    "Masks and token weights",
    "flax `DynamicScale`",
    "`optax.lookahead`",
    "SAM",
    "DP-SGD",
    "flax `Partitioned`",
    "A GAN",
    "All of training in one `jax.lax.scan`",
}
TOLERANCE = {"flax `DynamicScale`": 1e-3}  # It computes in float16.
N, ROWS = 8, 64


@pytest.fixture(autouse=True)
def promotion() -> Iterator[None]:
    """Optax multiplies its counts of steps by floats, and the page is for users."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def run(text: str, variables: dict[str, Any]) -> dict[str, Any]:
    """The variables after the blocks of a text."""
    variables = dict(variables)
    blocks = program("run_readme").python_blocks(text)
    assert len(blocks) == 2 and all(block.run for block in blocks)
    for block in blocks:
        exec(compile(block.code, str(PAGE), "exec"), variables)
    return variables


@functools.cache
def first() -> dict[str, Any]:
    return run(FIRST, {})


def require_equal(variables: dict[str, Any], tolerance: float = 1e-5) -> None:
    before, after = variables["before"], variables["after"]
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, tolerance, tolerance),
        before,
        after,
    )
    assert all(np.abs(np.asarray(x)).max() > 0.01 for x in jax.tree.leaves(after))


def test_the_first_port() -> None:
    require_equal(first())


def test_the_sections() -> None:
    assert PORTS.keys() == NAMES
    assert all(text.count("\nTrap: ") == 1 for text in SECTIONS)


@pytest.mark.parametrize("name", PORTS)
def test_both_end_with_the_same_parameters(name: str) -> None:
    variables = {key: value for key, value in first().items() if key not in ("before", "after")}
    require_equal(run(PORTS[name], variables), TOLERANCE.get(name, 1e-5))


# The traps.

X: Any = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
START = {"w": jnp.full(4, 0.5)}
ASCENT = optax.chain(optax.contrib.normalize(), optax.sgd(0.1))


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((x @ params["w"] - jnp.sin(x.sum(axis=1))) ** 2)


def opaque(tx: Any, grad_fn: Any, x: jax.Array) -> Any:
    """The update of one step of SAM in opaque mode."""
    of_batch = lambda params, _: grad_fn(params, x)  # noqa: E731
    return tx.update(of_batch(START, 0), tx.init(START), START, grad_fn=of_batch)[0]


def local_gradient(params: Any, x: jax.Array) -> Any:
    return jaxcomm.local_value_and_grad(loss_fn)(params, x)[1]


def sam(down: Any, up: Any = ASCENT) -> Any:
    return optax.contrib.sam(down, up, opaque_mode=True)


def test_opaque_sam_by_hand_sums_what_jax_grad_returns() -> None:
    mean, down = jaxcomm.mean(), optax.sgd(1.0)
    right = opaque(sam(down), jax.grad(loss_fn), X)
    on_mesh = functools.partial(jax.shard_map, mesh=mesh_of(N), in_specs=P("data"), out_specs=P())
    both = sam(optax.chain(mean, down), optax.chain(mean, ASCENT))
    found = jax.jit(on_mesh(lambda x: opaque(both, local_gradient, x)))(X)
    np.testing.assert_allclose(found["w"], right["w"], rtol=1e-5)
    summed = jax.jit(on_mesh(lambda x: opaque(sam(down), jax.grad(loss_fn), x)))(X)
    np.testing.assert_allclose(summed["w"], N * right["w"], rtol=1e-5)
    with pytest.raises(ValueError, match="sum"):
        jax.jit(on_mesh(lambda x: opaque(both, jax.grad(loss_fn), x)))(X)


def stepped(
    loss: Any, tx: Any, params: Any, batch: Any, state: tuple[Any, ...] = (), **options: Any
) -> Any:
    step = jaxcomm.make_step(
        loss, tx, mesh_of(N), has_model_state=bool(state), donate=False, **options
    )
    return step(params, *state, jaxcomm.init(tx, params, mesh_of(N)), batch)


def test_noise_has_the_deviation_of_optax() -> None:
    """It does not grow with the number of workers, and is divided by the rows of all of them."""
    params, multiplier, most = {"w": jnp.zeros(10_000)}, 1.1, 2.0
    private = optax.contrib.differentially_private_aggregate(most, multiplier, key=0)
    zeros = {"w": jnp.zeros((ROWS, 10_000))}
    right = np.std(private.update(zeros, private.init(params))[0]["w"])
    added = optax.add_noise((multiplier * most / ROWS) ** 2, 0.0, key=0)
    tx = optax.chain(jaxcomm.mean(), added)
    flat = lambda params, x: 0 * jnp.sum(params["w"]) * jnp.sum(x)  # noqa: E731
    found = np.std(stepped(flat, tx, params, X)[0]["w"])
    assert [right, found] == pytest.approx([multiplier * most / ROWS] * 2, rel=0.05)


def half_loss(params: Any, state: Any, x: jax.Array) -> Any:
    """Infinite gradients in float16, on the worker that has a large row."""
    return jnp.mean(x.astype(jnp.float16) @ params["w"].astype(jnp.float16)), state


def test_an_infinite_gradient_of_one_worker() -> None:
    state, x = (loss_scaled(scale=2.0**14),), X.copy()
    x[-1] = 100  # Of a worker's 8 rows: 2^14 * 100 / 8 overflows.
    sgd = optax.chain(jaxcomm.mean(), optax.sgd(0.1))
    options: Any = {"state": state, "gradients": loss_scaled_gradients}
    params, new, _, metrics = stepped(half_loss, jaxcomm.skip_nonfinite(sgd), START, x, **options)
    np.testing.assert_array_equal(params["w"], START["w"])
    assert new.scale == 2.0**13 and metrics["diagnostics/skipped_steps"] == 1
    params, *_ = stepped(half_loss, sgd, START, x, **options)
    assert not np.isfinite(params["w"]).any()


def test_a_masked_mean_without_weights_differs() -> None:
    def masked(params: Any, x: jax.Array) -> jax.Array:
        valid = x[:, 0] > 0
        return jnp.sum((x @ params["w"] - 1) ** 2 * valid) / jnp.sum(valid)

    def weighted(loss_fn: Any, params: Any, x: jax.Array) -> Any:
        return *jaxcomm.local_value_and_grad(loss_fn)(params, x), jnp.sum(x[:, 0] > 0)

    tx = optax.chain(jaxcomm.mean(), optax.sgd(1.0))
    right = START["w"] - jax.grad(masked)(START, X)["w"]
    found = stepped(masked, tx, START, X, gradients=weighted)[0]["w"]
    np.testing.assert_allclose(found, right, rtol=1e-5)
    assert np.abs(stepped(masked, tx, START, X)[0]["w"] - right).max() > 0.01


def test_boxed_arrays_need_their_axis() -> None:
    ones = nn.with_partitioning(nn.initializers.ones, (None, "model"))
    model: Any = nn.Dense(2, kernel_init=ones)
    boxed, tx = model.init(jax.random.key(0), X), optax.chain(jaxcomm.mean(), optax.sgd(0.1))
    loss = lambda params, x: jnp.mean(model.apply(params, x) ** 2)  # noqa: E731
    with pytest.raises(ValueError, match=r"model.*is not found in mesh"):
        stepped(loss, tx, boxed, X)
    stepped(loss, tx, nn.unbox(boxed), X)


def test_a_loss_keeps_the_first_value_of_closed_over_variables() -> None:
    other, tx = {"w": jnp.ones(4)}, optax.chain(jaxcomm.mean(), optax.sgd(1.0))
    closed = lambda params, x: jnp.sum(params["w"] * other["w"]) + 0 * jnp.sum(x)  # noqa: E731
    passed = lambda params, x, *, shared: jnp.sum(params["w"] * shared["w"])  # noqa: E731
    for loss, rest, expected in (closed, {}, -2), (passed, {"shared": other}, -3):
        step = jaxcomm.make_step(loss, tx, mesh_of(N), donate=False)
        other["w"] = jnp.ones(4)
        params, opt_state = {"w": jnp.zeros(4)}, jaxcomm.init(tx, START, mesh_of(N))
        params, opt_state, _ = step(params, opt_state, X, **rest)
        other["w"] = jnp.full(4, 2.0)
        params, opt_state, _ = step(params, opt_state, X, **rest)
        np.testing.assert_array_equal(params["w"], np.full(4, expected))


def test_it_is_short() -> None:
    assert len(PAGE.read_text(encoding="utf-8").split()) <= 1200
