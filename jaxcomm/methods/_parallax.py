"""Parallax: dense leaves in an all-reduce, sparse ones by way of servers of their rows."""

from collections.abc import Callable

import jax
import optax

from jaxcomm._base import AxisName, Codec, PyTree
from jaxcomm._require import checked
from jaxcomm.aggregation import mean, two_stage_mean
from jaxcomm.compression._support import Granularity
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.sparsifiers import nonzero


@checked()
def parallax(
    axis_name: AxisName = "data",
    *,
    sparse: PyTree | Callable[[PyTree], PyTree],
    density: float,
    union_density: float,
    granularity: Granularity = "row",
    diagnostics: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Parallax: each leaf goes the way that suits it, sparse ones by sharded servers of rows.

    Dense leaves are averaged by :func:`jaxcomm.mean`. Of a sparse leaf, worker :math:`k` is the
    server of every :math:`n`-th row from the :math:`k`-th on:

    .. math:: r_k = \frac{1}{n} \sum_i C(x_{i,k}), \qquad \bar x = (C'(r_1), \ldots, C'(r_n))

    Each worker sends to each server its rows that are not zero, with their indices (a
    reduce-scatter), and each server the rows of the mean that are not (an all-gather). It is exact
    where all fits; what does not is remembered, at either end, and sent later.

    A worker sends :math:`(n-1)/n` times the coordinates that there is room for, of its own and of
    the union, 4 bytes each, with about :math:`2 - \log_2` (density) bits for the index of a row;
    and what the mean of dense leaves takes.

    Args:
      axis_name: The mesh axis, or axes, that number the workers.
      sparse: Which leaves are: a tree of bools like the updates, or a function from them to one, as
        :func:`optax.masked` takes.
      density: Of one worker's rows, for which there is room, of each server: somewhat over the
        largest that was seen, as servers have unlike shares.
      union_density: Of the rows that are not zero on all workers together, likewise.
      granularity: What is a row: all but the first axis, `"row"`; an `"element"` of a server's
        part; or a block of so many coordinates of it.
      diagnostics: Whether states have a field `diagnostics` that tells of the step; see
        :func:`jaxcomm.two_stage_mean`. `overflow` counts the rows without room.

    Returns:
      A transformation to place before the optimizer: :func:`optax.partition` of
      :func:`jaxcomm.two_stage_mean` and :func:`jaxcomm.mean`, with their guarantees.

    Raises:
      ValueError: If an option is out of range; in `update`, if `axis_name` is not bound or an
        update is already summed.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> tx = jaxcomm.parallax(sparse={"a": True, "b": False}, density=0.5, union_density=0.5)
      >>> average = jax.jit(jax.vmap(lambda x: tx.update(x, tx.init(x))[0], axis_name="data"))
      >>> x = {"a": jnp.zeros((2, 4, 1)).at[0, 1].set(2.0).at[1, 2].set(4.0), "b": jnp.eye(2)}
      >>> updates = average(x)
      >>> print(updates["a"][0].T, updates["b"][0])
      [[0. 1. 2. 0.]] [0.5 0.5]

    References:
      Kim et al., `Parallax: Sparsity-aware Data Parallel Training of Deep Neural Networks
      <https://arxiv.org/abs/1808.02621>`_, 2019.

    Differs from the paper: servers are the workers themselves; room is fixed while tracing; all
    rows are read after a step, where the paper's workers ask for those of their next batch.
    """

    def rows_of(density: float) -> Codec:
        return error_feedback(nonzero(density=density, granularity=granularity))

    def labels(updates: PyTree) -> PyTree:
        mask = sparse(updates) if callable(sparse) else sparse
        return jax.tree.map(lambda is_sparse: "sparse" if is_sparse else "dense", mask)

    servers = two_stage_mean(
        axis_name,
        rows_of(density),
        mean_codec=rows_of(union_density),
        layout="cyclic",
        scope="leaf",
        diagnostics=diagnostics,
    )
    return optax.partition({"sparse": servers, "dense": mean(axis_name)}, labels)
