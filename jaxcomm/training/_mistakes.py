"""Mistakes in the use of a step, told by what they are and not by where they end."""

import inspect
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
    listed = (
        " A list is a tree of leaves: pass an array, `jnp.asarray(rows)`."
        if isinstance(batch, list)
        else ""
    )
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        where = f"batch{jax.tree_util.keystr(path)}"
        if jnp.ndim(leaf) == 0:
            raise ValueError(
                f"`{where}` is a scalar; batch leaves are `[global_batch, ...]`.{listed}"
            )
        rows = jnp.shape(leaf)[0]
        if rows == 0:
            raise ValueError(f"`{where}` holds no examples, of which a loss has no mean.")
        if rows % devices:
            raise ValueError(
                f"`{where}` has a global batch of {rows}, which is not divisible by {devices} "
                f"workers.{listed}"
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


def require_pair(value: object) -> None:
    """Raises unless a loss comes with aux."""
    if not (isinstance(value, tuple | list) and len(value) == 2):
        raise ValueError(
            "With `has_aux=True`, `loss_fn` (and the value of `gradients`) must be a pair, `(loss, "
            f"aux)`, got {jax.tree.structure(value)}: tell `window_gradients` of aux by "
            "`functools.partial(window_gradients, has_aux=True)`."
        )


def require_aux(aux: object, taken: set[str]) -> None:
    """Raises unless aux is a dict of metrics with names and values of their own."""
    told = aux.keys() if isinstance(aux, Mapping) else set()
    reserved = taken & told or {key for key in told if str(key).startswith("diagnostics/")}
    if not isinstance(aux, Mapping) or reserved:
        raise ValueError(
            "`loss_fn` with `has_aux=True` must return `(loss, aux)`, `aux` a dict of metrics "
            f"without the key {' or '.join(map(repr, sorted(taken)))} or keys that begin with "
            f"'diagnostics/', got {jax.tree.structure(aux)}."
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(aux):
        kind = getattr(leaf, "dtype", None) or np.asarray(leaf).dtype
        if kind != jnp.bool_ and not (jnp.isdtype(kind, ("real floating", "integral"))):
            raise ValueError(
                f"`aux{jax.tree_util.keystr(path)}` is {kind}, and metrics are real numbers: "
                "return real and imaginary parts apart, and nothing that is no number."
            )


def require_means(
    aux_of: Callable[[PyTree], PyTree], aux: PyTree, batch: PyTree, remedy: str
) -> None:
    """Raises where an entry of aux grows with the batch: it holds one value an example.

    Args:
      aux_of: From a worker's batch to aux; traced with twice the rows, if aux is not of scalars.
      aux: That of the worker's own batch.
      batch: Its batch.
      remedy: What else might be done, in words.
    """
    if not any(jnp.ndim(leaf) for leaf in jax.tree.leaves(aux)):
        return
    try:
        twice: PyTree = jax.eval_shape(
            lambda rows: aux_of(jax.tree.map(lambda x: jnp.concatenate([x, x]), rows)), batch
        )
    except Exception:
        return  # What takes no other number of rows cannot be asked.
    for (path, leaf), other in zip(
        jax.tree_util.tree_leaves_with_path(aux), jax.tree.leaves(twice), strict=True
    ):
        if jnp.shape(leaf) != jnp.shape(other):
            raise ValueError(
                f"`aux{jax.tree_util.keystr(path)}` has shape {jnp.shape(leaf)}, one value an "
                f"example, and a mean would mix up examples: return its mean{remedy}."
            )


def require_gradients_of(loss_fn: Callable[..., Any], params: PyTree, keyed: bool) -> None:
    """Raises where `jax.grad` could not differentiate, or the loss does not take a key."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise ValueError(
                f"The parameters at {jax.tree_util.keystr(path) or 'the root'} are {leaf.dtype}, "
                "and have no gradient: keep them apart from parameters, in `loss_fn` or the batch."
            )
    if keyed:
        try:
            inspect.signature(loss_fn).bind(params, None, None)
        except TypeError:
            raise ValueError(
                "The step was given a `key`, and `loss_fn` does not take one: it is called with "
                "`(params, batch, key)`."
            ) from None
        except ValueError:
            return  # A builtin, which has no signature.


# By the module that an error has passed through on its way, and by what it says.
_AROUND = {
    optax.MultiStepsState.__module__: ("optax.MultiSteps", "jaxcomm.accumulate(tx, k)"),
    optax.ApplyIfFiniteState.__module__: ("optax.apply_if_finite", "jaxcomm.skip_nonfinite(tx)"),
}
_OF_COLLECTIVES = ("summed already", "must have equal output types", "must have the same type")


def _differences(expected: PyTree, given: PyTree) -> str:
    """Where two states part, in a line; empty where they do not."""

    def described(tree: PyTree) -> dict[str, str]:
        return {
            jax.tree_util.keystr(path): f"{x.dtype}{list(x.shape)}"
            for path, x in jax.tree_util.tree_leaves_with_path(tree)
        }

    wanted, there = described(expected), described(given)
    if missing := [path for path in wanted if path not in there]:
        extra = [path for path in there if path not in wanted]
        return f"it lacks {missing[0] or 'the root'}" + (f" and has {extra[0]}" if extra else "")
    if extra := [path for path in there if path not in wanted]:
        return f"it has {extra[0] or 'the root'}, which `tx` knows nothing of"
    if other := [path for path in wanted if wanted[path] != there[path]]:
        return f"{other[0]} is {there[other[0]]}, and should be {wanted[other[0]]}"
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
    try:
        expected: Any = jax.eval_shape(init, params)
        difference = _differences(expected, opt_state)
    except Exception:
        difference = ""
    if difference:
        return ValueError(
            f"The state is not one of this `tx`: {difference}. Start from `jaxcomm.init(tx, "
            "params, ...)`."
        )
    modules = {
        frame.f_globals.get("__name__") for frame, _ in traceback.walk_tb(error.__traceback__)
    }
    for module, (around, instead) in _AROUND.items():
        if module in modules and any(said in str(error) for said in _OF_COLLECTIVES):
            return ValueError(f"What communicates cannot stand in `{around}`: use `{instead}`.")
    return error


def require_used(
    fn: Callable[..., PyTree],
    params: PyTree,
    opt_state: PyTree,
    batch: PyTree,
    key: jax.Array | None,
    extra_args: dict[str, PyTree],
    used: set[str],
    workers: int,
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
      workers: How many there are.
    """
    if all(name in used or not jax.tree.leaves(given) for name, given in extra_args.items()):
        return
    jaxpr = jax.make_jaxpr(fn)(params, opt_state, batch, key, extra_args).jaxpr
    matters = live(jaxpr, [True] * len(jaxpr.outvars))[1]
    given = jax.tree_util.tree_leaves_with_path(extra_args)
    found = {
        path[0].key
        for (path, _), does in zip(given, matters[len(matters) - len(given) :], strict=True)
        if does
    }
    ignored = sorted({path[0].key for path, _ in given} - found)
    if workers == 1:  # Who is alone has nobody to be weighed against.
        ignored = [name for name in ignored if name not in ("exact", "present", "weight")]
    if ignored:
        raise ValueError(
            f"Nothing in `tx` uses the extra argument {', '.join(map(repr, ignored))}: remove it, "
            "or correct its name."
        )
    used |= set(extra_args)
