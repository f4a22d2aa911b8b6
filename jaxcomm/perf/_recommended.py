"""The methods that `advise` compares and `calibrate` times, with their default options."""

import json
from collections.abc import Callable, Mapping
from typing import NamedTuple

import optax

from jaxcomm import aggregation, methods
from jaxcomm._contract import Claims, Codec
from jaxcomm.compression import blockwise, low_rank
from jaxcomm.compression.quantizers import dither, scaled_signs
from jaxcomm.compression.quantizers._dither import DEFAULT_LEVELS, choose_field
from jaxcomm.compression.sparsifiers import top_k
from jaxcomm.perf._error import EXACT, UNKNOWN, ErrorModel, error_of

BLOCK = 256
_RECORDS = "records of 2026-11"


class Method(NamedTuple):
    """A method that can be recommended.

    Attributes:
      line: The code that makes it, with `{axis}` for the name of the axis.
      build: `axis_name -> tx`, the same.
      error: `(coordinates, workers) -> ErrorModel`.
      steps: The factor on the number of steps that the ranking assumes; None if the method has
        missed the loss of the exact mean, so that it is never recommended.
      risk: What is given up, and where `steps` is from.
      overlaps: Whether each bucket can be sent as soon as its gradients are there: the ranking
        then has the time with overlap, in favor of not compressing.
      timed: `(axis_name, workers) -> tx` for the time of one worker among several, if the method
        chooses its fields by the number of workers.
      exact_steps: After how many exact steps it begins, in the trainings that `steps` is from.
    """

    line: str
    build: Callable[[str], optax.GradientTransformationExtraArgs]
    error: Callable[[int, int], ErrorModel]
    steps: float | None
    risk: str
    overlaps: bool = False
    timed: Callable[[str, int], optax.GradientTransformationExtraArgs] | None = None
    exact_steps: int = 0

    def code(self, axis_name: str) -> str:
        """The line for an axis, without the exact steps: what is predicted."""
        return _for_axis(self.line, axis_name)

    @property
    def started(self) -> str:
        """The line with the exact steps, to train with."""
        if not self.exact_steps:
            return self.line
        return f"jaxcomm.warmup([{RECOMMENDED[0].line}, {self.line}], every={self.exact_steps})"

    def paste(self, axis_name: str) -> str:
        """The same for an axis."""
        return _for_axis(self.started, axis_name)


def _for_axis(line: str, axis_name: str) -> str:
    return line.replace("{axis}", json.dumps(axis_name, ensure_ascii=False))


def _of(codec: Callable[[], Codec], shared: bool = False) -> Callable[[int, int], ErrorModel]:
    """The error of a codec, whose statistics may be shared by all workers."""
    return lambda size, workers: error_of(codec().claims, size, workers if shared else 1)


def _field_of(axis_name: str, workers: int) -> optax.GradientTransformationExtraArgs:
    """`global_qsgd` with the field that its default is for a number of workers."""
    field = choose_field(DEFAULT_LEVELS, None, workers)
    return methods.global_qsgd(axis_name, levels=DEFAULT_LEVELS, bits=field.width)


def _twice(size: int, workers: int) -> ErrorModel:
    """The error of two stages of an unbiased codec, where gradients are noise."""
    once = blockwise(dither(bits=4), BLOCK).claims.variance
    assert once is not None
    return error_of(
        Claims(variance=lambda size, workers: (1 + once(size, workers)) ** 2 - 1), size, 1
    )


RECOMMENDED: tuple[Method, ...] = (
    Method(
        "jaxcomm.mean({axis})",
        lambda axis: aggregation.mean(axis),
        lambda size, workers: EXACT,
        1.0,
        "none",
        overlaps=True,
    ),
    Method(
        'jaxcomm.mean({axis}, wire_dtype="bfloat16")',
        lambda axis: aggregation.mean(axis, wire_dtype="bfloat16"),
        lambda size, workers: UNKNOWN._replace(source="rounds to nearest, float32 sums"),
        1.05,
        "small: rounds to 8 bits of mantissa",
        overlaps=True,
    ),
    Method(
        "jaxcomm.global_qsgd({axis})",
        lambda axis: methods.global_qsgd(axis),
        _of(dither, shared=True),
        1.2,
        f"small: unbiased; {_RECORDS}: 0.97 [0.86, 1.10] of the loss with SGD, 1.17 with Adam",
        timed=_field_of,
    ),
    Method(
        "jaxcomm.two_stage_mean(jaxcomm.compression.blockwise("
        f"jaxcomm.quantizers.dither(bits=4), {BLOCK}), axis_name={{axis}})",
        lambda axis: aggregation.two_stage_mean(blockwise(dither(bits=4), BLOCK), axis_name=axis),
        _twice,
        1.2,
        "small: unbiased, 4 bits; the steps are an assumption",
    ),
    Method(
        "jaxcomm.top_k_sgd({axis}, ratio=0.01)",
        lambda axis: methods.top_k_sgd(axis, ratio=0.01),
        _of(lambda: top_k(ratio=0.01)),
        1.5,
        "medium: biased, with feedback: tune the rate; the steps are an assumption",
    ),
    Method(
        "jaxcomm.ef_sign_sgd({axis})",
        lambda axis: methods.ef_sign_sgd(axis),
        _of(scaled_signs),
        1.5,
        "medium: biased, with feedback: tune the rate; the steps are an assumption",
    ),
    Method(
        "jaxcomm.power_sgd({axis}, rank=4)",
        lambda axis: methods.power_sgd(axis, rank=4),
        _of(lambda: low_rank.power_iteration(rank=4)),
        1.5,
        f"medium: biased, with feedback: tune the rate; {_RECORDS}: 1.5 x the steps with Adam, "
        "after two exact steps",
        exact_steps=2,
    ),
    Method(
        "jaxcomm.power_sgd({axis}, rank=1)",
        lambda axis: methods.power_sgd(axis, rank=1),
        _of(lambda: low_rank.power_iteration(rank=1)),
        None,
        f"large: {_RECORDS}: missed the loss of the exact mean",
        exact_steps=2,
    ),
)


def transformations(axis_name: str, workers: int) -> Mapping[str, optax.GradientTransformation]:
    """The recommended methods by their code, as one of `workers` workers runs them."""
    return {
        method.code(axis_name): method.timed(axis_name, workers)
        if method.timed
        else method.build(axis_name)
        for method in RECOMMENDED
    }
