"""Rows that are not zero: Parallax has servers for them, SparCML adds them by doubling."""

from collections.abc import Callable
from typing import Unpack

import jax
import optax

from jaxcomm._contract import AxisName, Codec, PyTree
from jaxcomm._require import Share, checked
from jaxcomm.aggregation import mean, recursive_doubling_mean, two_stage_mean
from jaxcomm.aggregation._coded import AggregatorOptions, takes_options
from jaxcomm.compression._support import Granularity
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.sparsifiers import nonzero


@checked
def parallax(
    axis_name: AxisName = "data",
    *,
    sparse: PyTree | Callable[[PyTree], PyTree],
    density: float,
    union_density: float,
    granularity: Granularity = "row",
    diagnostics: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Parallax: an all-reduce for dense leaves and sharded row servers for sparse leaves.

    :func:`jaxcomm.mean` averages dense leaves. For a sparse leaf, worker :math:`k` is the server of
    every :math:`n`-th row, starting from row :math:`k`:

    .. math:: r_k = \frac{1}{n} \sum_i C(x_{i,k}), \qquad \bar x = (C'(r_1), \ldots, C'(r_n))

    Each worker sends each server its nonzero rows and their indices (a reduce-scatter). Each server
    sends the nonzero rows of the mean to all workers (an all-gather). The mean is exact if all
    nonzero rows fit. Rows that do not fit stay in the residual of the worker or of the server and
    are sent later.

    A worker sends :math:`(n-1)/n` times two payloads: one with the capacity for its own rows, and
    one with the capacity for the union. In both, a coordinate takes 4 bytes, and the index of a row
    about :math:`2 - \log_2` (density) bits. The mean of the dense leaves adds its own bytes.

    Args:
      axis_name: The mesh axis, or axes, of the workers.
      sparse: Which leaves are sparse: a tree of bools with the structure of the updates, or a
        function from updates to such a tree, as in :func:`optax.masked`.
      density: The capacity for one worker's nonzero rows, as a fraction of each server's rows.
        Choose somewhat more than the largest density observed, since servers have uneven shares.
      union_density: The capacity for the rows that are nonzero on any worker, as a fraction of each
        server's rows.
      granularity: The unit of one index: a `"row"` (all but the first axis), an `"element"` of a
        server's part, or an int, the number of coordinates of a block of that part.
      diagnostics: Whether states have a field `diagnostics`; see :func:`jaxcomm.two_stage_mean`.
        Its `overflow` counts the rows that did not fit.

    Returns:
      A transformation to place before the optimizer: :func:`optax.partition` of
      :func:`jaxcomm.two_stage_mean` and :func:`jaxcomm.mean`, with their guarantees. Its derivative
      is that of the sent values, for the selection that it made.

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

    Differs from the paper: the workers are the servers. The capacity is fixed at trace time.
    Workers read all rows after a step, whereas the paper's workers request the rows of their next
    batch.
    """

    def rows_of(density: float) -> Codec:
        return error_feedback(nonzero(density=density, granularity=granularity))

    def labels(updates: PyTree) -> PyTree:
        mask = sparse(updates) if callable(sparse) else sparse
        return jax.tree.map(lambda is_sparse: "sparse" if is_sparse else "dense", mask)

    servers = two_stage_mean(
        rows_of(density),
        mean_codec=rows_of(union_density),
        ownership="cyclic",
        scope="leaf",
        diagnostics=diagnostics,
        axis_name=axis_name,
    )
    return optax.partition({"sparse": servers, "dense": mean(axis_name)}, labels)


@checked
@takes_options
def sparcml(
    axis_name: AxisName = "data",
    *,
    density: Share,
    union_density: Share | None = None,
    granularity: Granularity = "row",
    **options: Unpack[AggregatorOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""SparCML: the exact mean of sparse updates by recursive doubling of indices and values.

    .. math:: s_i^0 = x_i, \qquad s_i^{r+1} = C_{2^r}(s_i^r) + C_{2^r}(s_{i \oplus 2^r}^r), \qquad
              \bar x = \tfrac{1}{n}\, C_n(s^{\log_2 n})

    where :math:`C_m` sends the nonzeros of a sum of :math:`m` updates, up to a capacity of
    :math:`m` times `density`, or `union_density` if that is less. The mean is exact if all nonzeros
    fit. Those that do not fit stay in the residual of each worker that has the sum. They are sent
    later.

    In each round, a worker sends 4 bytes per coordinate of capacity and an index of about
    :math:`2 - \log_2` (density) bits per row or block; see :func:`jaxcomm.recursive_doubling_mean`.

    Args:
      axis_name: The mesh axis, or axes, of the workers.
      density: The capacity for one worker's nonzero rows, as a fraction of all rows: choose the
        largest density observed.
      union_density: The largest capacity for any sum. Default: 1. Updates that fit in the first
        round then fit in all rounds, except for rows that fit only because the capacity is rounded
        up.
      granularity: The unit of one index: a `"row"` (all but the first axis), an `"element"`, or an
        int, the number of coordinates of a block.
      **options: See :class:`jaxcomm.aggregation.AggregatorOptions`. `scope` is `"leaf"` by
        default, since a `"bucket"` has no rows. `diagnostics` also has `overflow`, the rows that
        did not fit.

    Returns:
      A transformation to place before the optimizer, with the guarantees of
      :func:`jaxcomm.recursive_doubling_mean`. Its derivative is that of the sent values, for the
      selection that it made.

    Raises:
      ValueError: If an option is out of range; in `update`, if a leaf has no rows, `axis_name` is
        not bound or an update is already summed.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> tx = jaxcomm.sparcml(density=0.25)
      >>> average = jax.jit(jax.vmap(lambda x: tx.update(x, tx.init(x))[0], axis_name="data"))
      >>> x = jnp.zeros((2, 4, 1)).at[0, 1].set(2.0).at[1, 3].set(4.0)
      >>> print(average(x)[0].T)
      [[0. 1. 0. 2.]]

    References:
      Renggli et al., `SparCML: High-Performance Sparse Communication for Machine Learning
      <https://doi.org/10.1145/3295500.3356222>`_, 2019.

    Differs from the paper: the capacity is fixed at trace time, as XLA requires. A sum never
    switches to a dense form between rounds, which would save only the indices. Rows that do not fit
    are kept in the residual.
    """
    max_density = 1.0 if union_density is None else union_density

    def codec_for(added: int) -> Codec:
        capacity = min(added * density, max_density)
        codec = nonzero(density=capacity, granularity=granularity)
        return error_feedback(codec) if capacity < 1 else codec.drop_overflow or codec

    leaf_options: AggregatorOptions = {**options, "scope": options.get("scope") or "leaf"}
    return recursive_doubling_mean(codec_for, axis_name=axis_name, **leaf_options)
