"""S2 Reducer: sparse updates as a bitmap and a count-sketch."""

from typing import Any, Literal, Unpack

import optax

from jaxcomm._contract import AxisName, Codec
from jaxcomm._require import checked
from jaxcomm.aggregation import all_reduce_mean
from jaxcomm.aggregation._coded import AggregatorOptions, takes_options
from jaxcomm.compression._overflow import Policy
from jaxcomm.compression._support import Granularity
from jaxcomm.compression.sketches import s2_codes, s2_sketch
from jaxcomm.compression.sketches._s2_sketch import Decode


def _codec(decode: Decode, bits: int, **options: Any) -> Codec:
    if bits == 32:
        return s2_sketch(decode=decode, **options)
    if decode != "peel":
        raise ValueError(f"`bits`=8 needs `decode`='peel', got {decode!r}: sums are modulo 256.")
    return s2_codes(**options)


@checked
@takes_options
def s2_reducer(
    axis_name: AxisName = "data",
    *,
    density: float,
    sketch_ratio: float,
    rows: int = 1,
    granularity: Granularity = "row",
    decode: Decode = "mean",
    bits: Literal[8, 32] = 32,
    overflow: Policy = "nan",
    **options: Unpack[AggregatorOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""S2 Reducer: the mean of sparse updates, from a bitmap and a sketch of the nonzeros.

    .. math:: U = \bigcup_i \operatorname{supp}(x_i), \qquad
              S_{rj} = \frac{1}{n} \sum_{i=1}^n \sum_{t \in U : h_r(t) = j} \sigma_r(t) x_{it},
              \qquad \hat x_t = \operatorname{mean}_r\, \sigma_r(t) S_{r h_r(t)} \;\; (t \in U)

    and exactly 0 outside :math:`U`. Workers first combine the bitmap of the union, with one bit per
    row (or block, or coordinate), and then add their tables. Each step draws new hashes, so the
    estimate is unbiased over steps, with

    .. math:: \mathbb{E}\|\hat x - \bar x\|^2 \le \frac{K - 1}{c} \|\bar x\|^2

    for :math:`K = |U|` coordinates and :math:`c` cells in total, for any number of rows. The median
    of rows has a larger error than the mean, unless a few coordinates are far larger than the rest.
    If the union exceeds `density`, the update is NaN on all workers. With `overflow="drop"`,
    workers send only consecutive rows (or blocks) of :math:`U`, as many as fit. They start at a
    random one and wrap around.

    `decode="peel"` solves for the values. All workers have the support and the hashes. A cell that
    holds a single coordinate gives its value, which is subtracted from the other cells, and so on.
    With three rows and a `sketch_ratio` of 1.25 or more this finds all values (below 1.2, half are
    lost), up to rounding relative to the largest intermediate value. Coordinates that do not peel
    are estimated from the remaining table.

    With `bits=8`, the tables hold codes of :func:`jaxcomm.global_qsgd` instead of values and are
    added modulo 256. Coordinates that do not peel are then lost: the update is NaN, or with
    `overflow="drop"` they are dropped. See :func:`jaxcomm.compression.sketches.s2_codes` for how
    often this happens.

    A worker sends :math:`2 (n-1)/n` times 4 `sketch_ratio` bytes (`sketch_ratio` bytes with
    `bits=8`) per coordinate of capacity and one bit per row or block. It also sends 4 bytes for a
    flag that reports non-finite updates.

    Use this for sparse leaves only, and select them yourself:

    .. code-block:: python

      optax.partition(
          {
              "sparse": jaxcomm.s2_reducer(
                  density=0.05, sketch_ratio=1.4, rows=3, decode="peel"
              ),
              "dense": jaxcomm.mean(),
          },
          {"embedding": "sparse", "lstm": "dense", "softmax": "dense"},
      )

    Args:
      axis_name: The mesh axis, or axes, of the workers.
      density: The capacity for the union over workers, :math:`K / d`, in (0, 1].
      sketch_ratio: Cells of the table per coordinate of capacity.
      rows: Rows of the table. Use 1 for `"mean"` and 3 for `"peel"`.
      granularity: The unit of one bit in the bitmap: a `"row"` (all but the first axis), an
        `"element"`, or an int, the number of coordinates of a block. :math:`U` is a union of these.
      decode: `"mean"` or `"median"` of the rows' estimates, or `"peel"`.
      bits: 32, or 8 with `"peel"`.
      overflow: What happens if the union exceeds the capacity or, with `bits=8`, if some
        coordinates do not peel: `"nan"` makes the update NaN, `"drop"` drops these coordinates.
      **options: See :class:`jaxcomm.aggregation.AggregatorOptions`. `scope` is `"leaf"` by default,
        since a `"bucket"` has no rows. `diagnostics` adds to `compression_error`, `density` and
        `residual_norm`: `union_density`, the density of the union; `overflow`, the fraction of the
        union over capacity or, with `bits=8`, lost; with `"peel"`, `unpeeled`, the fraction of the
        union that did not peel; otherwise `expected_error`, :math:`(K - 1)/c` for the estimates,
        plus the dropped fraction.

    Returns:
      A transformation to place before the optimizer, with the guarantees of
      :func:`jaxcomm.all_reduce_mean`.

    Raises:
      ValueError: If an option is out of range; in `update`, if a leaf has no rows, `axis_name` is
        not bound or an update is already summed.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> tx = jaxcomm.s2_reducer(density=0.5, sketch_ratio=2, rows=3, decode="peel")
      >>> average = jax.jit(jax.vmap(lambda x: tx.update(x, tx.init(x))[0], axis_name="data"))
      >>> x = jnp.zeros((2, 8, 3)).at[0, 1].set(2.0).at[1, 6].set(4.0)
      >>> print(average(x)[0].T)
      [[0. 1. 0. 0. 0. 0. 2. 0.]
       [0. 1. 0. 0. 0. 0. 2. 0.]
       [0. 1. 0. 0. 0. 0. 2. 0.]]

    References:
      Ge et al., `S2 Reducer: High-Performance Sparse Communication to Accelerate Distributed Deep
      Learning <https://arxiv.org/abs/2110.02140>`_, 2021.

    Differs from the paper and its released code: the bitmap consists of bits instead of floats, and
    workers combine it before encoding. Each step draws new hashes and a new table. An even number
    of rows is decoded without bias. Peeling and 8-bit codes are additions of this library.
    """
    codec = _codec(
        decode,
        bits,
        density=density,
        sketch_ratio=sketch_ratio,
        rows=rows,
        granularity=granularity,
        overflow=overflow,
    )
    leaf_options: AggregatorOptions = {**options, "scope": options.get("scope") or "leaf"}
    return all_reduce_mean(codec, axis_name=axis_name, **leaf_options)
