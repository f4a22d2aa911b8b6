"""Deep Gradient Compression: sparse updates, and all that makes them as good as dense ones."""

import math
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from jaxcomm import _axis
from jaxcomm._base import AxisName, PyTree
from jaxcomm._buckets import require_floating
from jaxcomm._require import checked
from jaxcomm.aggregation import all_gather_mean, warmup
from jaxcomm.aggregation._options import AggregatorOptions, takes_options
from jaxcomm.aggregation._stages import averages_over
from jaxcomm.aggregation._warmup import require_steps
from jaxcomm.compression.feedback import error_feedback, momentum_correction
from jaxcomm.compression.feedback._local_clip import clip_together
from jaxcomm.compression.sparsifiers import top_k

_WARM_UP_RATIOS = (0.25, 0.0625, 0.015625, 0.004)


@checked()
@takes_options
def deep_gradient_compression(
    axis_name: AxisName = "data",
    *,
    ratio: float = 0.001,
    momentum: float = 0.9,
    nesterov: bool = False,
    masking: bool = True,
    clip: float | None = None,
    sample: float | None = None,
    warmup_every: int | None = None,
    **options: Unpack[AggregatorOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""Deep Gradient Compression: each worker sends the largest of what has gathered, momentum too.

    .. math:: u_i \gets \mu u_i + \hat g_i, \qquad v_i \gets v_i + u_i, \qquad
              M_i = \mathrm{top}_k |v_i|, \qquad \bar x = \frac{1}{n} \sum_i v_i \odot M_i,
              \qquad v_i, u_i \gets 0 \text{ on } M_i

    where :math:`\hat g_i` is the gradient clipped at :math:`c / \sqrt n`. Its parts: momentum
    correction, local clipping, momentum factor masking, a threshold from a sample, and a warm-up of
    the ratio. Momentum is within: **the optimizer behind is** `optax.sgd(learning_rate)`
    **without momentum**.

    A worker sends :math:`n - 1` payloads, 4 bytes and an index of about :math:`2 + \log_2 (d / k)`
    bits an entry; in warm-up the larger ones.

    Args:
      axis_name: The mesh axis, or axes, that number the workers.
      ratio: :math:`k / d`, in (0, 1]; at least one coordinate is sent.
      momentum: :math:`\mu` in [0, 1). At 0 this is top-k with error feedback.
      nesterov: Whether it is Nesterov's momentum.
      masking: Whether the velocity is forgotten where it was sent. Where all is sent (`ratio=1`)
        this is SGD with momentum without masking, and without momentum with it.
      clip: :math:`c`, the l2 norm to which the mean gradient is clipped, as if workers' gradients
        were independent: each clips its own, of all leaves together, to :math:`c / \sqrt n`, before
        it is weighted. Default: not at all. The paper clips for recurrent networks.
      sample: The part of the coordinates, such as 0.01, from which the threshold is estimated; then
        :math:`k` or fewer are sent. Default: the exact top-k.
      warmup_every: Steps of each stage of the warm-up: ratios of 25 %, 6.25 %, 1.5625 % and 0.4 %,
        those above `ratio`, come first. The paper's stages are of one epoch. Default: no warm-up.
      **options: As :class:`jaxcomm.AggregatorOptions` says; `scope` is of what the top k are taken:
        a `"leaf"`, as in the paper's code, or by default a `"bucket"` of leaves. With
        `diagnostics`, `residual_norm` is that of :math:`u_i` and :math:`v_i` together.

    Returns:
      A transformation to place before the optimizer, with the guarantees of
      :func:`jaxcomm.all_gather_mean`. It remembers two float32 arrays like the gradient on each
      worker.

    Raises:
      ValueError: If an option is out of range; in `update`, if `axis_name` is not bound, or an
        update is already summed.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> tx = jaxcomm.deep_gradient_compression(
      ...     ratio=0.5, momentum=0.5
      ... )  # And optax.sgd(0.1) behind it.
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

    Differs from the paper: indices are Elias-Fano codes and not runs of 16 bits; Nesterov's form
    is that of the paper's code; biases are made sparse as all else is (take them apart with
    `optax.partition` and :func:`jaxcomm.mean`).
    """

    if clip is not None and (not isinstance(clip, int | float) or not clip > 0):
        raise ValueError(f"`clip` must be a Python float over 0, got {clip!r}.")
    if warmup_every is not None:
        require_steps("warmup_every", warmup_every)

    def stage(ratio: float) -> optax.GradientTransformationExtraArgs:
        codec = error_feedback(top_k(ratio=ratio, sample=sample))
        return all_gather_mean(
            axis_name,
            momentum_correction(codec, momentum, nesterov=nesterov, masking=masking),
            **options,
        )

    sparse = stage(ratio)
    if warmup_every is not None:
        first = [stage(larger) for larger in _WARM_UP_RATIOS if larger > ratio]
        sparse = warmup([*first, sparse], warmup_every)
    if clip is None:
        return sparse

    @averages_over(axis_name)
    def update_fn(
        updates: PyTree, state: Any, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, Any]:
        require_floating(updates)
        leaves, treedef = jax.tree.flatten(updates)
        if leaves:
            most = clip / math.sqrt(_axis.size(axis_name))
            leaves = clip_together([leaf.astype(jnp.float32) for leaf in leaves], most)
        result, after = sparse.update(
            jax.tree.unflatten(treedef, leaves), state, params, **extra_args
        )
        return jax.tree.map(lambda x, like: x.astype(like.dtype), result, updates), after

    return optax.GradientTransformationExtraArgs(sparse.init, update_fn)
