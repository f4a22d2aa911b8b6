"""SparCML: recursive doubling of sparse updates, with payloads that grow with each round."""

from typing import Unpack

import optax

from jaxcomm._contract import AxisName, Codec
from jaxcomm._require import Share, checked
from jaxcomm.aggregation import recursive_doubling_mean
from jaxcomm.aggregation._coded import AggregatorOptions, takes_options
from jaxcomm.compression._support import Granularity
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.sparsifiers import nonzero


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
