"""SPARTA: after each local step, workers average a small random part of their parameters."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomm import _axis, _noise
from jaxcomm._contract import AxisName, PerWorker, PyTree
from jaxcomm._require import Share, checked
from jaxcomm.compression.sparsifiers._random_k import draw_coordinates
from jaxcomm.compression.sparsifiers._sparse import make_count
from jaxcomm.synchronization._averaging_round import (
    Averaging,
    How,
    averaging_round,
    initial_diagnostics,
    no_steps,
    updates_of,
)
from jaxcomm.synchronization._exchange import Period, aggregator_of, local_steps
from jaxcomm.synchronization._trees import wide


class SpartaState(NamedTuple):
    """The state of sparse averages; equal on all workers except as the aggregator marks."""

    key: jax.Array  # key[]
    step: jax.Array  # int32[], steps so far
    since: jax.Array  # int32[], steps since the last exchange
    draws: jax.Array  # uint32[], exchanges so far
    aggregator: Any
    done: PerWorker  # each worker's steps since the last exchange
    diagnostics: dict[str, jax.Array]  # as of `local_sgd`


@checked
def sparta(
    share: Share = 0.005,
    period: Period = 1,
    *,
    aggregator: optax.GradientTransformation | None = None,
    axis_name: AxisName = "data",
    seed: int | jax.Array = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Averages a random share of the parameters over workers in every step (SPARTA).

    .. math:: x_i \gets x_i + \Delta_i, \qquad
              x_{ij} \gets \frac{1}{n} \sum_k x_{kj} \;\text{ for } j \in S

    :math:`S` has k coordinates of each leaf, new in each step. All workers draw the same ones, so
    only their values are sent: :math:`2 (n - 1) / n` times 4 bytes for each, and two float32. Each
    coordinate is averaged about once in `1 / share` steps. Workers stay near each other, but are
    not equal after any step; before :func:`jaxcomm.synchronization.average_every` it keeps the
    workers of DiLoCo together between its exchanges.

    Args:
      share: The share of the coordinates of each leaf, in (0, 1]; at least one coordinate.
      period: The number of steps between averages, as for
        :func:`jaxcomm.synchronization.local_sgd`.
      aggregator: Computes the mean of the values. Default: the exact mean. Coordinates differ from
        step to step, so codecs with memory do not suit it.
      axis_name: The mesh axis, or axes, of the workers.
      seed: Seed of the coordinates.

    Returns:
      A transformation to place *after* the optimizer, for parameters that differ by worker
      (:func:`jaxcomm.replicate`). Steps that are not finite, `weight`, `present` and `flush` are
      handled as by :func:`jaxcomm.synchronization.local_sgd`. With a share of 1, it is that method.

    Raises:
      ValueError: If an option is out of range; in `update`, as
        :func:`jaxcomm.synchronization.local_sgd` does.

    Example:
      >>> import jaxcomm, optax
      >>> from jaxcomm.synchronization import average_every, sparta
      >>> outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
      >>> inner = jaxcomm.per_worker(optax.adamw(0.001))
      >>> tx = optax.chain(inner, sparta(0.005), average_every(100, outer))

    References:
      Beton, Reed, Howes, Cheema and Baioumy, `Improving the Efficiency of Distributed Training
      using Sparse Parameter Averaging <https://openreview.net/forum?id=stFPf3gzq1>`_, 2025, and the
      authors' `EXO Gym <https://github.com/exo-explore/gym>`_.

    Differs from the code: it draws each coordinate by itself, and one worker sends all others the
    mask, one byte per coordinate of the model. Here a leaf has a fixed number of them, and no mask
    is sent. Parameters of 16 bits are averaged in float32, and then rounded.
    """
    combine, kept = aggregator_of(aggregator, axis_name), make_count(share, None)

    def part(tree: PyTree, chosen: PyTree) -> PyTree:
        return jax.tree.map(lambda x, s: x.ravel()[s], tree, chosen)

    def init(params: PyTree) -> SpartaState:
        few = jax.tree.map(lambda x: x.ravel()[: kept(x.size)], wide(params))
        zero = jnp.zeros((), jnp.int32)
        return SpartaState(
            key=_noise.make_key(seed),
            step=zero,
            since=zero,
            draws=jnp.zeros((), jnp.uint32),
            aggregator=combine.init(few),
            done=no_steps(params, axis_name),
            diagnostics=initial_diagnostics(),
        )

    def exchange(
        state: SpartaState, params: PyTree, updates: PyTree, how: How
    ) -> tuple[PyTree, SpartaState]:
        leaves, treedef = jax.tree.flatten(params)
        place = _noise.placed_key(state.key, axis_name, params)
        keys = _noise.keys_per_unit(place, state.draws, len(leaves), _axis.index(axis_name))
        drawn = [
            draw_coordinates(key.shared, x.size, kept(x.size))
            for key, x in zip(keys, leaves, strict=True)
        ]
        chosen = jax.tree.unflatten(treedef, drawn)
        own, steps = part(params, chosen), part(updates, chosen)
        values = jax.tree.map(lambda x, u: x + u.astype(x.dtype), wide(own), steps)
        before = Averaging(
            anchor=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), values),
            aggregator=state.aggregator,
            outer=optax.EmptyState(),
            unsent=state.done,
            succeeded=jnp.ones((), bool),
            counts=state.diagnostics,
        )
        after, averaged = averaging_round(combine, optax.scale(-1.0), before, values, how)
        changes = updates_of(after, own, steps, how.participates & (averaged.total != 0))
        updates = jax.tree.map(
            lambda u, s, new: u.ravel().at[s].set(new).reshape(u.shape), updates, chosen, changes
        )
        return updates, state._replace(
            draws=_noise.following(state.draws),
            aggregator=after.aggregator,
            done=after.unsent,
            diagnostics=after.counts,
        )

    return local_steps(init, exchange, period, axis_name)
