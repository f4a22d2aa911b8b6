"""Under `optax.inject_hyperparams` every option works, or the error says how to keep it static."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm import aggregation
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.quantizers import dither, exponential_dither
from jaxcomm.compression.sparsifiers import nonzero, top_k
from jaxcomm.synchronization import shifted_exponential


def largest(ratio: float) -> jaxcomm.Codec:
    return error_feedback(top_k(ratio=ratio))


def of_levels(levels: int) -> jaxcomm.Codec:
    return dither(levels=levels)


def every_leaf(tree: Any) -> Any:
    return jax.tree.map(lambda x: True, tree)


SGD = optax.chain(jaxcomm.mean(), optax.sgd(0.1))
UNITS = {"scope": "leaf", "bucket_bytes": 64, "seed": 3}
SKETCH = {
    "sketch_ratio": 4.0,
    "rows": 3,
    "momentum": 0.5,
    "momentum_masking": True,
    "hashing": "elements",
}
# Arguments for each: all options that could be numbers.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "accumulate": {"tx": SGD, "every": 2},
    "adaptive_budgets": {
        "axis_name": "data",
        "codec_for": of_levels,
        "budget": 7,
        "plans": [{}, {0: 1}],
        "target_seconds": 0.5,
        "patience": 2,
        **UNITS,
    },
    "adaptive_ratio": {
        "axis_name": "data",
        "codec_for": largest,
        "ratios": [0.25, 1.0],
        "target_error": 0.5,
        "patience": 2,
        **UNITS,
    },
    "atomo": {"rank": 2, "bucket_bytes": 64, "seed": 3},
    "backup": {
        "tx": jaxcomm.mean(),
        "backups": 1,
        "times": shifted_exponential(1.0).sample,
        "seed": 3,
    },
    "budgeted_mean": {
        "axis_name": "data",
        "codec_for": of_levels,
        "budget": 7,
        "slow": {0: 1},
        **UNITS,
    },
    "deep_gradient_compression": {
        "ratio": 0.25,
        "momentum": 0.5,
        "max_norm": 1.0,
        "sample_ratio": 0.5,
        "warmup_every": 2,
        "bucket_bytes": 64,
    },
    "demo": {"k": 2, "block_size": 4, "momentum": 0.9, "value_dtype": "bfloat16", **UNITS},
    "delayed": {"tx": jaxcomm.mean(), "staleness": 2},
    "proximal": {
        "tx": optax.sgd(0.1),
        "regularizer": jaxcomm.regularizers.l1(0.01),
        "learning_rate": 0.1,
    },
    "recursive_doubling_mean": {
        "axis_name": "data",
        "codec_for": lambda added: nonzero(density=1.0, granularity="element"),
        **UNITS,
    },
    "ef_sign_sgd": {"decay": 0.9, "bucket_bytes": 64},
    "fetch_sgd": {"k": 2, **SKETCH, **UNITS},
    "all_gather_mean": {"axis_name": "data", "codec": dither(), **UNITS},
    "global_qsgd": {"levels": 4, "bits": 8, **UNITS},
    "gtop_k": {"k": 2, "bucket_bytes": 64},
    "lazy": {"codec": dither(), "threshold": 0.5, "memory": 2, "max_skip": 3, **UNITS},
    "mean": {"block_size": 8, "wire_dtype": "float8_e4m3fn"},
    "merged_mean": {"axis_name": "data", "codec": exponential_dither(), **UNITS},
    "natural_compression": {"bucket_bytes": 64, "seed": 3},
    "one_bit_sgd": {"decay": 0.9, "bucket_bytes": 64},
    "parallax": {"sparse": every_leaf, "density": 1.0, "union_density": 1.0, "granularity": 1},
    "power_sgd": {"rank": 2, "drawn": 1, "decay": 0.9, "bucket_bytes": 64, "seed": 3},
    "qsgd": {"levels": 4, "bits": 8, **UNITS},
    "s2_reducer": {
        "density": 1.0,
        "sketch_ratio": 2.0,
        "rows": 3,
        "granularity": 1,
        "decode": "median",
        "bits": 32,
        **UNITS,
    },
    "sharded_server": {
        "tx": optax.sgd(0.1),
        "push": dither(),
        "pull": dither(),
        "max_norm": 1.0,
        **UNITS,
    },
    "signum": {"momentum": 0.9},
    "sketched_sgd": {"ratio": 0.25, "candidates": 2.0, **SKETCH, **UNITS},
    "skip_nonfinite": {"tx": jaxcomm.mean(), "max_consecutive_errors": 3},
    "sparcml": {"density": 1.0, "union_density": 1.0, "granularity": 1, "bucket_bytes": 64},
    "sparse_global_qsgd": {"capacity": 4, "levels": 1, **UNITS},
    "all_reduce_mean": {"axis_name": "data", "codec": dither(), **UNITS},
    "terngrad": {"clip": 2.5, **UNITS},
    "top_k_sgd": {"k": 2, "decay": 0.9, **UNITS},
    "two_stage_mean": {"axis_name": "data", "codec": dither(), **UNITS},
    "warmup": {"stages": [jaxcomm.qsgd()], "every": 2},
    "zeroth_order": {"directions": 2, "smoothing": 0.01, "seed": 3},
}
WITHOUT_NUMBERS = {
    "gradient_norms",
    "hierarchical",
    "per_worker",
    "ring_mean",
    "shard_local",
    "sign_sgd",
    "sliced",
    "majority_vote",
}
NEEDED = {"adaptive_budgets": {"seconds_per_byte": 1e-4}}  # in `update`


def _constructors() -> set[str]:
    public = {*jaxcomm.__all__, *aggregation.__all__}
    functions = {name: found for name in public if inspect.isfunction(found := _named(name))}
    return {
        name
        for name, function in functions.items()
        if "GradientTransformation" in str(inspect.signature(function).return_annotation)
    }


def _named(name: str) -> Any:
    return getattr(jaxcomm, name, None) or getattr(aggregation, name)


def test_every_constructor_is_here() -> None:
    assert set(ARGUMENTS) | WITHOUT_NUMBERS == _constructors()


def injected(value: Any) -> bool:
    """Whether optax makes an array of it."""
    return not isinstance(value, bool) and isinstance(value, int | float)


OPTIONS = [
    (name, option)
    for name, given in ARGUMENTS.items()
    for option, value in given.items()
    if injected(value)
]


def _run(name: str, option: str) -> None:
    """Traces `init` and an update, with all others static."""
    given = ARGUMENTS[name]
    static = [other for other in inspect.signature(_named(name)).parameters if other != option]
    tx = optax.inject_hyperparams(_named(name), static_args=static)(**given)
    extra = {key: jnp.float32(value) for key, value in NEEDED.get(name, {}).items()}
    update = jax.vmap(lambda g: tx.update(g, tx.init(g), g, **extra)[0], axis_name="data")
    jax.eval_shape(update, {"w": jnp.ones((2, 4, 3)), "b": jnp.ones((2, 3))})


@pytest.mark.quick(1)
@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_an_option_works_or_says_how(name: str, option: str) -> None:
    try:
        _run(name, option)
    except ValueError as error:
        assert f"`{option}` must" in str(error) and f"static_args=('{option}',)" in str(error)


def test_the_decay_of_a_residual_may_be_scheduled() -> None:
    schedule = optax.linear_schedule(1.0, 0.5, 1)
    tx = optax.inject_hyperparams(jaxcomm.ef_sign_sgd)(decay=schedule)

    def three_steps(g: jax.Array) -> jax.Array:
        state, updates = tx.init(g), []
        for _ in range(3):
            update, state = tx.update(g, state, g)
            updates.append(update)
        return jnp.stack(updates)

    residual, given = np.zeros(2), np.array([3.0, -1.0])
    for decay, update in zip([1, 0.5, 0.5], np.asarray(run(three_steps, given)), strict=True):
        aim = given + decay * residual
        sent = np.abs(aim).mean() * np.sign(aim)
        residual = aim - sent
        np.testing.assert_allclose(update, sent, rtol=1e-5)


def run(fn: Any, given: np.ndarray) -> jax.Array:
    """The batch of one worker."""
    return jax.jit(jax.vmap(fn, axis_name="data"))(jnp.asarray(given[None], jnp.float32))[0]
