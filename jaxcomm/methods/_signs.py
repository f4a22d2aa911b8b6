"""One bit a coordinate: votes on signs, and signs under error feedback."""

from typing import Any, Unpack

import jax
import optax

from jaxcomm._base import AxisName
from jaxcomm._require import checked
from jaxcomm.aggregation import all_gather_mean, majority_vote
from jaxcomm.aggregation._options import AggregatorOptions, takes_options
from jaxcomm.compression.feedback import error_feedback, momentum
from jaxcomm.compression.quantizers import scaled_signs, signs


@checked()
def sign_sgd(
    axis_name: AxisName = "data", *, seed: int = 0, key: jax.Array | None = None
) -> optax.GradientTransformationExtraArgs:
    r"""signSGD with majority vote: each coordinate moves by the sign that most workers see.

    .. math:: v = \operatorname{sgn} \sum_{i=1}^n \operatorname{sgn}(x_i)

    :func:`jaxcomm.majority_vote` under its paper's name: coins decide on zeros and ties, and it
    sends 2 (n-1)/n times a bit a coordinate. Biased, and what is lost does not come back.

    Args:
      axis_name: The mesh axis, or axes, that number the workers.
      seed: Seed of the coins; may be traced.
      key: A typed threefry key, in place of `seed`.

    Returns:
      A transformation to place before the optimizer, such as `optax.sgd(1e-3)`.

    Raises:
      ValueError: As :func:`jaxcomm.majority_vote` does.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jaxcomm
      >>> tx = optax.chain(jaxcomm.sign_sgd(), optax.sgd(0.5))
      >>> update = lambda g: tx.update(g, tx.init(g))[0]
      >>> gradients = jnp.array([[0.1, -2.0], [0.2, 5.0], [-9.0, -1.0]])
      >>> print(jax.vmap(update, axis_name="data")(gradients)[0])
      [-0.5  0.5]

    References:
      Bernstein et al., `signSGD: Compressed Optimisation for Non-Convex Problems
      <https://arxiv.org/abs/1802.04434>`_, 2018.
    """
    return majority_vote(axis_name, seed=seed, key=key)


@checked()
def signum(
    axis_name: AxisName = "data",
    *,
    decay: float = 0.9,
    seed: int = 0,
    key: jax.Array | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Signum with majority vote: workers vote by the signs of their momentum.

    .. math:: m_i^t = \beta\, m_i^{t-1} + (1 - \beta)\, x_i^t, \qquad
              v^t = \operatorname{sgn} \sum_{i=1}^n \operatorname{sgn}(m_i^t)

    Momentum stands before the vote, so that the optimizer after it needs none. Bytes are those of
    :func:`jaxcomm.majority_vote`, :math:`2 (n-1)/n` times a bit a coordinate and a flag.

    Args:
      axis_name: The mesh axis, or axes, that number the workers.
      decay: :math:`\beta` in [0, 1), a Python float; 0 is :func:`sign_sgd`.
      seed: Seed of the coins that decide on zeros and ties; may be traced.
      key: A typed threefry key, in place of `seed`.

    Returns:
      A transformation to place before the optimizer, such as `optax.sgd(1e-3)`. Each worker
      remembers one float32 a coordinate. A non-finite coordinate on any worker makes the update NaN
      on all, and enters nobody's momentum.

    Raises:
      ValueError: If `decay` is out of range; in `update`, as :func:`jaxcomm.majority_vote` does.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> tx = jaxcomm.signum(decay=0.5)
      >>> def two_steps(first, second):
      ...     _, state = tx.update(first, tx.init(first))
      ...     return tx.update(second, state)[0]
      >>> print(jax.vmap(two_steps, axis_name="data")(jnp.array([8.0]), jnp.array([-1.0])))
      [1.]

    References:
      Bernstein et al., `signSGD: Compressed Optimisation for Non-Convex Problems
      <https://arxiv.org/abs/1802.04434>`_, 2018.
      Bernstein et al., `signSGD with Majority Vote is Communication Efficient and Fault Tolerant
      <https://arxiv.org/abs/1810.05291>`_, 2019.
    """
    return majority_vote(axis_name, codec=momentum(signs(), decay), seed=seed, key=key)


@checked("decay")
@takes_options
def ef_sign_sgd(
    axis_name: AxisName = "data",
    *,
    decay: float = 1.0,
    residual_dtype: Any = "float32",
    **options: Unpack[AggregatorOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""EF-signSGD: signs times the mean magnitude of a leaf, with error feedback.

    .. math:: a_i^t = x_i^t + e_i^t, \qquad
              m_i^t = \frac{\|a_i^t\|_1}{d} \operatorname{sgn}(a_i^t), \qquad
              e_i^{t+1} = a_i^t - m_i^t

    and the update is the mean of :math:`m_i^t`. Signs of unlike magnitudes do not add, so that they
    are gathered: a worker sends :math:`n - 1` times 1 bit a coordinate and 4 bytes a leaf, and 4
    for a flag.

    Args:
      axis_name: The mesh axis, or axes, that number the workers.
      decay: What is kept of the residual from step to step, in (0, 1].
      residual_dtype: Of the residual: float32, or bfloat16 for half the memory.
      **options: As :class:`jaxcomm.AggregatorOptions` says; `scope`, which shares a magnitude, is
        `"leaf"` by default.

    Returns:
      A transformation to place before the optimizer, with the guarantees of
      :func:`jaxcomm.all_gather_mean`. Each worker remembers one number a coordinate.

    Raises:
      ValueError: If an option is out of range; in `update`, if `axis_name` is not bound, or an
        update is already summed.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> tx = jaxcomm.ef_sign_sgd()
      >>> average = lambda x: tx.update(x, tx.init(x))[0]
      >>> print(jax.vmap(average, axis_name="data")(jnp.array([[3.0, -1.0], [0.0, 4.0]])))
      [[2. 0.]
       [2. 0.]]

    References:
      Karimireddy et al., `Error Feedback Fixes SignSGD and other Gradient Compression Schemes
      <https://arxiv.org/abs/1901.09847>`_, 2019.

    Differs from the paper: the learning rate stands outside, so that a residual counts at the rate
    of the step in which it is sent; sgn(0) = +1.
    """
    if options.get("scope") == "tree":
        raise ValueError(
            "`scope` must be 'leaf' or 'bucket', got 'tree': a magnitude that unlike units share "
            "keeps the error of none within its bound."
        )
    return all_gather_mean(
        axis_name,
        error_feedback(scaled_signs(), decay=decay, residual_dtype=residual_dtype),
        **options,
    )
