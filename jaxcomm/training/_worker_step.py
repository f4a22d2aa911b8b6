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
import optax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jaxcomm import _axis
from jaxcomm._contract import PerWorker, PyTree, reports
from jaxcomm._gradients import Backward, LossFn, Taker, parts_of_value, running
from jaxcomm._mesh import on_a_worker, shard_map
from jaxcomm._require import require_clips_of_the_mean
from jaxcomm.metrics._reduced import require_stated
from jaxcomm.scheduling._layers import guarded
from jaxcomm.training._arguments import Carry, Given
from jaxcomm.training._means import (
    Metrics,
    diagnostics_of,
    over_devices,
    reduce_metrics,
    reduce_model_state,
    require_aux,
    require_means,
)
from jaxcomm.training._varying import infer, require_not_reduced
from jaxcomm.wire._walk import COLLECTIVES

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


def _operations(program: Any) -> set[str]:
    """The names of all operations of a program, also of those inside of others."""
    found: set[str] = set()
    for eqn in program.eqns:
        found.add(eqn.primitive.name)
        for value in eqn.params.values():
            for inside in value if isinstance(value, tuple | list) else (value,):
                if hasattr(inside, "eqns"):
                    found |= _operations(inside)
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class WorkerStep:
    """The step of one worker.

    Attributes:
      loss_fn: As for `jaxcomm.make_step`, like all attributes except `names` and `inner`.
      tx: ...
      names: The axes of the workers.
      inner: The other axes, which index the devices of one worker.
      has_aux: ...
      has_model_state: ...
      gradients: ...
      metrics: ...
    """

    loss_fn: LossFn
    tx: optax.GradientTransformation
    names: tuple[str, ...]
    inner: tuple[str, ...]
    has_aux: bool
    has_model_state: bool
    gradients: GradientFn | None
    metrics: Metrics

    def __post_init__(self) -> None:
        require_clips_of_the_mean(self.tx)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of all devices with rows of their own."""
        return (*self.names, *self.inner)

    def specs(self, carry: Carry) -> tuple[PyTree, PyTree]:
        """How arguments and results of `at_once` are sharded."""
        state = _axis.state_specs(carry)
        metrics = PartitionSpec(self.names) if self.metrics == "own" else _WHOLE
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
        on_worker = functools.partial(
            on_a_worker, mesh=mesh, shard_axes=shard_axes, check_vma=False
        )
        taker = on_a_worker(self._taker, mesh, of_loss[:1], args[:1], shard_axes)
        if taker is not None:
            # The transformation runs the loss, so no types of the update are checked either.

            def forward(params: PyTree, model_state: PyTree, given: Given) -> PyTree:
                backward = self._deferred(taker, Carry(params, model_state, ()), given)
                return backward.loss(backward.params)[1][0]

            _, differs = self._traced(forward, on_worker, of_loss, args)
            step = functools.partial(self.at_once, differs=differs)
            run = unchecked(step, in_specs=in_specs, out_specs=out_specs)
            result = run(carry, given, extra_args)
            return result
        # Both uses trace the loss once. A function of its own has no trace of an earlier call.
        evaluate = jax.jit(lambda *args: self.evaluate(*args), inline=True)
        shapes, varies = self._traced(evaluate, on_worker, of_loss, args)
        specs, differs = jax.tree.map(lambda _: PartitionSpec(self.axes), shapes), None
        if varies is not None:
            differs = varies.model_state
            over = jax.tree.map(lambda x: PartitionSpec(x.over) if x.over else _WHOLE, differs)
            specs = specs._replace(model_state=over)
            if self.gradients is not None:
                require_not_reduced(varies.gradient, self.names)
        # Devices are stacked along the first axis. An axis of their own would change how XLA fuses.
        is_row = jax.tree.map(lambda x, spec: not x.shape and any(spec), shapes, specs)

        def stacked(*args: PyTree) -> Evaluated:
            return jax.tree.map(lambda row, x: x[None] if row else x, is_row, evaluate(*args))

        def finish(carry: Carry, stacks: Evaluated, extra_args: dict[str, PyTree]) -> Result:
            own = jax.tree.map(lambda row, x: x[0] if row else x, is_row, stacks)
            return self.finish(carry, own, extra_args, differs)

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
        taker = self._taker(carry.params)
        if taker is None:
            evaluated = self.evaluate(carry.params, carry.model_state, given)
            return self.finish(carry, evaluated, extra_args, differs)
        backward = self._deferred(taker, carry, given)
        with running(backward):
            updates, opt_state = self._updated(
                carry, backward.params, backward.deferred(), extra_args
            )
        loss, (model_state, aux) = backward.value
        found = Evaluated(loss, model_state, aux, (), None)
        self._require_metrics(
            found, lambda rows: backward.loss(backward.params, rows)[1][1], given.batch
        )
        found = self._over_devices(carry, found, differs)
        return self._result(carry, backward.params, found, updates, opt_state)

    def evaluate(self, params: PyTree, model_state: PyTree, given: Given) -> Evaluated:
        """The loss of this device and its gradient."""
        params = _axis.own_params(params)
        loss_fn, states, keys = self._inputs(model_state, given)

        def of_rows(rows: PyTree) -> Evaluated:
            if self.gradients is None:
                own = jax.value_and_grad(self._loss(loss_fn, states, keys), has_aux=True)
                (loss, (state, aux)), gradient = own(params, rows)
                return Evaluated(loss, state, aux, gradient, None)
            named = {"model_state": states[0]} if states else {}
            value, gradient, *weight = self.gradients(loss_fn, params, rows, *keys, **named)
            loss, (state, aux) = self._parts(value)
            return Evaluated(loss, state, aux, gradient, *(weight or [None]))

        found = of_rows(given.batch)
        self._require_metrics(found, lambda rows: of_rows(rows).aux, given.batch)
        return found

    def finish(
        self, carry: Carry, evaluated: Evaluated, extra_args: dict[str, PyTree], differs: PyTree
    ) -> Result:
        """The step of one worker after its gradient."""
        params = _axis.own_params(carry.params)
        replica = _axis.replica_axes(carry.params, self.names)
        # The axes of a replica's devices over which `tx` averages their gradients.
        within = self.names[len(replica) :]
        if within and evaluated.weight is not None:
            raise ValueError(
                f"Gradients with weights differ over {list(within)}, within a replica: name only "
                f"{list(replica)} in `axis_name`."
            )
        found = self._over_devices(carry, evaluated, differs)
        weights = {} if found.weight is None else {"weight": found.weight}
        updates, opt_state = self._updated(carry, params, found.gradient, weights | extra_args)
        return self._result(carry, params, found, updates, opt_state)

    def _traced(
        self,
        fn: Callable[..., PyTree],
        on_worker: Callable[..., Any],
        in_specs: PyTree,
        args: tuple[PyTree, ...],
    ) -> tuple[PyTree, Any]:
        """The shapes of what `fn` returns on one device, and how it varies, if that matters."""
        program, shapes = on_worker(
            jax.make_jaxpr(fn, return_shape=True), in_specs=in_specs, args=args
        )
        found_in = _operations(program)
        # Under a condition, some workers may not reach a collective.
        may_wait = found_in & {"cond", "while"} and found_in & {*COLLECTIVES}
        if may_wait or self.has_model_state or self.gradients is not None:
            return shapes, infer(program.jaxpr, shapes, self.axes, in_specs, args)
        return shapes, None

    def _taker(self, params: PyTree) -> Taker | None:
        """What of `tx` needs the loss or the backward pass in place of gradients, on a worker."""
        params = _axis.own_params(params)
        if self.gradients is not None or not jax.tree.leaves(params):
            return None
        with reports() as found:
            # A function of its own: JAX would keep the first trace of `init`, and nothing report.
            jax.eval_shape(lambda params: self.tx.init(params), params)
        parts = [aggregator.parts for aggregator, _ in found]
        return next((part for part in parts if isinstance(part, Taker)), None)

    def _inputs(
        self, model_state: PyTree, given: Given
    ) -> tuple[LossFn, list[PyTree], list[jax.Array]]:
        """The loss with what all workers share, and the model state and key of this device."""
        loss_fn = self.loss_fn
        if given.shared is not None:
            loss_fn = functools.partial(loss_fn, shared=jax.tree.map(lambda x: x, given.shared))
        states = [_axis.own_params(model_state)] if self.has_model_state else []
        if given.key is None:
            return loss_fn, states, []
        return loss_fn, states, [jax.random.fold_in(given.key, _axis.index(self.axes))]

    def _parts(self, value: Any) -> tuple[Any, tuple[PyTree, PyTree]]:
        """`(loss, (model_state, aux))` of what a loss returned."""
        if not (self.has_model_state or self.has_aux):
            return value, (None, {})
        loss, model_state, aux = parts_of_value(value, self.has_model_state, self.has_aux)
        if not self.has_aux:
            return loss, (model_state, {})
        if self.metrics != "own" or self.inner:
            require_stated(aux)
        return loss, (model_state, aux)

    def _loss(self, loss_fn: LossFn, states: list[PyTree], keys: list[jax.Array]) -> LossFn:
        """`(params, rows) -> (loss, (model_state, aux))` of this device."""

        def loss(params: PyTree, rows: PyTree, part: jax.Array | None = None) -> Any:
            own = keys if part is None else [jax.random.fold_in(key, part) for key in keys]
            # The variables of flax.nnx belong to the trace in which they were last unflattened.
            args = jax.tree.map(lambda x: x, (*states, rows, *own))
            return self._parts(loss_fn(params, *args))

        return loss

    def _deferred(self, taker: Taker, carry: Carry, given: Given) -> Backward:
        """The backward pass that a transformation runs."""
        loss = self._loss(*self._inputs(carry.model_state, given))
        value_and_gradient = jax.value_and_grad(
            lambda params, *args: loss(guarded(params), *args), has_aux=True
        )
        return Backward(
            taker,
            lambda params, rows=given.batch: loss(params, rows),
            value_and_gradient,
            _axis.own_params(carry.params),
            given.batch,
            self.axes,
            self.inner,
            self.has_model_state,
            isinstance(carry.params, PerWorker),
        )

    def _require_metrics(
        self, found: Evaluated, aux_of: Callable[[PyTree], PyTree], batch: PyTree
    ) -> None:
        """Raises unless aux has metrics, and `aux_of(rows)` shows that they are means."""
        if not self.has_aux:
            return
        require_aux(found.aux, {"loss"} if found.weight is None else {"loss", "weight"})
        if self.metrics != "own" or self.inner:
            remedy = "" if self.inner else ", or make the step with `metrics='own'`"
            require_means(aux_of, found.aux, batch, remedy)

    def _over_devices(self, carry: Carry, found: Evaluated, differs: PyTree) -> Evaluated:
        """What a worker has, whose devices each have rows; with its next model state."""
        loss, model_state, aux, gradient, weight = found
        new_state, inner = carry.model_state, self.inner
        if self.has_model_state:
            replica = _axis.replica_axes(carry.params, self.names)
            within = (*self.names[len(replica) :], *inner)
            new_state = reduce_model_state(
                model_state, carry.model_state, replica, within, weight, differs
            )
        if inner:
            values, gradient, weight = over_devices(
                {"loss": loss, **aux}, gradient, weight, inner, self.names
            )
            loss, aux = values.pop("loss"), values
        return Evaluated(loss, new_state, aux, gradient, weight)

    def _updated(
        self, carry: Carry, params: PyTree, updates: PyTree, extra_args: dict[str, PyTree]
    ) -> tuple[PyTree, PyTree]:
        """The updates of parameters, and the next optimizer state; raises if they are invalid."""
        update = optax.with_extra_args_support(self.tx).update
        updates, after = update(updates, carry.opt_state, params, **extra_args)
        replica = _axis.replica_axes(carry.params, self.names)
        is_per_worker = isinstance(carry.params, PerWorker)
        within = self.names[len(replica) :] if is_per_worker else self.names
        _axis.require_replicated(
            updates,
            within,
            "The update",
            "Place an aggregator over them, such as `jaxcomm.mean()`, first in `optax.chain`, or "
            "let parameters differ by `jaxcomm.replicate(params, mesh)`. A frozen leaf needs "
            "`optax.stateless(lambda updates, params: optax.tree.zeros_like(params))`.",
        )
        _axis.require_replicated(
            after,
            self.names,
            "The optimizer state",
            "Place the aggregator before what keeps this state; or, where parameters differ by "
            "worker, mark it, as in `optax.chain(jaxcomm.per_worker(optax.adam(1e-3)), ...)`.",
        )
        return updates, after

    def _result(
        self, carry: Carry, params: PyTree, found: Evaluated, updates: PyTree, opt_state: PyTree
    ) -> Result:
        reduced = reduce_metrics(
            self.metrics, self.names, found.loss, found.aux, found.weight, carry.opt_state
        )
        new = optax.apply_updates(params, updates)
        if isinstance(carry.params, PerWorker):
            new = _axis.marked(new, _axis.replica_axes(carry.params, self.names))
        return Carry(new, found.model_state, opt_state), reduced, diagnostics_of(opt_state)
