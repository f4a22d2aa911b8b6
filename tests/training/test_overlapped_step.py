"""Exchanges beside steps: the numbers of the one program, what waits for what, and mistakes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import jaxcomm
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.sparsifiers import top_k
from jaxcomm.synchronization import streaming_diloco
from jaxcomm.training import make_overlapped_step, second_mesh
from tests.slow import slow
from tests.training.places import at, normal

N, STEPS = 4, 15
SIZES = {"a": 3, "b": 5, "c": 2}
TARGETS = [
    {name: normal(number, N, size) for name, size in SIZES.items()} for number in range(STEPS)
]
TARGETS[4]["b"][2] = np.nan  # A step that one worker skips.
AWAY = np.array([True, True, False, True])


def loss(x: Any, target: Any) -> jax.Array:
    far = (jnp.sum((x[name].astype(jnp.float32) - target[name][0]) ** 2) for name in SIZES)
    return 0.5 * sum(far)


def streaming(**options: Any) -> Any:
    given = {"fragments": 2, "overlap": 3, "mixing_factor": 0.25, **options}
    outer = optax.sgd(0.7, momentum=0.5)
    return streaming_diloco(optax.sgd(0.1, momentum=0.5), outer, 4, **given)


def start(tx: Any, mesh: Mesh, dtype: Any = jnp.float32) -> tuple[Any, Any]:
    zeros = {name: jnp.zeros(size, dtype) for name, size in SIZES.items()}
    params = jaxcomm.replicate(zeros, mesh)
    return params, jaxcomm.init(tx, params, mesh)


def trained(step: Any, params: Any, state: Any, away: Any) -> tuple[list[Any], Any, Any]:
    """The parameters of all workers after each step, the last state, and the last metrics."""
    found = []
    for number, target in enumerate(TARGETS):
        extra = {} if away is None else {"present": AWAY | (number % 3 != away)}
        params, state, metrics = step(params, state, target, **extra)
        found.append(jax.tree.map(np.asarray, params.per_worker["data"]))
    return found, state, metrics


def require_equal(found: list[Any], expected: list[Any], **tolerance: float) -> None:
    for x, y in zip(found, expected, strict=True):
        for name in SIZES:
            one, other = x[name].astype(np.float32), y[name].astype(np.float32)
            np.testing.assert_allclose(one, other, **{"rtol": 1e-5, "atol": 1e-6, **tolerance})


def whole_step(tx: Any, mesh: Mesh) -> Any:
    """The one program, which the exchanges beside steps must equal."""
    return jaxcomm.make_step(loss, tx, mesh, metrics="own", donate=False)


def beside(tx: Any, mesh: Mesh) -> Any:
    return make_overlapped_step(loss, tx, mesh, second_mesh(mesh))


FEEDBACK = {"aggregator": jaxcomm.all_gather_mean(error_feedback(top_k(k=1)))}
BOTH = [
    ({**FEEDBACK}, "auto 4", 0),
    slow({"overlap": 0}, "auto 4", 1),
    slow({"overlap": 1, "fragments": 3, "mixing_factor": 0.0}, "explicit 4", 2),
    slow({"fragments": 1, "overlap": 2, **FEEDBACK}, "explicit 4", None),
]


@pytest.mark.parametrize(("options", "where", "away"), BOTH)
def test_equals_the_one_program(options: Any, where: str, away: Any) -> None:
    """Parameters, anchors and counts; with a worker's NaN, and a worker that is away at times."""
    mesh, tx = at(where), streaming(**options)
    expected, last, whole_metrics = trained(whole_step(tx, mesh), *start(tx, mesh), away)
    found, state, metrics = trained(beside(tx, mesh), *start(tx, mesh), away)
    require_equal(found, expected)
    assert jax.tree.structure(state) == jax.tree.structure(last)
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(last), strict=True
    ):
        name = jax.tree_util.keystr(path)
        # Diagnostics are reported when a fragment arrives, not when it is sent.
        if "diagnostics" not in name and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6, err_msg=name)
    assert metrics.keys() == whole_metrics.keys()
    assert float(metrics["diagnostics/skipped_steps"]) == 1.0


@pytest.mark.slow
def test_bfloat16_and_inner_devices() -> None:
    """A worker of two devices; parameters of 16 bits are rounded before they are sent."""
    devices = np.array(jax.devices())
    both = [Mesh(part.reshape(2, 2), ("data", "ici")) for part in (devices[:4], devices[4:])]
    tx = streaming()
    rows = jax.tree.map(lambda x: np.repeat(x[:2], 2, axis=0), TARGETS[:4] + TARGETS[5:])
    runs = []
    for make in (
        functools.partial(jaxcomm.make_step, metrics="own", donate=False),
        lambda *args: make_overlapped_step(*args, both[1]),
    ):
        params, state = start(tx, both[0], jnp.bfloat16)
        step = make(loss, tx, both[0])
        for target in rows:
            params, state, _ = step(params, state, target)
        runs.append([jax.tree.map(np.asarray, params.per_worker["data"])])
    require_equal(*runs, rtol=0.02, atol=0.02)


def test_only_the_step_that_begins_an_exchange_sends() -> None:
    """The step that applies a result has no collective: it only waits for what it reads."""
    mesh, tx = at("auto 4"), streaming()
    step, carry = make_overlapped_step(loss, tx, mesh), start(tx, mesh)
    for number, sends in ((7, False), (8, True), (9, False)):  # 7 and 9 apply fragments.
        run = functools.partial(step, number=number)
        program = str(jax.make_jaxpr(run)(*carry, TARGETS[0]))
        assert ("psum" in program) == sends


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after", "change"), [(3, 1, 6), (1, 3, 6), (3, 1, 8)])
def test_state_continues_under_another_overlap(before: int, after: int, change: int) -> None:
    """A result under way arrives once; `test_resumed` checks the one program against NumPy."""
    mesh, tx = at("auto 4"), streaming(overlap=after)
    params, state = start(streaming(overlap=before), mesh)
    step = whole_step(streaming(overlap=before), mesh)
    for target in TARGETS[:change]:
        params, state, _ = step(params, state, target)
    runs = []
    for step in (whole_step(tx, mesh), beside(tx, mesh)):
        own, found = jax.tree.map(jnp.copy, (params, state)), []
        for target in TARGETS[change:]:
            *own, _ = step(*own, target)
            found.append(jax.tree.map(np.asarray, own[0].per_worker["data"]))
        runs.append(found)
    require_equal(*runs)


@pytest.mark.slow
def test_several_steps_in_one_program() -> None:
    """With numbers, under jit: one period a program; exchanges have no condition."""
    mesh, tx = at("auto 4"), streaming()
    expected, _, _ = trained(whole_step(tx, mesh), *start(tx, mesh), None)
    step = make_overlapped_step(loss, tx, mesh)

    @functools.partial(jax.jit, static_argnums=3)
    def run(params: Any, state: Any, targets: Any, first: int) -> Any:
        for number, target in enumerate(targets):
            params, state, _ = step(params, state, target, number=first + number)
        return params, state

    params, state = start(tx, mesh)
    for first in (1, 5, 9):
        targets = TARGETS[first - 1 : first + 3]
        params, state = run(params, state, targets, min(first, 9))
        after = jax.tree.map(np.asarray, params.per_worker["data"])
        require_equal([after], [expected[first + 2]])
    program = str(jax.make_jaxpr(run, static_argnums=3)(params, state, TARGETS[:4], 9))
    assert "psum" in program and "cond[" not in program


MESH = at("auto 4")
called = lambda step, *args: step(*args)  # noqa: E731


@pytest.mark.parametrize(
    ("call", "exchange_mesh", "extra", "message"),
    [
        (called, MESH, {}, "shares devices .*wait for each other"),
        (called, None, {"number": 3}, "`number` is 3, but the state is before step 1"),
        (called, None, {"present": np.ones(3, bool)}, r"one bool per worker, bool\[4\], got"),
        (jax.eval_shape, second_mesh(MESH), {"number": 1}, "without `exchange_mesh`"),
        (jax.eval_shape, None, {}, "pass the number of each step"),
    ],
)
def test_mistakes(call: Any, exchange_mesh: Any, extra: Any, message: str) -> None:
    """Of a step that is called, or traced."""
    tx = streaming()
    with pytest.raises(ValueError, match=message):
        step = make_overlapped_step(loss, tx, MESH, exchange_mesh)
        call(functools.partial(step, **extra), *start(tx, MESH), TARGETS[0])
