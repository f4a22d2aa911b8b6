"""Checks all laws of a gossip method."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomm._contract import PerWorker
from jaxcomm._require import require_transformation
from jaxcomm._workers import init
from jaxcomm.testing._aggregator import mesh_of
from jaxcomm.testing._law import require_equal, require_law
from jaxcomm.training._make_step import make_step
from jaxcomm.training._simulate import simulate

DRIVEN = 8  # Steps with gradients.


def _loss(params: dict[str, jax.Array], gradient: jax.Array) -> jax.Array:
    """Its gradient is the worker's row, for each leaf."""
    rows = [x.astype(jnp.float32) * gradient[0] for x in params.values()]
    return jnp.sum(jnp.stack(rows))


def _after(
    tx: Any, first: PerWorker, gradients: np.ndarray, axis_name: str, on_mesh: bool = False
) -> PerWorker:
    """The parameters of all workers after one step of each of `gradients` [steps, n, d]."""
    workers: Any = gradients.shape[1]
    workers, run = (mesh_of(workers, axis_name), make_step) if on_mesh else (workers, simulate)
    tx = optax.chain(optax.sgd(1.0), tx)
    step = run(_loss, tx, workers, axis_name=axis_name, donate=False)
    params, state = first, init(tx, first, workers, axis_name=axis_name)
    for gradient in gradients:
        params, state, _ = step(params, state, jnp.asarray(gradient))
    return params


def check_gossip(
    tx: optax.GradientTransformation,
    *,
    workers: int = 4,
    axis_name: str = "data",
    quiet_steps: int = 100,
    tolerance: float = 1e-3,
) -> None:
    r"""Checks that a transformation that mixes workers' parameters satisfies the gossip laws.

    Workers are simulated with `jax.vmap`, and run on a mesh if there are enough devices. The check
    itself sends nothing; only `tx` does. One leaf is float32, and one bfloat16. The laws, with the
    names that error messages use:

    - `agreement`: workers that agree, and take no step, stay where they are.
    - `mean`: after steps that differ by worker, and then `quiet_steps` without a gradient, the mean
      of the parameters is that of the first ones plus the sum of the mean steps.
    - `consensus`: every worker is then at this mean.
    - `nonfinite`: a NaN in one worker's gradient makes no parameter NaN.
    - `modes`: a mesh gives the same parameters as one device.

    Args:
      tx: The gossip method, without an optimizer.
      workers: The number of workers, the nodes of its graph.
      axis_name: The mesh axis over which `tx` mixes.
      quiet_steps: How many steps without gradients lead to agreement.
      tolerance: The distance of a worker from the mean that may be left, for parameters and steps
        of about 1; infinite for a method whose codec always leaves an error.

    Returns:
      Nothing.

    Raises:
      AssertionError: If a law is violated. The message names the law and the numbers.
      ValueError: If `tx` is not a transformation, or rejects its input.

    Example:
      >>> from jaxcomm import gossip
      >>> from jaxcomm.testing import check_gossip
      >>> check_gossip(gossip.dpsgd(gossip.ring(4)))
      >>> check_gossip(gossip.dpsgd(gossip.ring(8)), workers=8, quiet_steps=4)
      Traceback (most recent call last):
      AssertionError: law 'consensus': ...
    """
    require_transformation(tx)
    random = np.random.default_rng(0)
    x = random.standard_normal((workers, 5)).astype(np.float32)
    driven = random.standard_normal((DRIVEN, workers, 5)).astype(np.float32)
    first = PerWorker({axis_name: {"x": jnp.asarray(x), "y": jnp.asarray(x, jnp.bfloat16)}})
    moved = _after(tx, first, driven, axis_name)

    def of_float32(params: PerWorker) -> np.ndarray:
        return np.asarray(params.per_worker[axis_name]["x"], np.float64)

    alike = jax.tree.map(lambda x: jnp.broadcast_to(x[:1], x.shape), first)
    stayed = _after(tx, alike, np.zeros_like(driven), axis_name)
    require_equal("agreement", stayed, alike, "workers that agree: ", tolerance=1e-5)

    quiet = np.concatenate([driven, np.zeros((quiet_steps, workers, 5), np.float32)])
    found = of_float32(_after(tx, first, quiet, axis_name))
    expected = x.mean(axis=0, dtype=np.float64) - driven.mean(axis=1, dtype=np.float64).sum(axis=0)
    moved_by = np.abs(found.mean(axis=0) - expected).max()
    require_law(moved_by <= 1e-4, "mean", f"the mean of the parameters is {moved_by:.3g} off.")
    apart = np.abs(found - expected).max()
    require_law(
        apart <= tolerance,
        "consensus",
        f"after {DRIVEN} steps and {quiet_steps} without gradients, one of {workers} workers is "
        f"{apart:.3g} away from the mean; {tolerance:.3g} is allowed.",
    )

    spoilt = driven.copy()
    spoilt[1, -1, 0] = math.nan
    left = jax.tree.leaves(_after(tx, first, spoilt, axis_name))
    finite = all(bool(jnp.isfinite(leaf).all()) for leaf in left)
    require_law(finite, "nonfinite", "a NaN of one gradient is in the parameters.")

    if len(jax.devices()) >= workers:
        on_mesh = _after(tx, first, driven, axis_name, on_mesh=True)
        require_equal("modes", on_mesh, moved, "on a mesh: ", tolerance=1e-2)
