"""Fragments of the parameters: which leaves they have, and in which steps they are exchanged."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import optax

from jaxcomm._contract import PerWorker, PyTree
from jaxcomm.synchronization._averaging_round import Averaging

Fragment: TypeAlias = PyTree
"""The tree of the parameters with `optax.MaskedNode` in place of the leaves of other fragments.

Leaves keep their paths. So an aggregator distinguishes all fragments and finds their specs, and
state is sharded as the parameters.
"""

Split: TypeAlias = Callable[[PyTree], list[int]]
"""A function from the parameters to the fragment number of each leaf, in order."""


class Schedule(NamedTuple):
    """The steps in which fragments are exchanged and arrive; steps are numbered from 1.

    Its methods take a Python int or an int32[].
    """

    period: int
    fragments: int
    overlap: int

    def offset(self, fragment: int) -> int:
        """The remainder, modulo the period, of the steps that exchange the fragment."""
        return fragment * self.period // self.fragments

    def begins(self, fragment: int, step: Any) -> Any:
        """Whether the step begins an exchange of the fragment."""
        return (step % self.period == self.offset(fragment)) & (step >= self.period)

    def arrives(self, fragment: int, step: Any) -> Any:
        """Whether the step applies the result of an exchange of the fragment."""
        return self.begins(fragment, step - self.overlap)

    def is_over(self, fragment: int, step: Any) -> Any:
        """Whether a result of the fragment would have arrived by the step.

        One that is still under way then is of a state with another period or overlap.
        """
        return (step - self.offset(fragment)) % self.period >= self.overlap


class Counted(NamedTuple):
    """What the steps between exchanges change, except parameters and the inner optimizer's."""

    step: jax.Array  # int32[], steps so far
    done: tuple[PerWorker, ...]  # each worker's steps since the last exchange of each fragment


class Streaming(NamedTuple):
    """The parts of `streaming_diloco`, for programs of their own.

    Attributes:
      schedule: When fragments are exchanged, and when they arrive.
      local: The steps between exchanges; its state is `(inner state, Counted)`.
      parts_of: `(tree, params) -> fragments`.
      exchange: `(rounds, displacement, steps, participates) -> rounds` of a fragment, on workers.
      mixed: `(parameters, anchor) -> parameters`, both in float32 at least.
    """

    schedule: Schedule
    local: optax.GradientTransformationExtraArgs
    parts_of: Callable[[PyTree, PyTree], list[Fragment]]
    exchange: Callable[..., Averaging]
    mixed: Callable[[PyTree, PyTree], PyTree]


def _split_evenly(params: PyTree, fragments: int) -> list[int]:
    """The fragment of each leaf: consecutive leaves, as equal in size as the order allows."""
    sizes = [x.size for x in jax.tree.leaves(params)]
    if fragments > len(sizes):
        raise ValueError(
            f"`fragments`={fragments} is more than the {len(sizes)} leaves of the parameters."
        )
    assigned: list[int] = []
    before, total = 0, max(sum(sizes), 1)
    for number, size in enumerate(sizes):
        # The position of the leaf's middle, limited so that each fragment gets a leaf.
        wanted = int((before + size / 2) / total * fragments)
        lowest = max(assigned[-1] if assigned else 0, fragments - (len(sizes) - number))
        highest = (assigned[-1] + 1) if assigned else 0
        assigned.append(min(max(wanted, lowest), highest))
        before += size
    return assigned


def parts_of(tree: PyTree, params: PyTree, fragments: int, split: Split | None) -> list[Fragment]:
    """The fragments of a tree like `params`.

    Raises:
      ValueError: If a leaf has no fragment, or a fragment no leaf.
    """
    numbers = split(params) if split else _split_evenly(params, fragments)
    leaves, treedef = jax.tree.flatten(tree)
    if len(numbers) != len(leaves) or set(numbers) != set(range(fragments)):
        raise ValueError(
            f"`split` must give each of the {len(leaves)} leaves a fragment from 0 to "
            f"{fragments - 1}, and each fragment a leaf, got {numbers!r}."
        )

    def part(fragment: int) -> Fragment:
        own = [
            x if number == fragment else optax.MaskedNode()
            for x, number in zip(leaves, numbers, strict=True)
        ]
        return jax.tree.unflatten(treedef, own)

    return [part(fragment) for fragment in range(fragments)]


def joined(parts: Sequence[Fragment]) -> PyTree:
    """The tree whose leaves are in one of the fragments each."""

    def present(*nodes: Any) -> Any:
        return next(node for node in nodes if not isinstance(node, optax.MaskedNode))

    masked = lambda node: isinstance(node, optax.MaskedNode)  # noqa: E731
    return jax.tree.map(present, *parts, is_leaf=masked)
