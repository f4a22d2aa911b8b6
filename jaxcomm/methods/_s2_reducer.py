"""S2 Reducer: sparse updates by a bitmap and a count-sketch."""

from typing import Any, Unpack

import optax

from jaxcomm._base import AxisName, Codec
from jaxcomm._require import checked
from jaxcomm.aggregation import all_reduce_mean
from jaxcomm.aggregation._options import AggregatorOptions, takes_options
from jaxcomm.compression._overflow import Policy
from jaxcomm.compression._support import Granularity
from jaxcomm.compression.sketches import s2_codes, s2_sketch
from jaxcomm.compression.sketches._s2_sketch import Decode


def _codec(decode: Decode, bits: int, **options: Any) -> Codec:
    if bits == 32:
        return s2_sketch(decode=decode, **options)
    if bits != 8:
        raise ValueError(f"`bits` must be 8 or 32, got {bits!r}.")
    if decode != "peel":
        raise ValueError(
            f"`bits`=8 needs `decode`='peel', got {decode!r}: a cell of the table is known modulo "
            "256, which is enough for a coordinate that is alone in it, and not for an estimate."
        )
    return s2_codes(**options)


@checked()
@takes_options
def s2_reducer(
    axis_name: AxisName = "data",
    *,
    density: float,
    ratio: float,
    rows: int = 1,
    granularity: Granularity = "row",
    decode: Decode = "mean",
    bits: int = 32,
    overflow: Policy = "nan",
    **options: Unpack[AggregatorOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""S2 Reducer: the mean of sparse updates, from a bitmap and a sketch of what is not zero.

    .. math:: U = \bigcup_i \operatorname{supp}(x_i), \qquad
              S_{rj} = \frac{1}{n} \sum_{i=1}^n \sum_{t \in U : h_r(t) = j} \sigma_r(t) x_{it},
              \qquad \hat x_t = \operatorname{mean}_r\, \sigma_r(t) S_{r h_r(t)} \;\; (t \in U)

    and exactly 0 outside :math:`U`. The bitmap of the union is agreed first, one bit a row (or
    block, or coordinate); then tables are added. Hashes are drawn anew in each step, so that the
    estimate is unbiased over steps, with

    .. math:: \mathbb{E}\|\hat x - \bar x\|^2 \le \frac{K - 1}{c} \|\bar x\|^2

    for :math:`K = |U|` coordinates and :math:`c` cells in all, however they are divided into rows;
    the median of rows costs more than the mean unless few coordinates are far larger than others.
    Should more coordinates come than `density` foresaw, the update is NaN on all workers, unless
    they are to be dropped: then as many as were foreseen are sent, in a row from a random one.

    `decode="peel"` solves for the values: support and hashes are known to all, so a cell that holds
    one coordinate gives it, which is subtracted elsewhere, and so on. With three rows and `ratio`
    1.25 or more all are found (below 1.2 half are lost), to rounding relative to the largest value
    met on the way. What is not found is estimated from what is then left in the table. With
    `bits=8`, codes of :func:`jaxcomm.global_qsgd` are sketched in place of values, and tables are
    added modulo 256; what is not found is
    lost, so that the update is NaN, unless it is to be dropped; see
    :func:`jaxcomm.compression.sketches.s2_codes` for how often.

    A worker sends :math:`2 (n-1)/n` times 4 `ratio` bytes (8 bits: `ratio` bytes) a coordinate
    foreseen and one bit a part, and 4 bytes for a flag.

    Meant for leaves that are sparse. Which are is yours to say:

    .. code-block:: python

      optax.partition(
          {
              "sparse": jaxcomm.s2_reducer(density=0.05, ratio=1.4, rows=3, decode="peel"),
              "dense": jaxcomm.mean(),
          },
          {"embedding": "sparse", "lstm": "dense", "softmax": "dense"},
      )

    Args:
      axis_name: The mesh axis, or axes, that number the workers.
      density: Of the union over workers, as it is foreseen: :math:`K / d`, in (0, 1].
      ratio: Cells of the table for each coordinate foreseen.
      rows: Of the table: 1 for `"mean"`; 3 for `"peel"`.
      granularity: What has one bit in the bitmap: a `"row"` (all but the first axis), an
        `"element"`, or a block of so many coordinates. :math:`U` is a union of these.
      decode: `"mean"` or `"median"` of the rows' estimates, or `"peel"`.
      bits: 32, or 8 with `"peel"`.
      overflow: Of more coordinates than are foreseen, or with `bits=8` of some that do not peel:
        `"nan"`; or `"drop"` to lose those that have no room, or do not peel.
      **options: As :class:`jaxcomm.AggregatorOptions` says; `scope` is `"leaf"` by default: a
        `"bucket"` has no rows. With `diagnostics`, besides `compression_error`, `density` and
        `residual_norm`: `union_density`, the density to be foreseen; `expected_error`,
        :math:`(K - 1)/c` of estimates, and what is dropped; `unpeeled`, the part of the union that
        was not solved for; `overflow`, the part that was not foreseen, or with `bits=8` is lost.

    Returns:
      A transformation to place before the optimizer, with the guarantees of
      :func:`jaxcomm.all_reduce_mean`.

    Raises:
      ValueError: If an option is out of range; in `update`, if a leaf has no rows, `axis_name` is
        not bound or an update is already summed.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> tx = jaxcomm.s2_reducer(density=0.5, ratio=2, rows=3, decode="peel")
      >>> average = jax.jit(jax.vmap(lambda x: tx.update(x, tx.init(x))[0], axis_name="data"))
      >>> x = jnp.zeros((2, 8, 3)).at[0, 1].set(2.0).at[1, 6].set(4.0)
      >>> print(average(x)[0].T)
      [[0. 1. 0. 0. 0. 0. 2. 0.]
       [0. 1. 0. 0. 0. 0. 2. 0.]
       [0. 1. 0. 0. 0. 0. 2. 0.]]

    References:
      Ge et al., `S2 Reducer: High-Performance Sparse Communication to Accelerate Distributed Deep
      Learning <https://arxiv.org/abs/2110.02140>`_, 2021.

    Differs from the paper and its released code: the bitmap is of bits, not of floats; it is agreed
    before encoding; hashes are anew in each step; each step has a table of its own; an even number
    of rows is decoded without bias. Peeling and codes of 8 bits are our own.
    """
    codec = _codec(
        decode,
        bits,
        density=density,
        ratio=ratio,
        rows=rows,
        granularity=granularity,
        overflow=overflow,
    )
    of_leaves: AggregatorOptions = {**options, "scope": options.get("scope") or "leaf"}
    return all_reduce_mean(axis_name, codec, **of_leaves)
