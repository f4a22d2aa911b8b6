"""Loss scaling, which keeps small gradients representable in float16."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm import _axis
from jaxcomm._contract import AxisName, PyTree
from jaxcomm._gradients import LossFn, local_value_and_grad, parts_of_value

_MOST_SCALE = 2.0**24


class LossScaled(NamedTuple):
    """A model state with a loss scale."""

    scale: jax.Array  # float32[], a power of two from 1 to 2^24
    finite_steps: jax.Array  # int32[], steps since the scale last changed
    model_state: PyTree = ()  # what the loss takes and returns


def loss_scaled(model_state: PyTree = (), scale: float = 2.0**15) -> LossScaled:
    """The model state of :func:`loss_scaled_gradients` before the first step.

    Args:
      model_state: The model state of the loss; `()` if it has none.
      scale: The first scale; float32[] in the state.

    Returns:
      A model state for `make_step(..., has_model_state=True)`: `scale`, float32[], a power of two
      from 1 to 2^24; `finite_steps`, int32[], steps since it last changed; and `model_state`, that
      of the loss.

    Raises:
      ValueError: If `scale` is not a power of two from 1 to 2^24. Others would round gradients.

    Example:
      >>> from jaxcomm.training import loss_scaled
      >>> print(loss_scaled().scale)
      32768.0
    """
    if not (1 <= scale <= _MOST_SCALE and math.frexp(scale)[0] == 0.5):
        raise ValueError(f"`scale` must be a power of two from 1 to 2**24, got {scale!r}.")
    return LossScaled(jnp.float32(scale), jnp.int32(0), model_state)


def loss_scaled_gradients(
    loss_fn: LossFn,
    params: PyTree,
    batch: PyTree,
    key: jax.Array | None = None,
    *,
    model_state: LossScaled,
    has_aux: bool = False,
    growth_interval: int = 2000,
    axis_name: AxisName = "data",
) -> tuple[PyTree, PyTree]:
    r"""The `gradients=` of :func:`jaxcomm.make_step` for losses that compute in float16.

    .. math:: g_i = \frac{1}{s} \nabla (s f_i)(x), \qquad
              s' = \begin{cases} s / 2 & \text{if any } g_j \text{ is not finite} \\
              2 s & \text{after } k \text{ finite steps} \\ s & \text{else} \end{cases}

    The scale stays between 1 and :math:`2^{24}`. It is equal on all workers: they send one float32
    per step, a minimum. Wrap the optimizer in :func:`jaxcomm.skip_nonfinite`, which skips the steps
    in which the scale was too large. Keep `params` in float32, and cast them to float16 in
    `loss_fn`.

    Args:
      loss_fn: `(params, model_state, batch) -> (loss, model_state)`; with `has_aux=True`, `(loss,
        (model_state, aux))`; with a key as the last argument if the step is called with one.
      params: Parameters, in float32.
      batch: This worker's batch.
      key: This worker's key.
      model_state: The result of :func:`loss_scaled`, or the model state of the previous step.
      has_aux: Whether `loss_fn` returns metrics. Set this and the following arguments with
        `functools.partial`.
      growth_interval: :math:`k`, the number of finite steps before the scale is doubled.
      axis_name: All axes of the mesh.

    Returns:
      `((loss, model_state), gradient)`, or `((loss, (model_state, aux)), gradient)`. The gradient
      has the dtypes of `params`.

    Raises:
      ValueError: If `axis_name` lacks an axis of the mesh.

    Example:
      >>> import jax.numpy as jnp, optax, jaxcomm
      >>> from jaxcomm.training import loss_scaled, loss_scaled_gradients
      >>> def loss(w, model_state, x):  # The gradient of this, 1e-8, is 0 in float16.
      ...     return jnp.mean(w.astype(jnp.float16) * x * jnp.float16(1e-4)), model_state
      >>> tx = jaxcomm.skip_nonfinite(optax.chain(jaxcomm.mean(), optax.sgd(1.0)))
      >>> step = jaxcomm.simulate(
      ...     loss, tx, 2, has_model_state=True, gradients=loss_scaled_gradients
      ... )
      >>> w, x = jnp.float32(0), jnp.full(2, 1e-4, jnp.float16)
      >>> w, state, _, _ = step(w, loss_scaled(), jaxcomm.init(tx, w, 2), x)
      >>> print(f"{w:.1e}")
      -1.0e-08

    References:
      Micikevicius et al., `Mixed Precision Training <https://arxiv.org/abs/1710.03740>`_, 2018.
    """
    scale = model_state.scale

    def scaled(params: PyTree, *args: PyTree) -> Any:
        value = loss_fn(params, *args)
        loss, state, aux = parts_of_value(value, True, has_aux)
        loss = jnp.asarray(loss).astype(jnp.float32)
        return loss * scale, (loss, state, aux)

    (_, (loss, state, aux)), gradient = local_value_and_grad(
        scaled, has_aux=True, axis_name=axis_name
    )(params, model_state.model_state, batch, *([] if key is None else [key]))
    if others := sorted(_axis.manual() - {*_axis.names(axis_name)}):
        raise ValueError(
            f"`axis_name`={axis_name!r} must name all axes of the mesh, but lacks {others}: use "
            "`functools.partial(loss_scaled_gradients, axis_name=...)`."
        )

    def unscaled(g: jax.Array) -> jax.Array:
        # The scale may be infinite in float16, and its reciprocal denormal.
        wide = g.astype(jnp.float32) if g.dtype.itemsize < 4 else g
        return (wide / scale.astype(wide.dtype)).astype(g.dtype)

    gradient = jax.tree.map(unscaled, gradient)
    finite = jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(gradient)]).all()
    own = _axis.as_varying(finite.astype(jnp.float32), axis_name)
    with jax.named_scope("loss_scaled_gradients/flag"):
        all_finite = lax.pmin(own, _axis.names(axis_name)) > 0
    steps = jnp.where(all_finite, model_state.finite_steps + 1, 0)
    grows = steps >= growth_interval
    factor = jnp.where(all_finite, jnp.where(grows, 2, 1), 0.5).astype(jnp.float32)
    new = LossScaled(jnp.clip(scale * factor, 1, _MOST_SCALE), jnp.where(grows, 0, steps), state)
    return (loss, (new, aux) if has_aux else new), gradient
