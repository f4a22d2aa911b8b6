"""The step of one worker, on a mesh and in simulation.

On a mesh it has two parts. The loss is differentiated in a `jax.shard_map` without checks of types,
since these are rules for our code and not for a user's loss; it returns the gradient of each
device. The update runs in a second `jax.shard_map`, whose types prove that parameters and state are
equal on all workers.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jaxcomm import _axis
from jaxcomm._contract import AxisName, PerWorker, PyTree
from jaxcomm._gradients import (
    Backward,
    LossFn,
    Taker,
    local_value_and_grad,
    parts_of_value,
    rebuilt_value_and_grad,
    running,
)
from jaxcomm._mesh import shard_map
from jaxcomm._require import explained
from jaxcomm._workers import own_params, state_specs
from jaxcomm.aggregation import mean
from jaxcomm.aggregation._zeroth_order import ZEROTH_ORDER, evaluates_loss
from jaxcomm.metrics._reduced import apart, over_axes, require_stated, together
from jaxcomm.scheduling._layers import explain_guard, guarded
from jaxcomm.scheduling._wait_free import WAIT_FREE, aggregates_in_backward
from jaxcomm.training._carry import Carry, Given, replica_axes
from jaxcomm.training._explanations import explain_update_error
from jaxcomm.training._metrics import Metrics, diagnostics_of, reduce_metrics
from jaxcomm.training._mistakes import (
    require_aux,
    require_gradients_of,
    require_means,
    require_parts,
)
from jaxcomm.training._model_state import reduce_model_state
from jaxcomm.training._varying import infer, require_not_reduced

GradientFn: TypeAlias = Callable[..., tuple[Any, ...]]
Result: TypeAlias = tuple[Carry, dict[str, jax.Array], dict[str, jax.Array]]
_WHOLE = PartitionSpec()


class Evaluated(NamedTuple):
    """What a device computes from its rows, before any mean."""

    loss: jax.Array
    model_state: PyTree
    aux: PyTree
    gradient: PyTree
    weight: jax.Array | None


@dataclasses.dataclass(frozen=True, eq=False)
class WorkerStep:
    """The step of one worker.

    Attributes:
      loss_fn: As for `jaxcomm.make_step`, like all attributes except `inner`.
      tx: ...
      axis_name: ...
      inner: The other axes, which index the devices of one worker.
      has_aux: ...
      has_model_state: ...
      gradients: ...
      metrics: ...
    """

    loss_fn: LossFn
    tx: optax.GradientTransformation
    axis_name: AxisName
    inner: tuple[str, ...]
    has_aux: bool
    has_model_state: bool
    gradients: GradientFn | None
    metrics: Metrics

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of all devices with rows of their own."""
        return (*_axis.names(self.axis_name), *self.inner)

    def specs(self, carry: Carry) -> tuple[PyTree, PyTree]:
        """How arguments and results of `at_once` are sharded."""
        state = state_specs(carry)
        names = _axis.names(self.axis_name)
        metrics = PartitionSpec(names) if self.metrics == "own" else _WHOLE
        given = Given(PartitionSpec(self.axes), _WHOLE, _WHOLE)
        return (state, given, _WHOLE), (state, metrics, _WHOLE)

    def on_mesh(
        self,
        mesh: Mesh | AbstractMesh,
        carry: Carry,
        given: Given,
        extra_args: dict[str, PyTree],
        shard_axes: tuple[str, ...] = (),
    ) -> Result:
        """The step of all workers, each under `jax.shard_map`."""
        in_specs, out_specs = self.specs(carry)
        unchecked = functools.partial(shard_map, mesh=mesh, shard_axes=shard_axes, check_vma=False)
        of_loss = (in_specs[0].params, in_specs[0].model_state, in_specs[1])
        args = (carry.params, carry.model_state, given)
        result: Result
        if (taker := self._taker(carry)) is not None:
            # The transformation runs the loss, so no types of the update are checked either.

            def forward(params: PyTree, model_state: PyTree, given: Given) -> PyTree:
                backward = self._deferred(taker, Carry(params, model_state, ()), given)
                return self._parts(backward.loss(backward.params))[1]

            differs = infer(forward, unchecked, self.axes, of_loss, args)
            step = functools.partial(self.at_once, differs=differs)
            run = unchecked(step, in_specs=in_specs, out_specs=out_specs)
            result = run(carry, given, extra_args)
            return result
        # Both uses trace the loss once. A function of its own has no trace of an earlier call.
        evaluate = jax.jit(lambda *args: self.evaluate(*args), inline=True)
        found = infer(evaluate, unchecked, self.axes, of_loss, args)
        if self.gradients is not None:
            require_not_reduced(found.gradient, _axis.names(self.axis_name))
        every = jax.tree.map(lambda _: PartitionSpec(self.axes), found)
        specs = every._replace(
            model_state=jax.tree.map(lambda x: PartitionSpec(x.over or None), found.model_state)
        )
        # Devices are stacked along the first axis. An axis of their own would change how XLA fuses.
        is_row = jax.tree.map(lambda spec, x: x.is_scalar and any(spec), specs, found)

        def stacked(*args: PyTree) -> Evaluated:
            return jax.tree.map(lambda row, x: x[None] if row else x, is_row, evaluate(*args))

        def finish(carry: Carry, stacks: Evaluated, extra_args: dict[str, PyTree]) -> Result:
            own = jax.tree.map(lambda row, x: x[0] if row else x, is_row, stacks)
            return self.finish(carry, own, extra_args, found.model_state)

        stacks = unchecked(stacked, in_specs=of_loss, out_specs=specs)(*args)
        run = shard_map(finish, mesh, (in_specs[0], specs, _WHOLE), out_specs, shard_axes)
        result = run(carry, stacks, extra_args)
        return result

    def at_once(
        self,
        carry: Carry,
        given: Given,
        extra_args: dict[str, PyTree],
        differs: PyTree = None,
    ) -> Result:
        """The whole step of one worker.

        Args:
          carry: Parameters, model state and optimizer state.
          given: The inputs of the loss.
          extra_args: Those of `tx.update`.
          differs: How each leaf of the model state that the loss returns varies, if that is known.

        Returns:
          `(carry, metrics, diagnostics)`. Per-worker metrics are `[1, ...]`; all other results are
          equal on all workers.
        """
        taker = self._taker(carry)
        if taker is None:
            evaluated = self.evaluate(carry.params, carry.model_state, given)
            return self.finish(carry, evaluated, extra_args, differs)
        backward = self._deferred(taker, carry, given)
        with running(backward):
            updates, opt_state = self._updated(carry, backward.deferred(), extra_args)
        evaluated = self._evaluated(
            backward.value, (), None, given.batch, lambda rows: backward.loss(backward.params, rows)
        )
        new_state, values, _, _ = self._over_devices(carry, evaluated, differs)
        return self._result(carry, values, None, new_state, updates, opt_state)

    def evaluate(self, params: PyTree, model_state: PyTree, given: Given) -> Evaluated:
        """The loss of this device and its gradient."""
        params, states, key = own_params(params), self._own(model_state), self._own_key(given)
        loss_fn = self._with_shared(given)

        def value_and_gradient(rows: PyTree) -> tuple[Any, ...]:
            if self.gradients is not None:
                named = {"model_state": states[0]} if states else {}
                return self.gradients(loss_fn, params, rows, *key, **named)
            args = (*states, rows, *key)
            self._require_loss(params, args, given)
            has_rest = self.has_aux or self.has_model_state
            differentiate = local_value_and_grad(
                self._checked(loss_fn), has_rest, axis_name=self.axes
            )
            found: tuple[Any, ...] = differentiate(params, *args)
            return found

        value, gradient, *weight = value_and_gradient(given.batch)
        require_parts(value, self.has_model_state, self.has_aux)
        return self._evaluated(
            value,
            gradient,
            weight[0] if weight else None,
            given.batch,
            lambda rows: value_and_gradient(rows)[0],
        )

    def finish(
        self, carry: Carry, evaluated: Evaluated, extra_args: dict[str, PyTree], differs: PyTree
    ) -> Result:
        """The step of one worker after its gradient."""
        replica = replica_axes(carry.params, self.axis_name)
        # The axes of a replica's devices over which `tx` averages their gradients.
        within = _axis.names(self.axis_name)[len(replica) :]
        if within and evaluated.weight is not None:
            raise ValueError(
                f"Gradients with weights differ over {list(within)} within a replica, whose "
                f"parameters are equal there: name only {list(replica)} in `axis_name`."
            )
        new_state, values, gradient, weight = self._over_devices(carry, evaluated, differs)
        weights = {} if weight is None else {"weight": weight}
        updates, opt_state = self._updated(carry, gradient, {**weights, **extra_args})
        return self._result(carry, values, weight, new_state, updates, opt_state)

    def _taker(self, carry: Carry) -> Taker | None:
        """The transformation that needs the loss or the backward pass in place of gradients."""
        if self.gradients is not None or not jax.tree.leaves(carry.params):
            return None
        if aggregates_in_backward(carry.opt_state):
            return WAIT_FREE
        return ZEROTH_ORDER if evaluates_loss(carry.opt_state) else None

    def _own(self, model_state: PyTree) -> list[PyTree]:
        return [own_params(model_state)] if self.has_model_state else []

    def _own_key(self, given: Given) -> list[jax.Array]:
        if given.key is None:
            return []
        return [jax.random.fold_in(given.key, _axis.index(self.axes))]

    def _parts(self, value: Any) -> tuple[Any, PyTree, PyTree]:
        return parts_of_value(value, self.has_model_state, self.has_aux)

    def _with_shared(self, given: Given) -> LossFn:
        """The loss, with the inputs that all workers share."""
        if given.shared is None:
            return self.loss_fn
        return functools.partial(self.loss_fn, shared=jax.tree.map(lambda x: x, given.shared))

    def _checked(self, loss_fn: LossFn) -> LossFn:
        def loss(params: PyTree, *args: PyTree) -> Any:
            value = loss_fn(params, *args)
            require_parts(value, self.has_model_state, self.has_aux)
            if self.metrics != "own" or self.inner:
                require_stated(self._parts(value)[2])
            return value

        return loss

    def _require_loss(self, params: PyTree, args: tuple[PyTree, ...], given: Given) -> None:
        shared = {} if given.shared is None else {"shared": given.shared}
        require_gradients_of(self.loss_fn, params, args, given.key is not None, shared)

    def _deferred(self, taker: Taker, carry: Carry, given: Given) -> Backward:
        """The backward pass that a transformation runs."""
        params, states = own_params(carry.params), self._own(carry.model_state)
        key = self._own_key(given)
        self._require_loss(params, (*states, given.batch, *key), given)
        loss = self._checked(self._with_shared(given))
        value_and_gradient = rebuilt_value_and_grad(
            lambda params, *args: loss(guarded(params), *args),
            self.has_aux or self.has_model_state,
            axis_name=self.axes,
        )

        def evaluate(
            params: PyTree, rows: PyTree, part: jax.Array | None = None
        ) -> tuple[Any, PyTree]:
            keys = key if part is None else [jax.random.fold_in(each, part) for each in key]
            with explained(explain_guard):
                result: tuple[Any, PyTree] = value_and_gradient(params, *states, rows, *keys)
            return result

        def loss_at(params: PyTree, rows: PyTree = given.batch) -> Any:
            return loss(params, *jax.tree.map(lambda x: x, (*states, rows, *key)))

        return Backward(
            taker,
            loss_at,
            evaluate,
            params,
            given.batch,
            self.axes,
            self.inner,
            self.has_model_state,
            isinstance(carry.params, PerWorker),
        )

    def _evaluated(
        self,
        value: Any,
        gradient: PyTree,
        weight: jax.Array | None,
        batch: PyTree,
        value_of: Callable[[PyTree], Any],
    ) -> Evaluated:
        """The parts of what a loss returned, if `value_of(rows)` shows that aux has means."""
        loss, model_state, aux = self._parts(value)
        aux = aux if self.has_aux else {}
        require_aux(aux, {"loss"} if weight is None else {"loss", "weight"})
        if self.metrics != "own" or self.inner:
            require_stated(aux)
            remedy = "" if self.inner else ", or make the step with `metrics='own'`"
            require_means(lambda rows: self._parts(value_of(rows))[2], aux, batch, remedy)
        return Evaluated(loss, model_state, aux, gradient, weight)

    def _over_devices(
        self, carry: Carry, evaluated: Evaluated, differs: PyTree
    ) -> tuple[PyTree, PyTree, PyTree, jax.Array | None]:
        """Model state, values, gradient and weight of a worker, whose devices each have rows."""
        loss, model_state, aux, gradient, weight = evaluated
        new_state, inner = carry.model_state, self.inner
        if self.has_model_state:
            replica = replica_axes(carry.params, self.axis_name)
            within = _axis.names(self.axis_name)[len(replica) :]
            new_state = reduce_model_state(
                model_state, carry.model_state, replica, (*within, *inner), weight, differs
            )
        values = {"loss": loss, **aux}
        if not inner:
            return new_state, values, gradient, weight
        average = mean(inner)
        means, others = apart(values)
        means = jax.tree.map(lambda x: jnp.asarray(x).astype(jnp.float32), means)
        per_device = _axis.local_params((means, gradient), inner)
        (means, gradient), _ = average.update(
            per_device,
            average.init(per_device),
            weight=weight,
            outer_axes=_axis.names(self.axis_name),
        )
        values = together(means, over_axes(others, inner))
        return new_state, values, gradient, None if weight is None else lax.psum(weight, inner)

    def _updated(
        self, carry: Carry, updates: PyTree, extra_args: dict[str, PyTree]
    ) -> tuple[PyTree, PyTree]:
        """The updates of parameters, and the next optimizer state; raises if they are invalid."""
        params, opt_state = own_params(carry.params), carry.opt_state
        update = optax.with_extra_args_support(self.tx).update
        with explained(lambda error: explain_update_error(error, self.tx.init, params, opt_state)):
            updates, after = update(updates, opt_state, params, **extra_args)
        replica = replica_axes(carry.params, self.axis_name)
        is_per_worker = isinstance(carry.params, PerWorker)
        if within := _axis.names(self.axis_name)[len(replica) :]:
            _axis.require_replicated(
                updates,
                within,
                "The update",
                f"Parameters differ over {list(replica)} only, so average gradients over "
                f"{list(within)} first in `optax.chain`, as in `jaxcomm.hierarchical(jaxcomm.mean("
                f"{within[-1]!r}), outer_axes={replica!r})`; or name only {list(replica)} in "
                "`axis_name`, for the exact mean.",
            )
        if not is_per_worker:
            _axis.require_replicated(
                updates,
                self.axis_name,
                "The update",
                "Place an aggregator, such as `jaxcomm.mean()`, first in `optax.chain`. A frozen "
                "leaf needs `optax.stateless(lambda grads, params: optax.tree.zeros_like(params))` "
                "instead of `optax.set_to_zero()`, whose zeros have the type of the gradient. For "
                "gossip, let parameters differ by worker with `jaxcomm.replicate(params, mesh)`.",
            )
        _axis.require_replicated(
            after,
            self.axis_name,
            "The optimizer state",
            "Mark it, as in `optax.chain(jaxcomm.per_worker(optax.adam(1e-3)), ...)`."
            if is_per_worker
            else "Place the aggregator before the transformation that keeps this state.",
        )
        return updates, after

    def _result(
        self,
        carry: Carry,
        values: dict[str, PyTree],
        weight: jax.Array | None,
        new_state: PyTree,
        updates: PyTree,
        opt_state: PyTree,
    ) -> Result:
        reduced = reduce_metrics(self.metrics, self.axis_name, values, weight, carry.opt_state)
        new = optax.apply_updates(own_params(carry.params), updates)
        if isinstance(carry.params, PerWorker):
            new = _axis.marked(new, replica_axes(carry.params, self.axis_name))
        return Carry(new, new_state, opt_state), reduced, diagnostics_of(opt_state)
