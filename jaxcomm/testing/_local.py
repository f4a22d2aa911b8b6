"""The laws of a local method, by the names that error messages use, and their check."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh

from jaxcomm._contract import PerWorker, PyTree
from jaxcomm._require import require_transformation
from jaxcomm._workers import init
from jaxcomm.testing._law import require_equal, require_law
from jaxcomm.training._make_step import make_step
from jaxcomm.training._simulate import simulate

SIZE, CUT = 5, 2  # Coordinates, of which the first two are a leaf.


class LocalTrial(NamedTuple):
    """A local method, what it claims, and the settings in which the laws are checked.

    Attributes:
      tx: The method, with its optimizer.
      period: The number of steps from one exchange to the next.
      workers: The number of workers.
      axis_name: The mesh axis over which `tx` averages.
      agree: Whether all workers have the same parameters after an exchange.
    """

    tx: optax.GradientTransformation
    period: int = 3
    workers: int = 4
    axis_name: str = "data"
    agree: bool = True

    def gradients(self) -> np.ndarray:
        """Returns gradients that differ by worker, [steps, workers, coordinates]."""
        shape = (3 * self.period, self.workers, SIZE)
        return np.random.default_rng(1).normal(size=shape).astype(np.float32)

    def weights(self) -> np.ndarray:
        """Returns weights of the steps, [steps, workers], of which some are 0."""
        rng = np.random.default_rng(2)
        return rng.integers(0, 3, (3 * self.period, self.workers)).astype(np.float32)

    def after(
        self, gradients: np.ndarray, weights: Any = None, where: int | Mesh | None = None
    ) -> np.ndarray:
        """Returns all workers' parameters after each step, [steps, workers, coordinates]."""
        where = self.workers if where is None else where
        start = np.random.default_rng(0).normal(size=(self.workers, SIZE)).astype(np.float32)
        params = PerWorker({self.axis_name: _leaves(jnp.asarray(start))})
        state = init(self.tx, params, where, axis_name=self.axis_name)
        given = np.ones(gradients.shape[:2], np.float32) if weights is None else weights
        run = _steps(self.tx, where, self.axis_name)
        found = run(params, state, (_leaves(gradients), given)).per_worker[self.axis_name]
        return np.concatenate([np.asarray(found["a"]), np.asarray(found["b"])], axis=-1)


def _leaves(rows: Any) -> dict[str, Any]:
    return {"a": rows[..., :CUT], "b": rows[..., CUT:]}


@functools.cache
def _steps(tx: Any, where: int | Mesh, axis_name: str) -> Any:
    """A jitted scan of steps whose gradients and weights are the batch."""

    def given(loss_fn: Any, params: PyTree, batch: Any) -> Any:
        del loss_fn, params
        gradient, weight = jax.tree.map(lambda x: x[0], batch)
        return jnp.zeros((), jnp.float32), gradient, weight

    make: Any = simulate if isinstance(where, int) else make_step
    step = make(
        lambda params, batch: jnp.zeros(()),
        tx,
        where,
        axis_name=axis_name,
        gradients=given,
        donate=False,
    )

    def run(params: PyTree, state: PyTree, batches: Any) -> Any:
        def body(carry: Any, batch: Any) -> Any:
            params, state, _ = step(*carry, batch)
            return (params, state), params

        return jax.lax.scan(body, (params, state), batches)[1]

    return jax.jit(run)


def require_agreement(trial: LocalTrial) -> None:
    """All workers have the same parameters after an exchange."""
    met = trial.after(trial.gradients())[trial.period - 1 :: trial.period]
    distance = np.abs(met - met[:, :1]).max()
    require_law(
        distance <= 1e-5,
        "agreement",
        f"after an exchange of {trial.workers} workers, parameters differ by {distance:.3g}.",
    )


def require_factor(trial: LocalTrial) -> None:
    """A common factor of all weights changes nothing."""
    once, more = (trial.after(trial.gradients(), k * trial.weights()) for k in (1, 64))
    require_equal("factor", more, once, "with all weights 64 times as large, the parameters ")


def require_no_weight(trial: LocalTrial) -> None:
    """A step of weight 0 is as if it had not been, also for the optimizer's memory."""
    found, gradients = [], trial.gradients()
    for garbage in (0.0, 100.0):
        gradients[trial.weights() == 0] = garbage
        found.append(trial.after(gradients, trial.weights()))
    require_equal("no weight", found[1], found[0], "with garbage in steps of weight 0, parameters ")


def require_finite(trial: LocalTrial) -> None:
    """One worker's NaN makes no parameter NaN, and reaches others in an exchange only."""
    gradients = trial.gradients()
    exchange = 2 * trial.period - 1
    gradients[max(exchange - 1, trial.period), -1, 0] = np.nan  # Not in an exchange of a fragment.
    found, plain = trial.after(gradients), trial.after(trial.gradients())
    require_law(np.isfinite(found).all(), "nonfinite", "a NaN of one gradient is in parameters.")
    others, expected = (x[:exchange, :-1] for x in (found, plain))
    require_equal("nonfinite", others, expected, "before the exchange, parameters of the others ")


def require_modes(trial: LocalTrial) -> None:
    """Meshes of either type of axis, if there are enough devices, give the same parameters."""
    gradients, weights = trial.gradients(), trial.weights()
    gradients[1, 0] = np.nan
    simulated = trial.after(gradients, weights)
    devices = jax.devices()[: trial.workers]
    for kind in (AxisType.Auto, AxisType.Explicit) if len(devices) == trial.workers else ():
        names = (trial.axis_name,)
        mesh = jax.make_mesh((trial.workers,), names, axis_types=(kind,), devices=devices)
        found = trial.after(gradients, weights, mesh)
        what = f"on {trial.workers} devices, axes {kind.name}, the parameters "
        require_equal("modes", found, simulated, what, tolerance=1e-5)


LOCAL_LAWS: Mapping[str, Callable[[LocalTrial], None]] = {
    "agreement": require_agreement,
    "factor": require_factor,
    "no weight": require_no_weight,
    "nonfinite": require_finite,
    "modes": require_modes,
}
"""What every local method is held to, by name."""


def local_laws_of(trial: LocalTrial) -> dict[str, Callable[[LocalTrial], None]]:
    """Returns the laws that hold of the method by what it claims."""
    return {k: law for k, law in LOCAL_LAWS.items() if trial.agree or k != "agreement"}


def check_local(
    tx: optax.GradientTransformation,
    *,
    period: int = 3,
    workers: int = 4,
    axis_name: str = "data",
    agree: bool = True,
) -> None:
    r"""Checks that a transformation with local steps satisfies the laws of local methods.

    Workers are simulated with `jax.vmap`, and run on meshes if there are enough devices. The check
    itself sends nothing; only `tx` does. The laws, with the names that error messages use:

    - `agreement`, with `agree`: all workers have the same parameters after an exchange.
    - `factor`: a common factor of the weights of all steps changes nothing, bit for bit.
    - `no weight`: a step of weight 0 is as if it had not been, also for the optimizer's memory.
    - `nonfinite`: one worker's NaN makes no parameter NaN, and reaches others in an exchange only.
    - `modes`: a mesh of automatic or explicit axes gives the same parameters as one device.

    Args:
      tx: The method, with its optimizer.
      period: The number of steps from one exchange to the next.
      workers: The number of workers.
      axis_name: The mesh axis over which `tx` averages.
      agree: Whether all workers have the same parameters after an exchange.

    Returns:
      Nothing.

    Raises:
      AssertionError: If a law is violated. The message names the law and the numbers.
      ValueError: If `tx` is not a transformation, or rejects its input.

    Example:
      >>> import optax, jaxcomm
      >>> from jaxcomm.synchronization import local_sgd
      >>> from jaxcomm.testing import check_local
      >>> check_local(optax.chain(jaxcomm.per_worker(optax.sgd(0.1)), local_sgd(3)))
      >>> check_local(optax.chain(jaxcomm.per_worker(optax.sgd(0.1)), local_sgd(4)))
      Traceback (most recent call last):
      AssertionError: law 'agreement': ...
    """
    require_transformation(tx)
    trial = LocalTrial(tx, period, workers, axis_name, agree)
    for law in local_laws_of(trial).values():
        law(trial)
