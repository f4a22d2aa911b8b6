"""How an aggregator says over which axes it averages, so that others can be put around it."""

from collections.abc import Callable
from typing import Any, TypeVar

import optax

from jaxcomm import _axis
from jaxcomm._base import AxisName

_Update = TypeVar("_Update", bound=Callable[..., Any])


def averages_over(axis_name: AxisName) -> Callable[[_Update], _Update]:
    """Marks the update function of an aggregator that takes `outer_axes=`.

    Those are axes besides its own over which updates differ, and go on differing: private coins
    are drawn apart over them too.
    """

    def mark(update: _Update) -> _Update:
        vars(update)["averages_over"] = _axis.names(axis_name)
        return update

    return mark


def axes_of(tx: optax.GradientTransformation, user: str) -> tuple[str, ...]:
    """The axes over which an aggregator averages.

    Raises:
      ValueError: If `tx` is no aggregator that `user` can be put around.
    """
    axes: tuple[str, ...] | None = getattr(tx.update, "averages_over", None)
    if axes is None:
        raise ValueError(
            f"`{user}` takes aggregators that know of other axes, such as `jaxcomm.mean('ici')` "
            f"and `jaxcomm.global_qsgd('dcn')`, got {tx!r}. Chain the optimizer after "
            f"`{user}`, not inside it."
        )
    return axes
