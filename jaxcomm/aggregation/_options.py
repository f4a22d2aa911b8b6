"""The options that aggregators with a codec share, checked and documented once."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict, TypeVar, get_type_hints

import jax

from jaxcomm import _units
from jaxcomm._contract import Codec


class AggregatorOptions(TypedDict, total=False):
    """The keyword arguments that aggregators with a codec share.

    Attributes:
      scope: Which coordinates share statistics: each `"leaf"`; a `"bucket"` of consecutive leaves,
        up to `bucket_bytes`; or the whole `"tree"`, divided into buckets. Default: the `scope` of
        the codec. Its `layout` determines whether a bucket is also encoded as one vector.
      bucket_bytes: The maximum size of a bucket in float32 bytes; a larger leaf has its own bucket.
        Default: 32 MiB.
      seed: Seed of the randomness; may be traced. Default: 0.
      key: A typed threefry key, in place of `seed`.
      diagnostics: Whether the state's field `diagnostics` reports `compression_error`, `density`
        and `residual_norm` of the step, and metrics of the codec; see
        :func:`jaxcomm.global_qsgd`.
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
    """The options of an aggregator, with the defaults of its codec filled in."""

    scope: _units.Scope
    bucket_bytes: int
    seed: int
    key: jax.Array | None
    diagnostics: bool


_Constructor = TypeVar("_Constructor", bound=Callable[..., Any])


def takes_options(construct: _Constructor) -> _Constructor:
    """Lists the keywords of `AggregatorOptions` in the signature and docstring of a constructor."""
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
    """The options, with defaults for those that are not set.

    Raises:
      ValueError: If an option is out of range.
    """
    full: AggregatorOptions = {**DEFAULTS, **options}
    scope = codec.scope if full["scope"] is None else full["scope"]
    _units.check_scope(scope)
    capacity = _units.BUCKET_BYTES if full["bucket_bytes"] is None else full["bucket_bytes"]
    if not isinstance(capacity, int) or capacity < 4:
        raise ValueError(
            f"`bucket_bytes` must be a Python int of at least 4, got {capacity}. Under "
            "`optax.inject_hyperparams` pass `static_args=('bucket_bytes',)`."
        )
    require_switch(full["diagnostics"])
    return Chosen(scope, capacity, full["seed"], full["key"], full["diagnostics"])


def require_switch(diagnostics: bool) -> None:
    """Raises unless `diagnostics` is a Python bool: the structure of the state depends on it."""
    if not isinstance(diagnostics, bool):
        raise ValueError(
            f"`diagnostics` must be a Python bool, got {diagnostics!r}. Under "
            "`optax.inject_hyperparams` pass `static_args=('diagnostics',)`."
        )
