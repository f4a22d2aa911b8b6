"""A check of methods whose codec needs the shapes of leaves."""

from jaxcomm.aggregation._coded import AggregatorOptions


def require_leaves(options: AggregatorOptions) -> None:
    """Raises unless `scope` is `"leaf"`: a bucket is a vector, which low rank cannot compress."""
    if options.get("scope") not in (None, "leaf"):
        raise ValueError(
            f"`scope` must be 'leaf', got {options.get('scope')!r}: a bucket is one vector, and a "
            "low-rank method needs the matrices of the leaves."
        )
