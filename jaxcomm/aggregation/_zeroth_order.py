"""Gradients from losses alone: directions that all workers draw, and slopes along them."""

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.extend.random import threefry_2x32

from jaxcomm import _axis, _noise
from jaxcomm._contract import Aggregator, AxisName, PyTree, require_state
from jaxcomm._gradients import Backward, LossFn, Taker, backward_of
from jaxcomm._require import Positive, Range, checked
from jaxcomm._units import explicit_spec, require_floating, resharded
from jaxcomm.aggregation._coded import weigh
from jaxcomm.compression._means import headroom
from pallas_kernels import _hash

Distribution: TypeAlias = Literal["gaussian", "rademacher"]


TOGETHER = 2**16  # Coordinates that are drawn at once: loops over small arrays are slow.


def _gaussian(words: jax.Array) -> jax.Array:
    # The middles of 2^23 intervals of (-1, 1), exactly: symmetric, and never 1, which is infinite.
    uniform = ((words >> 9).astype(jnp.float32) + 0.5) * 2.0**-22 - 1
    return 2.0**0.5 * lax.erf_inv(uniform)


def _rademacher(words: jax.Array) -> jax.Array:
    return 1 - 2 * (words >> 31).astype(jnp.float32)


_SAMPLES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gaussian": _gaussian,
    "rademacher": _rademacher,
}


class Directions:
    """The directions of a step, each a tree of float32 arrays; they are drawn where they are used.

    The seeds of leaf j in direction k are the words of threefry at the counters (step, k L + j),
    for L leaves. A coordinate is a sample from the hash of these seeds and its position.
    """

    def __init__(
        self, like: PyTree, key: jax.Array, step: jax.Array, count: int, distribution: Distribution
    ):
        leaves, self.treedef = jax.tree.flatten(like)
        self.shapes = [x.shape for x in leaves]
        self.specs = [*map(explicit_spec, leaves)]
        self.sample = _SAMPLES[distribution]
        number = jnp.arange(count * len(leaves), dtype=jnp.uint32)
        counters = jnp.concatenate([jnp.full_like(number, step.astype(jnp.uint32)), number])
        words = threefry_2x32(_noise.seeds(key), counters).reshape(2, -1)
        self.seeds = words.T.reshape(count, len(leaves), 2)
        size = max(sum(map(math.prod, self.shapes)), 1)
        fits = [n for n in range(1, count + 1) if count % n == 0 and n * size <= TOGETHER]
        self.together = max(fits, default=1)

    def drawn(self, seeds: jax.Array) -> PyTree:
        """The direction of these seeds, uint32[leaves, 2]."""
        return jax.tree.unflatten(
            self.treedef,
            [
                resharded(self.sample(_hash.bits(_hash.positions(shape), *own)), spec)
                for own, shape, spec in zip(seeds, self.shapes, self.specs, strict=True)
            ],
        )

    def each(self, fn: Callable[[PyTree], PyTree], together: int | None = None) -> Any:
        """The results of `fn` for all directions, stacked; one by one, or vectorized."""
        return lax.map(lambda seeds: fn(self.drawn(seeds)), self.seeds, batch_size=together)

    def projections(self, tree: PyTree) -> jax.Array:
        r""":math:`\langle u_k, x \rangle` of a tree, float32[count]."""
        leaves = [x.astype(jnp.float32) for x in jax.tree.leaves(tree)]

        def projection(direction: PyTree) -> jax.Array:
            products = zip(leaves, jax.tree.leaves(direction), strict=True)
            return jnp.sum(jnp.stack([jnp.sum(x * u) for x, u in products]))

        found: jax.Array = self.each(projection, self.together)
        return found

    def combined(self, coefficients: jax.Array) -> PyTree:
        r""":math:`\sum_k c_k u_k`, a tree of float32 arrays."""
        blocks = coefficients.size // self.together
        seeds = self.seeds.reshape(blocks, self.together, *self.seeds.shape[1:])

        def add(total: PyTree, block: tuple[jax.Array, jax.Array]) -> tuple[PyTree, None]:
            def weighted(c: jax.Array, seeds: jax.Array) -> PyTree:
                return jax.tree.map(lambda u: c * u, self.drawn(seeds))

            terms = jax.vmap(weighted)(block[0], block[1])
            return jax.tree.map(lambda x, y: x + jnp.sum(y, axis=0), total, terms), None

        zeros = [
            _axis.varying_like(resharded(jnp.zeros(shape, jnp.float32), spec), coefficients)
            for shape, spec in zip(self.shapes, self.specs, strict=True)
        ]
        first = jax.tree.unflatten(self.treedef, zeros)
        return lax.scan(add, first, (coefficients.reshape(blocks, self.together), seeds))[0]


def _moved(x: jax.Array, u: jax.Array, length: jax.Array) -> jax.Array:
    wide = x if x.dtype.itemsize >= 4 else x.astype(jnp.float32)
    return (wide + (length * u).astype(wide.dtype)).astype(x.dtype)


def differences(
    loss: Any, params: PyTree, directions: Directions, smoothing: jax.Array | float
) -> tuple[PyTree, jax.Array]:
    """The mean value over all points, and the slope of the loss along each direction."""
    length = jnp.asarray(smoothing, jnp.float32)

    def along(direction: PyTree) -> tuple[PyTree, jax.Array]:
        values = [
            jax.tree.map(
                lambda x: jnp.asarray(x).astype(jnp.float32),
                loss(
                    jax.tree.map(lambda x, u, s=sign: _moved(x, u, s * length), params, direction)
                ),
            )
            for sign in (1.0, -1.0)
        ]
        above, below = (jax.tree.leaves(value)[0] for value in values)
        mean = jax.tree.map(lambda x, y: x / 2 + y / 2, *values)
        return mean, (above - below) / (2 * length)

    values, slopes = directions.each(along)
    return jax.tree.map(lambda x: jnp.mean(x, axis=0), values), slopes


def mean_along(
    axes: AxisName, directions: Directions, slopes: jax.Array, weight: jax.Array | float | None
) -> tuple[PyTree, jax.Array]:
    """The mean over workers and directions of slope times direction, and whether it is finite."""
    workers = _axis.size(axes)
    small = headroom(workers)
    scaled = slopes if weight is None else weigh(axes, weight, slopes)(slopes)
    with jax.named_scope("slopes"):
        total = lax.psum(_axis.as_varying(scaled, axes) * small, axes) / (workers * small)
    finite = jnp.all(jnp.isfinite(total))
    combined = directions.combined(total / slopes.size)
    return jax.tree.map(lambda x: jnp.where(finite, x, jnp.nan), combined), finite


_UNEQUAL = (
    "`zeroth_order` adds slopes of all workers at one point: pass parameters that are equal on all "
    "workers, not those of `jaxcomm.replicate` or `jaxcomm.local_params`."
)


def require_equal_params(params: PyTree, axes: AxisName, is_own: bool = False) -> None:
    """Raises if parameters are each worker's own, or their types say so (checked mode only)."""
    if is_own:
        raise ValueError(_UNEQUAL)
    _axis.require_replicated(params, axes, "The parameter", _UNEQUAL)


def zeroth_order_gradient(
    loss_fn: LossFn,
    params: PyTree,
    *args: PyTree,
    key: jax.Array,
    directions: int = 1,
    smoothing: jax.Array | float = 1e-3,
    distribution: Distribution = "gaussian",
    axis_name: AxisName = "data",
) -> tuple[jax.Array, PyTree]:
    r"""A gradient from the losses of all workers along random directions, for use by hand.

    .. math:: g = \frac{1}{K} \sum_{k=1}^{K} \frac{1}{n} \sum_i
              \frac{f_i(x + \mu u_k) - f_i(x - \mu u_k)}{2 \mu}\, u_k

    Call it inside `jax.shard_map` or `jax.vmap` over the workers. :func:`jaxcomm.zeroth_order` is
    the transformation for :func:`jaxcomm.make_step`, and explains the method. A worker sends
    :math:`4 K` bytes in one all-reduce.

    Args:
      loss_fn: `(params, *args) -> loss`, a scalar. It is not differentiated.
      params: Parameters, equal on all workers.
      *args: The other arguments of the loss, such as the batch of this worker.
      key: A typed threefry key, equal on all workers, and another one in each step.
      directions: :math:`K`, a Python int.
      smoothing: :math:`\mu`, positive; may be traced.
      distribution: `"gaussian"`, or `"rademacher"` for signs.
      axis_name: The mesh axis, or axes, of the workers.

    Returns:
      `(loss, gradient)`: this worker's mean loss over the :math:`2 K` points, float32[], and the
      gradient, equal on all workers, with the shapes and dtypes of the parameters. A loss that is
      not finite on any worker makes the gradient NaN on all workers.

    Raises:
      ValueError: If an option is out of range, if `axis_name` is not bound, if parameters differ
        by worker or are not floating-point, or the loss is not a scalar.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxcomm.aggregation import zeroth_order_gradient
      >>> def gradient(w, x):
      ...     loss = lambda w, x: jnp.mean((w - x) ** 2)
      ...     return zeroth_order_gradient(
      ...         loss, w, x, key=jax.random.key(0), distribution="rademacher"
      ...     )[1]
      >>> found = jax.vmap(gradient, (None, 0), axis_name="data")(
      ...     jnp.float32(3), jnp.array([1.0, 2.0])
      ... )
      >>> print(jnp.round(found, 2))
      [3. 3.]

    References:
      Malladi et al., `Fine-Tuning Language Models with Just Forward Passes
      <https://arxiv.org/abs/2305.17333>`_, 2023.
    """
    require_floating(params)
    _axis.index(axis_name)
    require_equal_params(params, axis_name)
    if not jax.tree.leaves(params):
        return jnp.asarray(loss_fn(params, *args), jnp.float32), params

    drawn = Directions(
        params, _noise.require_key(key), jnp.zeros((), jnp.uint32), directions, distribution
    )
    value, slopes = differences(lambda x: loss_fn(x, *args), params, drawn, smoothing)
    with jax.named_scope("zeroth_order_gradient"):
        gradient, _ = mean_along(axis_name, drawn, slopes, None)
    return value, jax.tree.map(lambda g, x: g.astype(x.dtype), gradient, params)


ZEROTH_ORDER = Taker(
    name="zeroth_order",
    divided="`zeroth_order` evaluates the loss along directions through all parameters, and not "
    "through the part that `optax.masked` or `optax.multi_transform` gives it. Place it before "
    "them.",
    touched="`zeroth_order` evaluates the loss itself, so there is no gradient that a "
    "transformation before or around it could use. Place it first in `optax.chain`, and what needs "
    "gradients after it. `jaxcomm.skip_nonfinite` may be around the chain.",
)


class ZerothOrderState(NamedTuple):
    """The state of `zeroth_order`, equal on all workers."""

    key: jax.Array  # key[], of the directions
    step: jax.Array  # uint32[]


@checked
def zeroth_order(
    directions: Positive = 1,
    *,
    smoothing: Annotated[float, Range(above=0)] | jax.Array = 1e-3,
    distribution: Distribution = "gaussian",
    axis_name: AxisName = "data",
    seed: int | jax.Array = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Descends along random directions, from the losses of workers and without gradients.

    .. math:: g = \frac{1}{K} \sum_{k=1}^{K} \bar c_k u_k, \qquad
              \bar c_k = \frac{1}{n} \sum_i \frac{f_i(x + \mu u_k) - f_i(x - \mu u_k)}{2 \mu}

    All workers draw the same directions :math:`u_k` from the key of the state, and send only the
    slopes :math:`c_{ik}`, :math:`4 K` bytes in one all-reduce for any number of parameters. Under
    :func:`jaxcomm.make_step` and :func:`jaxcomm.simulate`, the step evaluates the loss at
    :math:`2 K` points and runs no backward pass, so it also trains through losses without a useful
    derivative, or with gradients that vanish. Directions are drawn twice and never stored.

    For Gaussian directions, :math:`\mathbb{E}\, g = \nabla f_\mu(x)`, the gradient of the smoothed
    loss :math:`f_\mu(x) = \mathbb{E}\, f(x + \mu u)`. Signs give the gradient exactly on average if
    the loss is quadratic. For small :math:`\mu`,

    .. math:: \mathbb{E}\|g - \bar x\|^2 \le \frac{d + 1}{K} \|\bar x\|^2 \text{ (Gaussian)}, \qquad
              \frac{d - 1}{K} \|\bar x\|^2 \text{ (Rademacher)}

    for the mean gradient :math:`\bar x`. So a step of size :math:`\eta` must be :math:`d / K` times
    smaller than one along the gradient, unless the loss depends on few directions, as in
    fine-tuning. Do not use it where gradients are available and bytes allow them.

    Args:
      directions: :math:`K`, a Python int.
      smoothing: :math:`\mu`, positive; may be traced, and scheduled. Parameters of 16 bits round
        :math:`x \pm \mu u`, so :math:`\mu` must exceed their spacing.
      distribution: `"gaussian"`, or `"rademacher"` for signs, which have the smaller variance.
      axis_name: The mesh axis, or axes, of the workers.
      seed: Seed of the directions; may be traced.

    Returns:
      A transformation to place before the optimizer, in place of an aggregator. Updates are equal
      on all workers. In a step, the loss and other metrics are means over the points. A loss that
      is not finite on any worker makes the update NaN on all workers. `update(..., weight=w)` uses
      a weighted mean.

      Calls of `update` with gradients, and steps with `gradients=`, project these gradients on the
      directions: :math:`c_{ik} = \langle x_i, u_k \rangle`, the limit of small :math:`\mu`.

    Raises:
      ValueError: If an option is out of range. In a step, if another transformation before or
        around it needs gradients, if parameters differ by worker, or if the loss changes a model
        state. In `update`, if `axis_name` is not bound, or an update is already summed or not
        floating-point.

    Example:
      >>> import jax.numpy as jnp, optax, jaxcomm
      >>> tx = optax.chain(jaxcomm.zeroth_order(8, distribution="rademacher"), optax.sgd(0.5))
      >>> params = jnp.float32(3)
      >>> step = jaxcomm.simulate(lambda w, x: jnp.mean((w - x) ** 2), tx, workers=4)
      >>> params, _, _ = step(params, jaxcomm.init(tx, params, 4), jnp.ones(4))
      >>> print(jnp.round(params, 2))
      1.0

    References:
      Spall, `Multivariate Stochastic Approximation Using a Simultaneous Perturbation Gradient
      Approximation <https://doi.org/10.1109/9.119632>`_, 1992. Malladi et al., `Fine-Tuning
      Language Models with Just Forward Passes <https://arxiv.org/abs/2305.17333>`_, 2023 (MeZO).
      Nesterov, Spokoiny, `Random Gradient-Free Minimization of Convex Functions
      <https://doi.org/10.1007/s10208-015-9296-2>`_, 2017.

    Differs from the papers: MeZO perturbs parameters in place; here the perturbed parameters are
    temporary arrays.
    """

    def init_fn(params: PyTree) -> ZerothOrderState:
        del params
        return ZerothOrderState(_noise.make_key(seed), jnp.zeros((), jnp.uint32))

    def directions_of(state: ZerothOrderState, like: PyTree) -> Directions:
        placed = _noise.placed_key(state.key, axis_name, like)
        return Directions(like, placed, state.step, directions, distribution)

    def evaluated(backward: Backward, state: ZerothOrderState, weight: Any) -> PyTree:
        if backward.has_model_state:
            raise ValueError(
                "`zeroth_order` does not support `has_model_state=True`: its points are perturbed."
            )
        params = backward.params
        axes = (*_axis.names(axis_name), *backward.inner)
        require_equal_params(params, axes, backward.is_own)
        drawn = directions_of(state, params)
        backward.value, slopes = differences(backward.loss, params, drawn, smoothing)
        gradient, backward.finite = mean_along(axes, drawn, slopes, weight)
        return jax.tree.map(lambda g, x: g.astype(x.dtype), gradient, params)

    def update_fn(
        updates: PyTree,
        state: ZerothOrderState,
        params: PyTree = None,
        *,
        weight: jax.Array | float | None = None,
        outer_axes: tuple[str, ...] = (),
        shard_axes: tuple[str, ...] = (),
        **extra_args: object,
    ) -> tuple[PyTree, ZerothOrderState]:
        del params, extra_args
        require_state(state, ZerothOrderState, "`zeroth_order`")
        after = state._replace(step=state.step + 1)
        backward = backward_of(updates)
        if backward is not None:
            backward.begin(updates)
            return evaluated(backward, state, weight), after
        require_floating(updates)
        _axis.require_local(updates, axis_name, (*shard_axes, *outer_axes))
        if not jax.tree.leaves(updates):
            return updates, after
        drawn = directions_of(state, updates)
        result, _ = mean_along(axis_name, drawn, drawn.projections(updates), weight)
        return jax.tree.map(lambda x, like: x.astype(like.dtype), result, updates), after

    return Aggregator(
        init_fn, update_fn, axis_name, "loss", "directions through all leaves", ZEROTH_ORDER
    )
