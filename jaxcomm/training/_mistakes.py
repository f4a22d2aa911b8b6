"""Checks of how a step is used, which report the mistake instead of its consequence."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxcomm._contract import PyTree
from jaxcomm._mesh import axes_in, is_spec
from jaxcomm._require import described, require_clips_of_the_mean, require_transformation
from jaxcomm.metrics._reduced import is_reduced
from jaxcomm.wire._program import live


def require_step_of(loss_fn: object, tx: Any, gradients: Any, has_model_state: bool) -> None:
    """Raises a ValueError if a step cannot be made from these arguments."""
    if not (callable(loss_fn) or gradients is not None):
        raise ValueError(f"`loss_fn` must be a function, got {described(loss_fn)}.")
    require_transformation(tx)
    require_clips_of_the_mean(tx)
    if gradients is None:
        return
    if not callable(gradients):
        raise ValueError(f"`gradients` must be a function, got {gradients!r}.")
    name = getattr(gradients, "__name__", repr(gradients))
    try:
        parameters = inspect.signature(gradients).parameters
    except ValueError:  # A builtin without a signature.
        return
    own = parameters.get("model_state")
    takes = own is not None or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    )
    if has_model_state and not takes:
        raise ValueError(
            f"With `has_model_state=True`, `gradients` is called with `model_state=`, which "
            f"`{name}` does not take."
        )
    needs = own is not None and own.kind is own.KEYWORD_ONLY and own.default is own.empty
    if not has_model_state and needs:
        raise ValueError(
            f"`gradients`, `{name}`, takes `model_state=`: pass `has_model_state=True`, and a "
            "model state to the step."
        )


def require_divisible(batch: PyTree, devices: int, rows_differ: bool = False) -> None:
    """Raises a ValueError if the rows of a leaf cannot be split evenly over the devices.

    Args:
      batch: The global batch.
      devices: The number of devices with rows of their own.
      rows_differ: Whether leaves may differ in their number of rows.
    """
    listed = (
        " A list is a tree of leaves: pass an array, `jnp.asarray(rows)`."
        if isinstance(batch, list)
        else ""
    )
    first: tuple[str, int] | None = None
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        where = f"batch{jax.tree_util.keystr(path)}"
        if jnp.ndim(leaf) == 0:
            raise ValueError(
                f"`{where}` is a scalar; batch leaves are `[global_batch, ...]`. Pass what all "
                f"workers share as `step(..., shared=)`.{listed}"
            )
        rows = jnp.shape(leaf)[0]
        if rows == 0:
            raise ValueError(f"`{where}` holds no examples: the global batch must not be empty.")
        if rows % devices:
            more = -rows % devices
            padded = (
                f" Pad it, `jax.tree.map(lambda x: jnp.pad(x, [(0, {more})] + [(0, 0)] * (x.ndim - "
                "1)), batch)`, with a leaf of weights that are 0 for the added rows; or, if all "
                "workers need the whole array, pass it as `step(..., shared=)`."
            )
            raise ValueError(
                f"`{where}` has a global batch of {rows}, which is not divisible by {devices} "
                f"workers.{listed or padded}"
            )
        first = first or (where, rows)
        if rows != first[1] and not rows_differ:
            raise ValueError(
                f"`{where}` has {rows} rows, but `{first[0]}` has {first[1]}, and each worker gets "
                f"a part of both. If all workers need the whole array, pass it as `step(..., "
                "shared=)`, and `loss_fn` takes `shared`. If rows of several kinds belong "
                "together, such as nodes and edges of graphs, pass `rows_differ=True`."
            )


def require_divided(
    param_specs: PyTree, batch_specs: PyTree, mesh: Mesh, shard_axes: tuple[str, ...]
) -> None:
    """Raises a ValueError if the devices of an axis of shards would all do the same work.

    They do if neither parameters nor rows of the batch are sharded over it.
    """
    specs = jax.tree.leaves((param_specs, batch_specs), is_leaf=is_spec)
    divided = {name for spec in specs for name in axes_in(spec)}
    if idle := [name for name in shard_axes if name not in divided and mesh.shape[name] > 1]:
        raise ValueError(
            f"No parameter is sharded over {idle}, which `shard_axes` names, so the devices there "
            "would all compute the same rows. Shard the parameters; or name the axes in "
            "`batch_axes`; or omit them in `shard_axes`, and the batch is split over them."
        )


def require_global(batch: PyTree, mesh: Mesh) -> None:
    """Raises a ValueError if, on a mesh of several processes, a leaf is not an array over all."""
    if not mesh.is_multi_process:
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
            raise ValueError(
                f"`batch{jax.tree_util.keystr(path)}` must be an array over all processes of the "
                f"mesh, got a {type(leaf).__name__} of this process only: pass its rows to "
                "`jax.make_array_from_process_local_data`."
            )


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2


def require_parts(value: object, has_model_state: bool, has_aux: bool) -> None:
    """Raises a ValueError unless the loss returned the parts that the step expects."""
    if not (has_model_state or has_aux):
        if isinstance(value, tuple | list | Mapping):
            raise ValueError(
                f"`loss_fn` must return a scalar, got {jax.tree.structure(value)}. If it also "
                "returns metrics, pass `has_aux=True`; if it returns a changed model state, pass "
                "`has_model_state=True`."
            )
        return
    if has_model_state:
        options, parts = "has_model_state=True", "(loss, model_state)"
        if has_aux:
            options, parts = f"{options}, has_aux=True", "(loss, (model_state, aux))"
        valid = _is_pair(value) and (not has_aux or _is_pair(value[1]))  # type: ignore[index]
    else:
        options, parts, valid = "has_aux=True", "(loss, aux)", _is_pair(value)
    if not valid:
        raise ValueError(
            f"With `{options}`, `loss_fn` (and the value of `gradients`) must be a pair, "
            f"`{parts}`, got {jax.tree.structure(value)}. For `window_gradients` and "
            "`loss_scaled_gradients`, use `functools.partial(window_gradients, has_aux=True)`."
        )


def require_aux(aux: object, taken: set[str]) -> None:
    """Raises a ValueError unless aux is a dict of real numbers without reserved names."""
    names = aux.keys() if isinstance(aux, Mapping) else set()
    reserved = taken & names or {key for key in names if str(key).startswith("diagnostics/")}
    if not isinstance(aux, Mapping) or reserved:
        raise ValueError(
            "`loss_fn` with `has_aux=True` must return `(loss, aux)`, `aux` a dict of metrics "
            f"without the key {' or '.join(map(repr, sorted(taken)))} or keys that begin with "
            f"'diagnostics/', got {jax.tree.structure(aux)}."
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(aux):
        kind = getattr(leaf, "dtype", None) or np.asarray(leaf).dtype
        is_key = jnp.issubdtype(kind, jax.dtypes.prng_key)  # `jnp.isdtype` rejects keys.
        if is_key or (kind != jnp.bool_ and not jnp.isdtype(kind, ("real floating", "integral"))):
            raise ValueError(
                f"`aux{jax.tree_util.keystr(path)}` is {kind}, but metrics must be real "
                "numbers: return real and imaginary parts separately, and only numbers."
            )


def require_means(
    aux_of: Callable[[PyTree], PyTree], aux: PyTree, batch: PyTree, remedy: str
) -> None:
    """Raises a ValueError if an entry of aux grows with the batch, with one value per example.

    Args:
      aux_of: The function from a worker's batch to aux. It is traced with twice the rows, unless
        all entries of aux are scalars.
      aux: The aux of the worker's own batch.
      batch: The worker's batch.
      remedy: The end of the message: an alternative to returning the mean.
    """
    if not any(jnp.ndim(leaf) for leaf in jax.tree.leaves(aux)):
        return
    try:
        twice: PyTree = jax.eval_shape(
            lambda rows: aux_of(jax.tree.map(lambda x: jnp.concatenate([x, x]), rows)), batch
        )
    except Exception:
        return  # The loss requires this number of rows, so it cannot be checked.
    flat = jax.tree_util.tree_leaves_with_path(aux, is_leaf=is_reduced)
    for (path, node), leaf, other in zip(
        flat, jax.tree.leaves(aux), jax.tree.leaves(twice), strict=True
    ):
        if jnp.shape(leaf) != jnp.shape(other):
            raise ValueError(
                f"`aux{jax.tree_util.keystr(path)}` has shape {jnp.shape(leaf)}, one value per "
                "example, and workers would mix examples: return its "
                f"{node.by if is_reduced(node) else 'mean'}{remedy}."
            )


def require_gradients_of(
    loss_fn: Callable[..., Any],
    params: PyTree,
    args: tuple[PyTree, ...],
    has_key: bool,
    shared: dict[str, PyTree],
) -> None:
    """Raises a ValueError if parameters have no gradient, or the loss takes other arguments."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise ValueError(
                f"The parameters at {jax.tree_util.keystr(path) or 'the root'} are {leaf.dtype} "
                "and have no gradient: move them to the batch, or to the model state of "
                "`has_model_state=True`."
            )
    try:
        inspect.signature(loss_fn).bind(params, *args, **shared)
    except TypeError:
        has_model_state = len(args) - has_key > 1
        names = ["params", *["model_state"] * has_model_state, "batch", *["key"] * has_key]
        names += [f"{name}=" for name in shared]
        called = f"`loss_fn` is called with `({', '.join(names)})`"
        because = []
        if has_model_state:
            because.append("`has_model_state=True`")
        if has_key:
            because.append("the step received a `key`")
        because += [f"the step received `{name}`" for name in shared]
        why = f", since {' and '.join(because)}" if because else ""
        takes = inspect.signature(loss_fn)
        forgotten = "shared" in takes.parameters and not shared
        remedy = "call the step with `shared=`" if forgotten else "give it these arguments"
        raise ValueError(f"{called}{why}, but takes `{takes}`: {remedy}.") from None
    except ValueError:
        return  # A builtin without a signature.


def require_arrays_only(extra_args: dict[str, PyTree], used: set[str]) -> None:
    """Raises a ValueError if an extra argument of a step that is not yet known is a function."""
    for name in extra_args.keys() - used:
        if any(map(callable, jax.tree.leaves(extra_args[name]))):
            raise ValueError(
                f"`step(..., {name}=)` is a function, but a step takes arrays only. What evaluates "
                "the loss or its gradient again, such as a line search, is not supported; "
                "`gradients=` of the step may evaluate them as often as it needs."
            )


def require_used(
    fn: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    extra_args: dict[str, PyTree],
    used: set[str],
    workers: int,
) -> None:
    """Raises a ValueError if no result of the step depends on an extra argument, often a typo.

    Args:
      fn: The step; it is traced once per set of names.
      args: Its arguments before the extra ones.
      extra_args: The extra arguments by name.
      used: The names that are already known to be used; this call adds to them.
      workers: The number of workers.
    """
    if all(name in used or not jax.tree.leaves(value) for name, value in extra_args.items()):
        return
    jaxpr = jax.make_jaxpr(fn)(*args, extra_args).jaxpr
    matters = live(jaxpr, [True] * len(jaxpr.outvars))[1]
    leaves = jax.tree_util.tree_leaves_with_path(extra_args)
    found = {
        path[0].key
        for (path, _), matter in zip(leaves, matters[len(matters) - len(leaves) :], strict=True)
        if matter
    }
    ignored = sorted({path[0].key for path, _ in leaves} - found)
    if workers == 1:  # A single worker needs no weights and no averaging.
        ignored = [name for name in ignored if name not in ("exact", "present", "weight")]
    if ignored:
        raise ValueError(
            f"Nothing in `tx` uses the extra argument {', '.join(map(repr, ignored))}: remove it, "
            "or correct its name."
        )
    used |= set(extra_args)
