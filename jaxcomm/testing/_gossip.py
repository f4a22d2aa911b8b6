"""The laws of a gossip method, by the names that error messages use, and their check."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

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
SIZE = 5


class GossipTrial(NamedTuple):
    """A gossip method, and the settings in which the laws are checked.

    Attributes:
      tx: The method.
      workers: The number of workers.
      axis_name: The mesh axis over which `tx` mixes.
      quiet_steps: How many steps without gradients lead to agreement.
      tolerance: The distance of a worker from the mean that may be left.
    """

    tx: optax.GradientTransformation
    workers: int = 4
    axis_name: str = "data"
    quiet_steps: int = 100
    tolerance: float = 1e-3

    def start(self) -> PerWorker:
        """Returns parameters that differ by worker, one leaf in float32 and one in bfloat16."""
        x = np.random.default_rng(0).normal(size=(self.workers, SIZE)).astype(np.float32)
        return PerWorker({self.axis_name: {"x": jnp.asarray(x), "y": jnp.asarray(x, jnp.bfloat16)}})

    def driven(self, quiet_steps: int = 0) -> np.ndarray:
        """Returns gradients that differ by worker, then none, [steps, workers, coordinates]."""
        shape = (DRIVEN, self.workers, SIZE)
        rows = np.random.default_rng(1).normal(size=shape).astype(np.float32)
        return np.concatenate([rows, np.zeros((quiet_steps, *shape[1:]), np.float32)])

    def after(self, first: PerWorker, gradients: np.ndarray, on_mesh: bool = False) -> PerWorker:
        """Returns the parameters of all workers after a step for each row of gradients."""
        step, tx = _step(self.tx, self.workers, self.axis_name, on_mesh)
        where: Any = mesh_of(self.workers, self.axis_name) if on_mesh else self.workers
        params, state = first, init(tx, first, where, axis_name=self.axis_name)
        for gradient in gradients:
            params, state, _ = step(params, state, jnp.asarray(gradient))
        return params

    def numbers(self, params: PerWorker) -> np.ndarray:
        """Returns the leaf in float32, [workers, coordinates]."""
        return np.asarray(params.per_worker[self.axis_name]["x"], np.float64)

    def quiet(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns parameters after the quiet steps, and the mean at which all should be."""
        first, driven = self.start(), self.driven(self.quiet_steps)
        moved = driven.mean(axis=1, dtype=np.float64).sum(axis=0)
        return self.numbers(self.after(first, driven)), self.numbers(first).mean(axis=0) - moved


def _loss(params: dict[str, jax.Array], gradient: jax.Array) -> jax.Array:
    """Its gradient is the worker's row, for each leaf."""
    rows = [x.astype(jnp.float32) * gradient[0] for x in params.values()]
    return jnp.sum(jnp.stack(rows))


@functools.cache
def _step(tx: Any, workers: int, axis_name: str, on_mesh: bool) -> tuple[Any, Any]:
    run: Any = make_step if on_mesh else simulate
    where: Any = mesh_of(workers, axis_name) if on_mesh else workers
    trained = optax.chain(optax.sgd(1.0), tx)
    return run(_loss, trained, where, axis_name=axis_name, donate=False), trained


def require_agreement(trial: GossipTrial) -> None:
    """Workers that agree, and take no step, stay where they are."""
    equal = jax.tree.map(lambda x: jnp.broadcast_to(x[:1], x.shape), trial.start())
    stayed = trial.after(equal, np.zeros_like(trial.driven()))
    require_equal("agreement", stayed, equal, "workers that agree: ", tolerance=1e-5)


def require_mean(trial: GossipTrial) -> None:
    """The mean of the parameters is that of the first ones plus the sum of the mean steps."""
    found, expected = trial.quiet()
    moved_by = np.abs(found.mean(axis=0) - expected).max()
    require_law(moved_by <= 1e-4, "mean", f"the mean of the parameters is {moved_by:.3g} off.")


def require_consensus(trial: GossipTrial) -> None:
    """Every worker comes to this mean."""
    found, expected = trial.quiet()
    distance = np.abs(found - expected).max()
    require_law(
        distance <= trial.tolerance,
        "consensus",
        f"after {DRIVEN} steps and {trial.quiet_steps} without gradients, one of {trial.workers} "
        f"workers is {distance:.3g} away from the mean; {trial.tolerance:.3g} is allowed.",
    )


def require_finite(trial: GossipTrial) -> None:
    """A NaN in one worker's gradient makes no parameter NaN."""
    spoilt = trial.driven()
    spoilt[1, -1, 0] = math.nan
    left = jax.tree.leaves(trial.after(trial.start(), spoilt))
    finite = all(bool(jnp.isfinite(leaf).all()) for leaf in left)
    require_law(finite, "nonfinite", "a NaN of one gradient is in the parameters.")


def require_modes(trial: GossipTrial) -> None:
    """A mesh, if there are enough devices, gives the same parameters as one device."""
    if len(jax.devices()) >= trial.workers:
        on_mesh = trial.after(trial.start(), trial.driven(), on_mesh=True)
        simulated = trial.after(trial.start(), trial.driven())
        require_equal("modes", on_mesh, simulated, "on a mesh: ", tolerance=1e-2)


GOSSIP_LAWS: Mapping[str, Callable[[GossipTrial], None]] = {
    "agreement": require_agreement,
    "mean": require_mean,
    "consensus": require_consensus,
    "nonfinite": require_finite,
    "modes": require_modes,
}
"""What every gossip method is held to, by name."""


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
    trial = GossipTrial(tx, workers, axis_name, quiet_steps, tolerance)
    for law in GOSSIP_LAWS.values():
        law(trial)
