"""SparCML: a sum of sparse updates whose payloads grow as it does."""

from typing import Unpack

import optax

from jaxcomm._base import AxisName, Codec
from jaxcomm._require import checked
from jaxcomm.aggregation import recursive_doubling_mean
from jaxcomm.aggregation._options import AggregatorOptions, takes_options
from jaxcomm.compression._support import Granularity, require_density
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.sparsifiers import nonzero


@checked()
@takes_options
def sparcml(
    axis_name: AxisName = "data",
    *,
    density: float,
    union_density: float | None = None,
    granularity: Granularity = "row",
    **options: Unpack[AggregatorOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""SparCML: the exact mean of sparse updates, by recursive doubling of indices and values.

    .. math:: s_i^0 = x_i, \qquad s_i^{r+1} = C_{2^r}(s_i^r) + C_{2^r}(s_{i \oplus 2^r}^r), \qquad
              \bar x = \tfrac{1}{n}\, C_n(s^{\log_2 n})

    where :math:`C_m` sends what is not zero in a sum of :math:`m` updates, as far as there is room:
    for :math:`m` times `density`, or `union_density` if that is less. It is exact where all fits.
    What does not is remembered, on each worker that has the sum, and sent later.

    A worker sends 4 bytes for each coordinate that there is room for in each round, with about
    :math:`2 - \log_2` (density) bits for the index of a part; see
    :func:`jaxcomm.recursive_doubling_mean`.

    Args:
      axis_name: The mesh axis, or axes, that number the workers.
      density: Of one worker's parts, for which there is room: the largest that was seen.
      union_density: The most for which there is room in any sum. Default: no bound but 1, so that
        what has fitted once fits in all rounds, but for parts that rounding up has let in.
      granularity: What has one index: a `"row"` (all but the first axis), an `"element"`, or a
        block of so many coordinates.
      **options: As :class:`jaxcomm.AggregatorOptions` says; `scope` is `"leaf"` by default: a
        `"bucket"` has no rows. With `diagnostics`, also `overflow`, the parts without room.

    Returns:
      A transformation to place before the optimizer, with the guarantees of
      :func:`jaxcomm.recursive_doubling_mean`.

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

    Differs from the paper: room is fixed while tracing, as XLA needs it; a sum never changes to a
    dense form on the way, of which only indices would be saved; what has no room comes back.
    """
    require_density(density)
    most = 1.0 if union_density is None else union_density
    require_density(most)

    def codec_for(added: int) -> Codec:
        room = min(added * density, most)
        codec = nonzero(density=room, granularity=granularity)
        return error_feedback(codec) if room < 1 else codec.drop_overflow or codec

    of_leaves: AggregatorOptions = {**options, "scope": options.get("scope") or "leaf"}
    return recursive_doubling_mean(axis_name, codec_for, **of_leaves)
