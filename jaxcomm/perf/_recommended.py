"""The methods that `advise` compares and `calibrate` times, and what theory says of their steps."""

import dataclasses
import functools
import json
from typing import NamedTuple

import optax

from jaxcomm import aggregation, methods
from jaxcomm._contract import Claims
from jaxcomm.compression import blockwise, low_rank
from jaxcomm.compression.quantizers import dither, scaled_signs
from jaxcomm.compression.quantizers._dither import DEFAULT_LEVELS, choose_field
from jaxcomm.compression.sparsifiers import top_k

BLOCK, LOCAL_STEPS = 256, 8
_RECORDS = "records of 2026-11"
_FEEDBACK = "medium: biased, with feedback: tune the rate"
_RACE = "4 workers, 3.3 M parameters"
_LITTLE = 1e-3  # Of a contraction: a guarantee after more than 10^6 steps is no guarantee.


class ErrorModel(NamedTuple):
    r"""The error of one step and its known price.

    Attributes:
      kind: "exact", "unbiased", "biased" or "unknown".
      value: :math:`\omega` of an unbiased codec, :math:`\delta` of a biased one; None if no bound
        is known.
      steps: The least and the largest factor on the number of steps that theory allows; None if
        none is known.
      source: What the factor is from, and what it leaves out.
    """

    kind: str
    value: float | None
    steps: tuple[float, float] | None
    source: str

    def __str__(self) -> str:
        size, steps = "", "unknown"
        if self.kind == "unbiased":
            size = f", with a variance of at most {self.value:.3g} squared norms of the gradients"
        elif self.kind == "biased":
            sent = (
                f"{self.value:.2g}" if self.value and self.value >= _LITTLE else "next to nothing"
            )
            size = (
                f": in the worst case, a step sends {sent} of the squared norm of a gradient, and "
                "feedback keeps the rest for later steps"
            )
        if self.steps is not None:
            low, high = self.steps
            steps = f"x {low:g}" + ("" if low == high else f" to {high:.3g}")
        return f"{self.kind}{size}; steps: {steps} ({self.source})"


EXACT = ErrorModel("exact", 0.0, (1.0, 1.0), "the mean is exact up to rounding")
UNKNOWN = ErrorModel("unknown", None, None, "no claim is given: train with both and compare")


def error_of(claims: Claims | ErrorModel, size: int, workers: int) -> ErrorModel:
    r"""Returns the error model of a codec's claims.

    An unbiased codec of variance :math:`\omega` multiplies the variance of stochastic gradients by
    at most :math:`1 + \omega`, and with it the steps of SGD where noise dominates (Alistarh et al.
    2017, theorem 3.2; the bound of Xin et al. 2023 is the same). A contraction with error feedback
    has the leading term of SGD after of the order of :math:`1/\delta^2` steps (Karimireddy et al.
    2019); no factor is known before that, or with Adam.

    Args:
      claims: The claims of the codec, or its error.
      size: The coordinates that share statistics.
      workers: The workers that share statistics.
    """
    if isinstance(claims, ErrorModel):
        return claims
    if claims.variance is not None:
        omega = float(claims.variance(size, workers))
        source = "bound of SGD where noise dominates; unknown with Adam"
        return ErrorModel("unbiased", omega, (1.0, 1.0 + omega), source)
    if claims.contraction is not None:
        delta = float(claims.contraction(size, workers))
        after = f"as SGD after of the order of {delta**-2:.1e} steps, unknown before"
        return ErrorModel("biased", delta, None, after if delta > _LITTLE else "no useful bound")
    return UNKNOWN


@dataclasses.dataclass(frozen=True)
class Method:
    """A method that can be recommended, for an axis and a number of workers.

    Attributes:
      code: The code that makes it: what is predicted.
      tx: What this code makes; of local steps, the `aggregator` of their displacements.
      claims: Those of its codec, or the error.
      steps: The factor on the number of steps that the ranking assumes; None if the method has
        missed the loss of the exact mean, so that it is never recommended.
      risk: What is given up, and where `steps` is from.
      overlaps: Whether each bucket can be sent as soon as its gradients are there: the ranking
        then has the time with overlap, in favor of not compressing.
      sharing: The workers that share statistics.
      begun: The code with the exact steps with which the records began, if they did.
      period: The steps between exchanges; local steps if there is more than one.
      aggregator: The code of `tx`, of local steps.
      optimizer: The code of the optimizer, for local steps.
    """

    code: str
    tx: optax.GradientTransformation
    claims: Claims | ErrorModel
    steps: float | None
    risk: str
    overlaps: bool = False
    sharing: int = 1
    begun: str = ""
    period: int = 1
    aggregator: str = ""
    optimizer: str = "optimizer"

    @property
    def paste(self) -> str:
        """What to put into `optax.chain`: before the optimizer, or after it for local steps."""
        return self.begun or self.code

    @property
    def line(self) -> str:
        """The line of code to paste."""
        if self.period > 1:
            return f"tx = optax.chain({self.optimizer}, {self.paste})"
        return f"tx = optax.chain({self.paste}, optimizer)"


def _twice(claims: Claims) -> Claims:
    """Those of two stages of an unbiased codec, where gradients are noise."""
    once = claims.variance
    assert once is not None
    return Claims(variance=lambda size, workers: (1 + once(size, workers)) ** 2 - 1)


@functools.lru_cache(maxsize=256)
def recommended(axis_name: str, workers: int) -> tuple[Method, ...]:
    """The methods with their default options, as one of several workers runs them; exact first."""
    axis = json.dumps(axis_name, ensure_ascii=False)
    exact = f"jaxcomm.mean({axis})"
    blocks = blockwise(dither(bits=4), BLOCK)
    four_bits = (
        "jaxcomm.two_stage_mean(jaxcomm.compression.blockwise("
        f"jaxcomm.quantizers.dither(bits=4), {BLOCK}), axis_name={axis})"
    )
    of_four_bits = aggregation.two_stage_mean(blocks, axis_name=axis_name)
    field = choose_field(DEFAULT_LEVELS, None, workers)

    def power_sgd(rank: int, steps: float | None, risk: str) -> Method:
        code = f"jaxcomm.power_sgd({axis}, rank={rank})"
        claims = low_rank.power_iteration(rank=rank).claims
        begun = f"jaxcomm.warmup([{exact}, {code}], every=2)"
        tx = methods.power_sgd(axis_name, rank=rank)
        return Method(code, tx, claims, steps, risk, begun=begun)

    return (
        Method(exact, aggregation.mean(axis_name), EXACT, 1.0, "none", overlaps=True),
        Method(
            f'jaxcomm.mean({axis}, wire_dtype="bfloat16")',
            aggregation.mean(axis_name, wire_dtype="bfloat16"),
            UNKNOWN._replace(source="rounds to nearest, float32 sums"),
            1.05,
            "small: rounds to 8 bits of mantissa",
            overlaps=True,
        ),
        Method(
            f"jaxcomm.global_qsgd({axis})",
            methods.global_qsgd(axis_name, levels=DEFAULT_LEVELS, bits=field.width),
            dither().claims,
            1.2,
            f"small: unbiased; {_RECORDS}: 0.97 [0.86, 1.10] of the loss with SGD, 1.17 with Adam",
            sharing=workers,
        ),
        Method(
            four_bits,
            of_four_bits,
            _twice(blocks.claims),
            1.2,
            f"small: unbiased, 4 bits; {_RACE}: 1.02 [0.84, 1.24] x the steps with Adam",
        ),
        Method(
            f"jaxcomm.synchronization.local_sgd({LOCAL_STEPS}, axis_name={axis}, "
            f"aggregator={four_bits})",
            of_four_bits,
            UNKNOWN._replace(source="parameters differ by worker between exchanges"),
            1.35,
            f"medium: local steps, so begin from `jaxcomm.replicate(params, ...)`; {_RACE}: "
            "1.34 [1.13, 1.59] x the steps with Adam",
            period=LOCAL_STEPS,
            aggregator=four_bits,
            optimizer=f"jaxcomm.per_worker(optimizer, axis_name={axis})",
        ),
        Method(
            f"jaxcomm.top_k_sgd({axis}, ratio=0.01)",
            methods.top_k_sgd(axis_name, ratio=0.01),
            top_k(ratio=0.01).claims,
            None,
            f"large: {_RECORDS}: 3.5 x the loss of the exact mean with SGD",
        ),
        Method(
            f"jaxcomm.ef_sign_sgd({axis})",
            methods.ef_sign_sgd(axis_name),
            scaled_signs().claims,
            None,
            f"large: {_RECORDS}: 6.1 x the loss of the exact mean with SGD",
        ),
        power_sgd(
            4,
            1.25,
            f"{_FEEDBACK}; {_RACE}: 1.25 [1.07, 1.46] x the steps with Adam, after two exact steps",
        ),
        power_sgd(1, None, f"large: {_RACE}: missed the loss of the exact mean"),
    )
