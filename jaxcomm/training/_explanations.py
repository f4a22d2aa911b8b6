"""Explains errors of a loss or a transformation by what caused them, where that is certain."""

import re
import traceback
from collections.abc import Callable
from typing import Any

import jax
import optax

from jaxcomm._contract import PyTree

# Wrappers of optax that run a transformation in a conditional, and what to use instead.
_WRAPPERS = {
    "MultiSteps": ("optax.MultiSteps", "use `jaxcomm.accumulate(tx, k)`"),
    "apply_if_finite": ("optax.apply_if_finite", "use `jaxcomm.skip_nonfinite(tx)`"),
    "conditionally_": (
        "optax.conditionally_transform",
        "place it around the transformations after the aggregator only",
    ),
}
# Messages of errors that collectives raise inside these wrappers.
_COLLECTIVE_ERRORS = ("summed already", "must have equal output types", "must have the same type")
_MISSING = re.compile(r"missing \d+ required keyword-only arguments?: (.*)")


def _difference(expected: PyTree, actual: PyTree) -> str:
    """Describes the first difference of two states; empty if there is none."""

    def types(tree: PyTree) -> dict[str, str]:
        return {
            jax.tree_util.keystr(path): f"{x.dtype}{list(x.shape)}"
            for path, x in jax.tree_util.tree_leaves_with_path(tree)
        }

    wanted, found = types(expected), types(actual)
    if missing := [path for path in wanted if path not in found]:
        extra = [path for path in found if path not in wanted]
        return f"it lacks {missing[0] or 'the root'}" + (f" and has {extra[0]}" if extra else "")
    if extra := [path for path in found if path not in wanted]:
        return f"it has {extra[0] or 'the root'}, which the state of `tx` does not have"
    if other := [path for path in wanted if wanted[path] != found[path]]:
        return f"{other[0] or 'the root'} is {found[other[0]]}, and should be {wanted[other[0]]}"
    return ""


def explain_update_error(
    error: Exception, init: Callable[[PyTree], PyTree], params: PyTree, opt_state: PyTree
) -> Exception:
    """Returns an error that names the cause of an error of `tx.update`, or else the error itself.

    Args:
      error: The error of `tx.update`.
      init: `tx.init`.
      params: The parameters of one worker.
      opt_state: The state that the step received.
    """
    try:
        expected: Any = jax.eval_shape(init, params)
        difference = _difference(expected, opt_state)
    except Exception:
        difference = ""
    if difference:
        return ValueError(
            f"The state does not belong to this `tx`: {difference}. Start from `jaxcomm.init(tx, "
            "params, ...)`."
        )
    if isinstance(error, TypeError) and (missing := _MISSING.search(str(error))):
        if "_fn" in missing[1]:
            return ValueError(
                f"`tx` needs the extra arguments {missing[1]}, to evaluate the loss again, which a "
                "step does not support: leave out a line search, as in `optax.lbfgs(0.1, "
                "linesearch=None)`."
            )
        return ValueError(
            f"`tx` needs the extra arguments {missing[1]}: pass them to the step, such as the "
            "mean loss of the previous step, `step(..., value=metrics['loss'])`."
        )
    if isinstance(params, optax.LookaheadParams):
        error.add_note(
            "`optax.lookahead` has to contain the aggregator, as in `optax.lookahead(optax.chain("
            "jaxcomm.mean(), optax.sgd(0.1)), 5, 0.5)`, and takes the gradient of `params.fast`: "
            "return it from `gradients=` of the step."
        )
    functions = [frame.f_code.co_qualname for frame, _ in traceback.walk_tb(error.__traceback__)]
    for prefix, (wrapper, remedy) in _WRAPPERS.items():
        inside = any(name.startswith(prefix) for name in functions)
        if inside and any(part in str(error) for part in _COLLECTIVE_ERRORS):
            return ValueError(f"An aggregator or gossip cannot run inside `{wrapper}`: {remedy}.")
    return error
