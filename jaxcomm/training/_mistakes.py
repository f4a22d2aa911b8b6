"""Mistakes in the use of a step, told by what they are and not by where they end."""

import traceback
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxcomm._base import PyTree
from jaxcomm._require import require_transformation
from jaxcomm.wire._program import live


def require_step_of(loss_fn: object, tx: object, gradients: object) -> None:
    """Raises unless a step can be made of them."""
    if not (callable(loss_fn) or gradients is not None):
        raise ValueError(f"`loss_fn` must be a function, got {loss_fn!r}.")
    require_transformation(tx)


def require_divisible(batch: PyTree, devices: int) -> None:
    """Raises unless the rows of each leaf can be dealt to the devices, the same number to each."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        where = f"batch{jax.tree_util.keystr(path)}"
        if jnp.ndim(leaf) == 0:
            listed = any(isinstance(key, jax.tree_util.SequenceKey) for key in path)
            raise ValueError(
                f"`{where}` is a scalar; batch leaves are `[global_batch, ...]`."
                + (
                    " A list is a tree of leaves: pass an array, `jnp.asarray(rows)`."
                    if listed and isinstance(leaf, int | float)
                    else ""
                )
            )
        rows = jnp.shape(leaf)[0]
        if rows == 0:
            raise ValueError(f"`{where}` holds no examples, of which a loss has no mean.")
        if rows % devices:
            raise ValueError(
                f"`{where}` has a global batch of {rows}, which is not divisible by {devices} "
                "workers."
            )


def require_global(batch: PyTree, mesh: Mesh) -> None:
    """Raises where the mesh has devices of other processes and a leaf is not one array of all."""
    if not mesh.is_multi_process:
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
            raise ValueError(
                f"`batch{jax.tree_util.keystr(path)}` must be an array over all processes of the "
                f"mesh, got a {type(leaf).__name__} of this process alone: pass its rows to "
                "`jax.make_array_from_process_local_data`."
            )


def require_kept(tree: PyTree, what: str) -> None:
    """Raises where an array has been donated already."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        traced = isinstance(leaf, jax.core.Tracer)
        if isinstance(leaf, jax.Array) and not traced and leaf.is_deleted():
            raise ValueError(
                f"{what}{jax.tree_util.keystr(path)} was donated to an earlier step: go on with "
                "what that step returned, or make the step with `donate=False`."
            )


def require_pair(value: object) -> None:
    """Raises unless a loss comes with aux."""
    if not (isinstance(value, tuple | list) and len(value) == 2):
        raise ValueError(
            "With `has_aux=True` the value of `gradients` must be a pair, `(loss, aux)`, got "
            f"{jax.tree.structure(value)}: tell `gradients` of aux too, as in "
            "`functools.partial(window_gradients, has_aux=True)`."
        )


def require_aux(aux: object, taken: set[str], batch: PyTree) -> None:
    """Raises unless aux is a dict of metrics, none of them one value an example."""
    if not isinstance(aux, Mapping) or taken & aux.keys():
        raise ValueError(
            "`loss_fn` with `has_aux=True` must return `(loss, aux)`, `aux` a dict of metrics "
            f"without the key {' or '.join(map(repr, sorted(taken)))}, got "
            f"{jax.tree.structure(aux)}."
        )
    rows = {jnp.shape(leaf)[0] for leaf in jax.tree.leaves(batch) if jnp.ndim(leaf)}
    for path, leaf in jax.tree_util.tree_leaves_with_path(aux):
        if jnp.ndim(leaf) and jnp.shape(leaf)[0] in rows and rows != {1}:
            raise ValueError(
                f"`aux{jax.tree_util.keystr(path)}` has shape {jnp.shape(leaf)}, one value an "
                "example, and a mean over workers would mix up examples: return its mean, or make "
                "the step with `metrics='own'`."
            )


# By the module that an error has passed through on its way.
_AROUND = {
    optax.MultiStepsState.__module__: ("optax.MultiSteps", "jaxcomm.accumulate(tx, k)"),
    optax.ApplyIfFiniteState.__module__: ("optax.apply_if_finite", "jaxcomm.skip_nonfinite(tx)"),
}


def _differences(expected: PyTree, given: PyTree) -> str:
    """Where two states part, in a line; empty where they do not."""

    def described(tree: PyTree) -> dict[str, str]:
        return {
            jax.tree_util.keystr(path): "a leaf"
            for path, _ in jax.tree_util.tree_leaves_with_path(tree)
        }

    wanted, there = described(expected), described(given)
    if missing := [path for path in wanted if path not in there]:
        extra = [path for path in there if path not in wanted]
        return f"it lacks {missing[0] or 'the root'}" + (f" and has {extra[0]}" if extra else "")
    if extra := [path for path in there if path not in wanted]:
        return f"it has {extra[0] or 'the root'}, which `tx` knows nothing of"
    return ""


def explained(
    error: Exception, init: Callable[[PyTree], PyTree], params: PyTree, opt_state: PyTree
) -> Exception:
    """What an error of `tx.update` means, where that is known; else the error itself.

    Args:
      error: What was raised.
      init: `tx.init`.
      params: A worker's own.
      opt_state: The state that the step was given.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if known := _AROUND.get(frame.f_globals.get("__name__", "")):
            around, instead = known
            return ValueError(f"What communicates cannot stand in `{around}`: use `{instead}`.")
    try:
        expected: Any = jax.eval_shape(init, params)
    except Exception:
        return error
    if difference := _differences(expected, opt_state):
        return ValueError(
            f"The state is not one of this `tx`: {difference}. Start from `jaxcomm.init(tx, "
            "params, ...)`."
        )
    return error


def require_used(
    fn: Callable[..., PyTree],
    params: PyTree,
    opt_state: PyTree,
    batch: PyTree,
    key: jax.Array | None,
    extra_args: dict[str, PyTree],
    used: set[str],
) -> None:
    """Raises where an extra argument changes nothing of what the step returns: a typo, often.

    Args:
      fn: The step, which is traced once for each set of names.
      params: Its arguments, and so are the others.
      opt_state: ...
      batch: ...
      key: ...
      extra_args: By name.
      used: The names that are known to be used; those found join them.
    """
    if not set(extra_args) - used:
        return
    jaxpr = jax.make_jaxpr(fn)(params, opt_state, batch, key, extra_args).jaxpr
    matters = live(jaxpr, [True] * len(jaxpr.outvars))[1]
    given = jax.tree_util.tree_leaves_with_path(extra_args)
    found = {
        path[0].key
        for (path, _), does in zip(given, matters[len(matters) - len(given) :], strict=True)
        if does
    }
    if ignored := sorted({path[0].key for path, _ in given} - found):
        raise ValueError(
            f"Nothing in `tx` uses the extra argument {', '.join(map(repr, ignored))}: remove it, "
            "or correct its name."
        )
    used |= found
