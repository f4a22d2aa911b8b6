"""What the catalogue holds of a method, and the sizes at which it builds one."""

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import optax

from jaxcomm._contract import Codec
from jaxcomm.aggregation import all_gather_mean, all_reduce_mean, two_stage_mean
from jaxcomm.compression.feedback import error_feedback

T = TypeVar("T")
Letters: TypeAlias = Mapping[str, float | str | tuple[float | str, float | str]]
Kind: TypeAlias = Literal["mean", "wrapper", "gossip", "local"]
Exchange: TypeAlias = Literal[
    "all-reduce", "all-gather", "two stages", "ring", "doubling", "tree", "server", "votes",
    "neighbors", "every period", "as the inner aggregator",
]  # fmt: skip
Claim: TypeAlias = Literal[
    "exact", "exact if all fits", "unbiased", "nearest", "biased", "feedback",
    "damped feedback", "no mean", "other",
]  # fmt: skip

CLAIMS: Mapping[Claim, str] = {
    "exact": "exact",
    "exact if all fits": "exact if all rows fit",
    "unbiased": "unbiased",
    "nearest": "rounded",
    "biased": "biased",
    "feedback": "feedback",
    "damped feedback": "damped feedback",
    "no mean": "not a mean",
    "other": "",
}
"""Each claim, as docs/methods.md prints it; `other` leaves it to the note."""


class Size(NamedTuple):
    """What the settings of methods depend on: how many coordinates there are, and of which kind.

    Attributes:
      tiny: Whether there are too few coordinates for the defaults of methods.
      ratio: The fraction of coordinates that a sparse method sends.
      drawn: The fraction that `random_k` draws.
      first: The fraction that is left after the first selection, if there are two.
      capacity: The nonzero codes that `sparse_global_qsgd` sends at most.
      threshold: The magnitude that a coordinate must exceed.
      blocks: The blocks of coordinates that take turns.
      rank: The rank of factors.
      directions: The random directions of `zeroth_order`.
      density: The largest fraction of nonzero rows on one worker.
      union_density: The largest fraction of nonzero rows in the union over workers.
      granularity: What counts as a row.
      overflow: What becomes of rows that do not fit.
      sketch_ratio: Cells of a sketch of rows per coordinate of its capacity.
      table_ratio: Cells of any other sketch per coordinate.
    """

    tiny: bool
    ratio: float
    drawn: float
    first: float
    capacity: int
    threshold: float
    blocks: int
    rank: int
    directions: int
    density: float
    union_density: float
    granularity: Any
    overflow: Any
    sketch_ratio: float
    table_ratio: float

    def of(self, tiny: T, large: T) -> T:
        """The setting of this size, of those for few coordinates and for a model."""
        return tiny if self.tiny else large


TINY = Size(
    True, ratio=0.25, drawn=0.5, first=0.5, capacity=2048, threshold=0.5, blocks=2, rank=1,
    directions=256, density=1.0, union_density=1.0, granularity="element", overflow="nan",
    sketch_ratio=1.5, table_ratio=2.0,
)  # fmt: skip
"""For the tens of coordinates of a test: a quarter of them, in blocks of 4 or 8."""

LARGE = Size(
    False, ratio=0.01, drawn=0.01, first=0.1, capacity=4096, threshold=2.576, blocks=100, rank=4,
    directions=2, density=0.01, union_density=0.02, granularity=100, overflow="drop",
    sketch_ratio=1.5, table_ratio=0.1,
)  # fmt: skip
"""For a model: 1 % of the coordinates, as many as exceed the threshold if they are normal."""

Build: TypeAlias = Callable[..., optax.GradientTransformationExtraArgs]
CodecOf: TypeAlias = Callable[[Size], Codec]


class Method(NamedTuple):
    """A method, once: how it is called and built, what it claims, and where it is from.

    Attributes:
      name: Its public name; that of a variant or composition has the name of what is special in it.
      call: The call, with the letters that docs/methods.md explains.
      build: `(size, *, axis_name="data", seed=0) -> transformation`; of gossip
        `(size, workers=8)`, of local steps `(size, inner, period=3, aggregator=None)`.
      exchange: How updates travel.
      claim: What its result is, compared with the mean of workers.
      note: What follows the claim, with its punctuation.
      error: The bound of E|G - mean|^2 for one that claims to be unbiased, without the sum of
        squares; else delta, the contraction of its codec. Words may follow a semicolon.
      bytes: What a worker sends for one update; words may follow a semicolon.
      letters: Numbers of the formulas; each may be a formula of a `Size`, or a pair, of which the
        second one is for a model.
      paper: Authors and year.
      suffix: What follows the call on the page.
      like: The method whose line of the page it shares, and whose bytes with letters of its own.
      kind: The table of the page that it belongs to.
      family: Methods of one family share most of their code.
      codec: The codec, where the method is one aggregator of one codec; without its feedback.
      feedback: What keeps the residual of the codec.
      parts: Public functions that it is made of, beside those in its call.
      graph: `workers -> graph`, or another mixing, of gossip.
    """

    name: str
    call: str
    build: Build
    exchange: Exchange = "all-reduce"
    claim: Claim = "other"
    note: str = ""
    error: str = ""
    bytes: str = ""
    letters: Letters = {}  # noqa: RUF012
    paper: str = ""
    suffix: str = ""
    like: str = ""
    kind: Kind = "mean"
    family: str = ""
    codec: CodecOf | None = None
    feedback: Callable[[Codec], Codec] | None = None
    parts: tuple[str, ...] = ()
    graph: Callable[[int], Any] | None = None

    @property
    def words(self) -> set[str]:
        """Its name, and the names in its call and of its parts: what selects its tests."""
        return {self.name, *re.findall(r"\w+", self.call), *self.parts}

    @property
    def is_unbiased(self) -> bool:
        """Whether the expectation of the result is the mean of workers."""
        return self.claim in ("exact", "exact if all fits", "unbiased")

    def filled(self, line: "Method") -> "Method":
        """With the bytes and the paper of the method that it is like, where it has none.

        Args:
          line: That method. Letters of formulas that differ are this one's.
        """
        return self._replace(
            bytes=self.bytes or line.bytes,
            paper=self.paper or line.paper,
            letters={**line.letters, **self.letters},
        )

    def __repr__(self) -> str:
        return self.name


def composed(
    name: str,
    call: str,
    aggregator: Build,
    exchange: Exchange,
    codec: CodecOf,
    feedback: Callable[[Codec], Codec] | None = None,
    scope: tuple[str | None, str | None] = (None, None),
    **rest: Any,
) -> Method:
    """One aggregator of one codec, with its feedback; `scope` is for few coordinates, and many."""

    def build(size: Size, **options: Any) -> optax.GradientTransformationExtraArgs:
        inner = codec(size)
        whole = feedback(inner) if feedback else inner
        return aggregator(whole, **{"scope": size.of(*scope), **options})

    return Method(name, call, build, exchange, codec=codec, feedback=feedback, **rest)


def summed(name: str, call: str, codec: CodecOf, **rest: Any) -> Method:
    """Codes of all workers are added on the way."""
    return composed(name, call, all_reduce_mean, "all-reduce", codec, **rest)


def gathered(name: str, call: str, codec: CodecOf, **rest: Any) -> Method:
    """Every worker receives the codes of all others."""
    return composed(name, call, all_gather_mean, "all-gather", codec, **rest)


def with_feedback(name: str, call: str, codec: CodecOf, **rest: Any) -> Method:
    """A biased codec whose error is kept for the next step, gathered."""
    rest = {"claim": "feedback", "feedback": error_feedback} | rest
    return gathered(name, call, codec, **rest)


def in_two_stages(name: str, call: str, codec: CodecOf, **rest: Any) -> Method:
    """Workers average parts of the update, and encode their means again."""

    def build(size: Size, **options: Any) -> optax.GradientTransformationExtraArgs:
        return two_stage_mean(codec(size), **options)

    return Method(name, call, build, "two stages", **rest)
