"""Top-k with error feedback; and Deep Gradient Compression: momentum correction and warm-up."""

import math
from typing import Annotated, Any, Unpack

import jax
import jax.numpy as jnp
import optax

from jaxcomm import _axis
from jaxcomm._contract import Aggregator, AxisName, PyTree
from jaxcomm._require import Positive, Range, Share, checked
from jaxcomm._units import require_floating
from jaxcomm.aggregation import all_gather_mean, warmup
from jaxcomm.aggregation._coded import AggregatorOptions, takes_options
from jaxcomm.compression.feedback import error_feedback, momentum_correction
from jaxcomm.compression.feedback._momentum import clip_together
from jaxcomm.compression.sparsifiers import top_k


@checked
@takes_options
def top_k_sgd(
    axis_name: AxisName = "data",
    *,
    ratio: Share | None = None,
    k: Positive | None = None,
    decay: float | jax.Array = 1.0,
    residual_dtype: Any = "float32",
    value_dtype: Any = "float32",
    **options: Unpack[AggregatorOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""Sends the coordinates of largest magnitude, and adds the others to the next gradient.

    .. math:: a_i^t = x_i^t + \beta e_i^t, \qquad q_i^t = \mathrm{top}_k(a_i^t), \qquad
              e_i^{t+1} = a_i^t - q_i^t, \qquad \text{update } \frac{1}{n} \sum_i q_i^t

    A worker sends :math:`n - 1` times :math:`k` values of 4 bytes (2 for bfloat16), :math:`k`
    indices of about :math:`2 + \log_2(d / k)` bits, and 4 bytes for a flag that reports non-finite
    updates. :func:`jaxcomm.deep_gradient_compression` adds momentum to this method.

    Args:
      axis_name: The mesh axis, or axes, of the workers.
      ratio: :math:`k / d`, in (0, 1], of each bucket or leaf; at least one coordinate is sent.
      k: The number of coordinates of each bucket or leaf, in place of `ratio`.
      decay: :math:`\beta`, in (0, 1].
      residual_dtype: The dtype of :math:`e_i`: float32, or bfloat16 for half the memory.
      value_dtype: The dtype of the values on the wire: float32 or bfloat16.
      **options: See :class:`jaxcomm.aggregation.AggregatorOptions`.

    Returns:
      A transformation to place before the optimizer, with the guarantees of
      :func:`jaxcomm.all_gather_mean`. Each worker keeps one residual per coordinate. Its derivative
      is that of the sent values, for the selection that it made.

    Raises:
      ValueError: If an option is out of range; in `update`, if `axis_name` is not bound or an
        update is already summed.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> tx = jaxcomm.top_k_sgd(k=1)
      >>> average = lambda x: tx.update(x, tx.init(x))[0]
      >>> print(jax.vmap(average, axis_name="data")(jnp.array([[3.0, 1.0], [0.0, 4.0]])))
      [[1.5 2. ]
       [1.5 2. ]]

    References:
      Aji and Heafield, `Sparse Communication for Distributed Gradient Descent
      <https://arxiv.org/abs/1704.05021>`_, 2017.
      Stich et al., `Sparsified SGD with Memory <https://arxiv.org/abs/1809.07599>`_, 2018.

    Differs from the papers: the residual holds gradients, and the learning rate is applied to the
    mean.
    """
    codec = top_k(ratio=ratio, k=k, value_dtype=value_dtype)
    feedback = error_feedback(codec, decay=decay, residual_dtype=residual_dtype)
    return all_gather_mean(feedback, axis_name=axis_name, **options)


_WARM_UP_RATIOS = (0.25, 0.0625, 0.015625, 0.004)


@checked
@takes_options
def deep_gradient_compression(
    axis_name: AxisName = "data",
    *,
    ratio: float = 0.001,
    momentum: float = 0.9,
    nesterov: bool = False,
    momentum_masking: bool = True,
    max_norm: Annotated[float, Range(above=0)] | None = None,
    sample_ratio: float | None = None,
    warmup_every: Positive | None = None,
    **options: Unpack[AggregatorOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""Deep Gradient Compression: top-k of the accumulated velocity, with momentum correction.

    .. math:: u_i \gets \mu u_i + \hat g_i, \qquad v_i \gets v_i + u_i, \qquad
              M_i = \mathrm{top}_k |v_i|, \qquad \bar x = \frac{1}{n} \sum_i v_i \odot M_i,
              \qquad v_i, u_i \gets 0 \text{ on } M_i

    where :math:`\hat g_i` is the gradient clipped at :math:`c / \sqrt n`. The method combines
    momentum correction, local clipping, momentum factor masking, a threshold estimated from a
    sample, and a warm-up of the ratio. It includes the momentum: **use**
    `optax.sgd(learning_rate)` **without momentum as the optimizer after it**.

    A worker sends :math:`n - 1` payloads of :math:`k` entries. Each entry takes 4 bytes and an
    index of about :math:`2 + \log_2 (d / k)` bits. Payloads are larger during warm-up.

    Args:
      axis_name: The mesh axis, or axes, of the workers.
      ratio: :math:`k / d`, in (0, 1]; at least one coordinate is sent.
      momentum: :math:`\mu` in [0, 1). At 0 the method is top-k with error feedback.
      nesterov: Whether to use Nesterov momentum.
      momentum_masking: Whether to clear the velocity at the coordinates that were sent. With
        `ratio=1`, the method is SGD with momentum if `momentum_masking` is False, and SGD without
        momentum if it is True.
      max_norm: :math:`c`, the target l2 norm of the mean gradient. Each worker clips its own
        gradient, over all leaves together, to :math:`c / \sqrt n` before weighting; this assumes
        that gradients of different workers are independent. Default: no clipping. The paper clips
        for recurrent networks.
      sample_ratio: The fraction of coordinates, such as 0.01, from which to estimate the
        threshold. At most :math:`k` coordinates are then sent. Default: the exact top-k.
      warmup_every: The number of steps in each warm-up stage. Each stage has one of the ratios
        25 %, 6.25 %, 1.5625 % and 0.4 %. Ratios that are not above `ratio` are skipped. A stage in
        the paper is one epoch. Default: no warm-up.
      **options: See :class:`jaxcomm.aggregation.AggregatorOptions`. `scope` sets the unit of the
        top-k: a `"leaf"`, as in the paper's code, or a `"bucket"` of leaves, the default. With
        `diagnostics`, `residual_norm` is the norm of :math:`u_i` and :math:`v_i` together.

    Returns:
      A transformation to place before the optimizer, with the guarantees of
      :func:`jaxcomm.all_gather_mean`. Each worker keeps two float32 arrays per gradient array. Its
      derivative is that of the sent values, for the selection that it made.

    Raises:
      ValueError: If an option is out of range; in `update`, if `axis_name` is not bound or an
        update is already summed.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> tx = jaxcomm.deep_gradient_compression(
      ...     ratio=0.5, momentum=0.5
      ... )  # Followed by optax.sgd(0.1).
      >>> def two_steps(g):
      ...     first, state = tx.update(g, tx.init(g))
      ...     second, state = tx.update(g, state)
      ...     return first, second
      >>> for update in jax.vmap(two_steps, axis_name="data")(jnp.array([[2.0, 3.0]])):
      ...     print(update)
      [[0. 3.]]
      [[5. 0.]]

    References:
      Lin et al., `Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed
      Training <https://arxiv.org/abs/1712.01887>`_, 2018.

    Differs from the paper: indices are Elias-Fano codes instead of 16-bit run lengths. Nesterov
    momentum has the form of the paper's code. Biases are sparsified like all other leaves; separate
    them with `optax.partition` and :func:`jaxcomm.mean`.
    """

    def stage(ratio: float) -> optax.GradientTransformationExtraArgs:
        codec = error_feedback(top_k(ratio=ratio, sample_ratio=sample_ratio))
        return all_gather_mean(
            momentum_correction(
                codec, momentum, nesterov=nesterov, momentum_masking=momentum_masking
            ),
            axis_name=axis_name,
            **options,
        )

    sparse = stage(ratio)
    if warmup_every is not None:
        stages = [stage(larger) for larger in _WARM_UP_RATIOS if larger > ratio]
        sparse = warmup([*stages, sparse], warmup_every)
    if max_norm is None:
        return sparse

    def update_fn(
        updates: PyTree, state: Any, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, Any]:
        require_floating(updates)
        leaves, treedef = jax.tree.flatten(updates)
        if leaves:
            worker_norm = max_norm / math.sqrt(_axis.size(axis_name))
            leaves = clip_together([leaf.astype(jnp.float32) for leaf in leaves], worker_norm)
        result, new_state = sparse.update(
            jax.tree.unflatten(treedef, leaves), state, params, **extra_args
        )
        return jax.tree.map(lambda x, like: x.astype(like.dtype), result, updates), new_state

    return Aggregator(sparse.init, update_fn, axis_name, needs_whole="`max_norm`")
