"""The options that aggregators of codes share, checked and documented once."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict, TypeVar, get_type_hints

import jax

from jaxcomm import _buckets, _units
from jaxcomm._base import Codec


class AggregatorOptions(TypedDict, total=False):
    """The keywords that aggregators of codes share.

    Attributes:
      scope: What shares statistics: each `"leaf"`; a `"bucket"`, consecutive leaves of up to
        `bucket_bytes`; or the whole `"tree"`, of buckets. Default: what the codec asks for,
        `codec.scope`. Whether a bucket is one vector as well, `codec.layout` says.
      bucket_bytes: The most float32 bytes in a bucket; a larger leaf is one by itself. Default: 32
        MiB.
      seed: Seed of the randomness; may be traced. Default: 0.
      key: A typed threefry key, in place of `seed`.
      diagnostics: Whether the state's field `diagnostics` tells of the step: `compression_error`,
        `density`, `residual_norm`, and what the codec adds; see :func:`jaxcomm.global_qsgd`.
    """

    scope: _units.Scope | None
    bucket_bytes: int | None
    seed: int
    key: jax.Array | None
    diagnostics: bool


DEFAULTS: AggregatorOptions = {
    "scope": None,
    "bucket_bytes": None,
    "seed": 0,
    "key": None,
    "diagnostics": False,
}


class Chosen(NamedTuple):
    """The options in force for a codec."""

    scope: _units.Scope
    bucket_bytes: int
    seed: int
    key: jax.Array | None
    diagnostics: bool


_Constructor = TypeVar("_Constructor", bound=Callable[..., Any])


def takes_options(construct: _Constructor) -> _Constructor:
    """Shows `help` and callers the keywords of `AggregatorOptions` in place of `**options`."""
    signature = inspect.signature(construct)
    *own, _ = signature.parameters.values()
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for (name, kind), default in zip(
            get_type_hints(AggregatorOptions).items(), DEFAULTS.values(), strict=True
        )
    ]
    _, explained = (inspect.getdoc(AggregatorOptions) or "Attributes:\n").split("Attributes:\n")
    document = (inspect.getdoc(construct) or "").replace(
        "\n\nReturns:", f"\n{explained}\n\nReturns:", 1
    )
    vars(construct)["__signature__"] = signature.replace(parameters=[*own, *shared])
    construct.__doc__ = document
    return construct


def choose(options: AggregatorOptions, codec: Codec) -> Chosen:
    """The options, with the defaults of the codec where none is given.

    Raises:
      ValueError: If one is out of range.
    """
    given: AggregatorOptions = {**DEFAULTS, **options}
    scope = codec.scope if given["scope"] is None else given["scope"]
    _units.check_scope(scope)
    capacity = _buckets.BUCKET_BYTES if given["bucket_bytes"] is None else given["bucket_bytes"]
    if not isinstance(capacity, int) or capacity < 4:
        raise ValueError(
            f"`bucket_bytes` must be a Python int of at least 4, got {capacity}. Under "
            "`optax.inject_hyperparams` pass `static_args=('bucket_bytes',)`."
        )
    require_switch(given["diagnostics"])
    return Chosen(scope, capacity, given["seed"], given["key"], given["diagnostics"])


def require_switch(diagnostics: bool) -> None:
    """Raises unless `diagnostics` is a Python bool, on which the structure of the state depends."""
    if not isinstance(diagnostics, bool):
        raise ValueError(
            f"`diagnostics` must be a Python bool, got {diagnostics!r}. Under "
            "`optax.inject_hyperparams` pass `static_args=('diagnostics',)`."
        )
