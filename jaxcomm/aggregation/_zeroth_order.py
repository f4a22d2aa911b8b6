"""Descent along random directions: workers send slopes of losses, and no gradients."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomm import _axis, _noise
from jaxcomm._contract import AxisName, PyTree
from jaxcomm._gradients import Backward, Taker, backward_of
from jaxcomm._require import checked, require_state
from jaxcomm._units import require_floating
from jaxcomm.aggregation._directions import Directions, Distribution, require_distribution
from jaxcomm.aggregation._slopes import (
    differences,
    mean_along,
    require_equal_params,
    require_smoothing,
)
from jaxcomm.aggregation._stages import averages_over
from jaxcomm.aggregation._warmup import require_steps

ZEROTH_ORDER = Taker(
    name="zeroth_order",
    divided="`zeroth_order` evaluates the loss along directions through all parameters, and not "
    "through the part that `optax.masked` or `optax.multi_transform` gives it. Place it before "
    "them.",
    touched="`zeroth_order` evaluates the loss itself, so there is no gradient that a "
    "transformation before or around it could use. Place it first in `optax.chain`, and what needs "
    "gradients after it. `jaxcomm.skip_nonfinite` may be around the chain.",
)


class ZerothOrderState(NamedTuple):
    """The state of `zeroth_order`, equal on all workers."""

    key: jax.Array  # key[], of the directions
    step: jax.Array  # uint32[]

    @property
    def taker(self) -> Taker:
        """That the transformation evaluates the loss."""
        return ZEROTH_ORDER


@checked("smoothing")
def zeroth_order(
    directions: int = 1,
    *,
    smoothing: jax.Array | float = 1e-3,
    distribution: Distribution = "gaussian",
    axis_name: AxisName = "data",
    seed: int = 0,
    key: jax.Array | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Descends along random directions, from the losses of workers and without gradients.

    .. math:: g = \frac{1}{K} \sum_{k=1}^{K} \bar c_k u_k, \qquad
              \bar c_k = \frac{1}{n} \sum_i \frac{f_i(x + \mu u_k) - f_i(x - \mu u_k)}{2 \mu}

    All workers draw the same directions :math:`u_k` from the key of the state, and send only the
    slopes :math:`c_{ik}`, :math:`4 K` bytes in one all-reduce for any number of parameters. Under
    :func:`jaxcomm.make_step` and :func:`jaxcomm.simulate`, the step evaluates the loss at
    :math:`2 K` points and runs no backward pass, so it also trains through losses without a useful
    derivative, or with gradients that vanish. Directions are drawn twice and never stored.

    For Gaussian directions, :math:`\mathbb{E}\, g = \nabla f_\mu(x)`, the gradient of the smoothed
    loss :math:`f_\mu(x) = \mathbb{E}\, f(x + \mu u)`. Signs give the gradient exactly on average if
    the loss is quadratic. For small :math:`\mu`,

    .. math:: \mathbb{E}\|g - \bar x\|^2 \le \frac{d + 1}{K} \|\bar x\|^2 \text{ (Gaussian)}, \qquad
              \frac{d - 1}{K} \|\bar x\|^2 \text{ (Rademacher)}

    for the mean gradient :math:`\bar x`. So a step of size :math:`\eta` must be :math:`d / K` times
    smaller than one along the gradient, unless the loss depends on few directions, as in
    fine-tuning. Do not use it where gradients are available and bytes allow them.

    Args:
      directions: :math:`K`, a Python int.
      smoothing: :math:`\mu`, positive; may be traced, and scheduled. Parameters of 16 bits round
        :math:`x \pm \mu u`, so :math:`\mu` must exceed their spacing.
      distribution: `"gaussian"`, or `"rademacher"` for signs, which have the smaller variance.
      axis_name: The mesh axis, or axes, of the workers.
      seed: Seed of the directions; may be traced.
      key: A typed threefry key, in place of `seed`.

    Returns:
      A transformation to place before the optimizer, in place of an aggregator. Updates are equal
      on all workers. In a step, the loss and other metrics are means over the points. A loss that
      is not finite on any worker makes the update NaN on all workers. `update(..., weight=w)` uses
      a weighted mean.

      Calls of `update` with gradients, and steps with `gradients=`, project these gradients on the
      directions: :math:`c_{ik} = \langle x_i, u_k \rangle`, the limit of small :math:`\mu`.

    Raises:
      ValueError: If an option is out of range. In a step, if another transformation before or
        around it needs gradients, if parameters differ by worker, or if the loss changes a model
        state. In `update`, if `axis_name` is not bound, or an update is already summed or not
        floating-point.

    Example:
      >>> import jax.numpy as jnp, optax, jaxcomm
      >>> tx = optax.chain(jaxcomm.zeroth_order(8, distribution="rademacher"), optax.sgd(0.5))
      >>> params = jnp.float32(3)
      >>> step = jaxcomm.simulate(lambda w, x: jnp.mean((w - x) ** 2), tx, workers=4)
      >>> params, _, _ = step(params, jaxcomm.init(tx, params, 4), jnp.ones(4))
      >>> print(jnp.round(params, 2))
      1.0

    References:
      Spall, `Multivariate Stochastic Approximation Using a Simultaneous Perturbation Gradient
      Approximation <https://doi.org/10.1109/9.119632>`_, 1992. Malladi et al., `Fine-Tuning
      Language Models with Just Forward Passes <https://arxiv.org/abs/2305.17333>`_, 2023 (MeZO).
      Nesterov, Spokoiny, `Random Gradient-Free Minimization of Convex Functions
      <https://doi.org/10.1007/s10208-015-9296-2>`_, 2017.

    Differs from the papers: MeZO perturbs parameters in place; here the perturbed parameters are
    temporary arrays.
    """
    require_steps("directions", directions)
    require_smoothing(smoothing)
    require_distribution(distribution)

    def init_fn(params: PyTree) -> ZerothOrderState:
        del params
        return ZerothOrderState(_noise.make_key(seed, key), jnp.zeros((), jnp.uint32))

    def directions_of(state: ZerothOrderState, like: PyTree) -> Directions:
        placed = _noise.placed_key(state.key, axis_name, like)
        return Directions(like, placed, state.step, directions, distribution)

    def evaluated(backward: Backward, state: ZerothOrderState, weight: Any) -> PyTree:
        if backward.has_model_state:
            raise ValueError(
                "`zeroth_order` does not support `has_model_state=True`: the model state would be "
                "that of perturbed parameters. Keep statistics fixed, as part of the batch."
            )
        params = backward.params
        axes = (*_axis.names(axis_name), *backward.inner)
        require_equal_params(params, axes, backward.is_own)
        drawn = directions_of(state, params)
        backward.value, slopes = differences(backward.loss, params, drawn, smoothing)
        gradient, backward.finite = mean_along(axes, drawn, slopes, weight)
        return jax.tree.map(lambda g, x: g.astype(x.dtype), gradient, params)

    @averages_over(axis_name, "directions through all leaves")
    def update_fn(
        updates: PyTree,
        state: ZerothOrderState,
        params: PyTree = None,
        *,
        weight: jax.Array | float | None = None,
        outer_axes: tuple[str, ...] = (),
        shard_axes: tuple[str, ...] = (),
        **extra_args: object,
    ) -> tuple[PyTree, ZerothOrderState]:
        del params, extra_args
        require_state(state, ZerothOrderState, "`zeroth_order`")
        after = state._replace(step=state.step + 1)
        backward = backward_of(updates)
        if backward is not None:
            backward.begin(updates)
            return evaluated(backward, state, weight), after
        require_floating(updates)
        _axis.require_local(updates, axis_name, (*shard_axes, *outer_axes))
        if not jax.tree.leaves(updates):
            return updates, after
        drawn = directions_of(state, updates)
        result, _ = mean_along(axis_name, drawn, drawn.projections(updates), weight)
        return jax.tree.map(lambda x, like: x.astype(like.dtype), result, updates), after

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
