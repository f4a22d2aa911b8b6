"""CHOCO-SGD: compressed differences to what neighbours know already."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomm._base import AxisName, Codec, PyTree
from jaxcomm._require import require_codec
from jaxcomm.gossip._compressed_messages import encode, require_own
from jaxcomm.gossip._gossiped import Mixed, gossiped, require_fixed, require_symmetric
from jaxcomm.gossip._neighbors import Link, Talk, to_links
from jaxcomm.gossip._to_mixing import to_mixing


def require_step_size(step_size: float) -> None:
    """Raises unless it is in (0, 1]."""
    if not isinstance(step_size, int | float) or not 0 < step_size <= 1:
        raise ValueError(f"`step_size` must be in (0, 1], got {step_size!r}.")


def choco_step_size(mixing: Any, contraction: float) -> float:
    r"""The step size for which CHOCO is proved to converge; far larger ones often do.

    .. math:: \frac{r^2 \delta}{16 r + r^2 + 4 b^2 + 2 r b^2 - 8 r \delta}, \qquad
              r = 1 - |\lambda_2(W)|, \quad b = \|I - W\|_2

    Args:
      mixing: What :func:`choco_sgd` takes, the same in all steps.
      contraction: :math:`\delta` in (0, 1] of the codec.

    Returns:
      A `step_size` for :func:`choco_sgd`.

    Raises:
      ValueError: If it is out of range, or mixing changes from step to step.

    Example:
      >>> from jaxcomm import gossip
      >>> round(gossip.choco_step_size(gossip.ring(8), contraction=0.1), 5)
      0.00035
    """
    if not 0 < contraction <= 1:
        raise ValueError(f"`contraction` must be in (0, 1], got {contraction!r}.")
    given = require_fixed(require_symmetric(to_mixing(mixing), "choco_sgd"), "choco_step_size")
    eigenvalues = np.linalg.eigvalsh(given.matrices[0])
    others = eigenvalues[:-1] if len(eigenvalues) > 1 else np.zeros(1)
    r, b = 1 - float(np.abs(others).max()), float(1 - eigenvalues[0])
    delta = contraction
    return r**2 * delta / (16 * r + r**2 + 4 * b**2 + 2 * r * b**2 - 8 * r * delta)


def choco_sgd(
    mixing: Any,
    codec: Codec,
    *,
    step_size: float,
    per_neighbor: bool | None = None,
    axis_name: AxisName = "data",
    seed: int = 0,
    key: jax.Array | None = None,
    diagnostics: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Gossip of compressed differences: neighbours keep copies :math:`\hat x_i` of each other.

    .. math:: y_i = x_i + \Delta_i, \qquad q_i = Q(y_i - \hat x_i), \qquad
              \hat x_j \gets \hat x_j + q_j \;\text{ for all } j, \qquad
              x_i \gets y_i + \gamma \sum_j W_{ij} (\hat x_j - \hat x_i)

    A worker sends one payload to each neighbour. Under one fixed matrix it keeps :math:`\hat x_i`
    and the sum, two arrays; where mixing changes from step to step, or workers may be absent, not
    all hear all of :math:`q_i`, and it keeps two copies for each neighbour instead: what each has
    told the other.

    Args:
      mixing: As for :func:`dpsgd`; a :class:`MatchaPlan` will do.
      codec: A contraction of :mod:`jaxcomm.compression` without memory; one with :math:`\omega
        \ge 1` goes in :func:`jaxcomm.compression.scaled`.
      step_size: :math:`\gamma` in (0, 1], the smaller the coarser the codec; 1 with a codec that
        loses nothing is D-PSGD. :func:`choco_step_size` has what theory asks for.
      per_neighbor: Whether to keep copies for each neighbour. Default: where mixing changes.
      axis_name: The mesh axis, or axes, that number the workers, the nodes of the graph.
      seed: Seed of the codec and of mixing at random.
      key: A typed threefry key, in place of `seed`.
      diagnostics: As for :func:`dpsgd`; the disagreement is that of copies.

    Returns:
      A transformation like that of :func:`dpsgd`.

    Raises:
      ValueError: If an option is out of range, the graph is directed or not connected, or the codec
        needs agreement, has memory, or is no contraction; in `update`, if `present` is given
        without copies for each neighbour.

    Example:
      >>> import optax
      >>> from jaxcomm import compression, gossip
      >>> codec = compression.sparsifiers.top_k(ratio=0.1)
      >>> tx = optax.chain(optax.sgd(0.1), gossip.choco_sgd(gossip.ring(8), codec, step_size=0.2))

    References:
      Koloskova et al., `Decentralized Stochastic Optimization and Gossip Algorithms with Compressed
      Communication <https://arxiv.org/abs/1902.00340>`_, 2019.
    """
    require_codec(codec, user="choco_sgd")
    require_step_size(step_size)
    given = require_symmetric(to_mixing(mixing), "choco_sgd")
    apart = not given.constant if per_neighbor is None else per_neighbor
    if not apart:
        require_fixed(given, "choco_sgd(per_neighbor=False)")
    rounds = [link for links in to_links(given, in_pairs=True) for link in links]

    def start(units: list[jax.Array]) -> PyTree:
        for x in units:
            require_own(codec, "choco_sgd", x.size)
        zeros = [*map(jnp.zeros_like, units)]
        return [(zeros, zeros) for _ in rounds] if apart else (zeros, zeros)

    def shared(talk: Talk, memory: PyTree, x: list[jax.Array], steps: list[jax.Array]) -> Mixed:
        if talk.present is not None:
            raise ValueError(
                "`present` leaves out messages, and one copy for all neighbours would no longer be "
                "what they know: use `choco_sgd(..., per_neighbor=True)`."
            )
        known, gap = memory
        message, sent, decode = encode(
            codec, talk, [a + b - c for a, b, c in zip(x, steps, known, strict=True)]
        )

        def take(heard: jax.Array, weight: jax.Array) -> tuple[list[jax.Array], jax.Array]:
            change = [a - b for a, b in zip(decode(heard), sent, strict=True)]
            return [weight * c for c in change], talk.zero

        zeros = [*map(jnp.zeros_like, x)]
        changes, _ = talk.hear(message, take, (zeros, talk.zero))
        known = [a + b for a, b in zip(known, sent, strict=True)]
        gap = [a + b for a, b in zip(gap, changes, strict=True)]
        # Of the sum over neighbours, all that is known is its value: sum_ij W_ij <x_i, x_i - x_j>.
        disagreement = sum(-2 * jnp.sum(a * b) for a, b in zip(known, gap, strict=True))
        moved = [a + step_size * b for a, b in zip(steps, gap, strict=True)]
        return Mixed(moved, (known, gap), jnp.asarray(disagreement))

    def on_link(
        talk: Talk, link: Link, pair: PyTree, y: list[jax.Array]
    ) -> tuple[PyTree, list[jax.Array], jax.Array]:
        mine, theirs = pair
        message, sent, decode = encode(codec, talk, [a - b for a, b in zip(y, mine, strict=True)])
        heard, weight = talk.receive(link, message)
        talked = weight != 0
        keep = lambda new, old: jnp.where(talked, new, old)  # noqa: E731
        mine = [keep(a + b, a) for a, b in zip(mine, sent, strict=True)]
        theirs = [keep(a + b, a) for a, b in zip(theirs, decode(heard), strict=True)]
        differences = [a - b for a, b in zip(theirs, mine, strict=True)]
        squares = sum(jnp.sum(jnp.square(d)) for d in differences)
        taken = [jnp.where(talked, weight * d, 0) for d in differences]
        return (mine, theirs), taken, jnp.where(talked, weight * squares, 0)

    def by_neighbour(
        talk: Talk, memory: PyTree, x: list[jax.Array], steps: list[jax.Array]
    ) -> Mixed:
        y = [a + b for a, b in zip(x, steps, strict=True)]
        change, disagreement = [*map(jnp.zeros_like, y)], talk.zero
        after, pairs = [], iter(memory)
        for matrix, links in enumerate(talk.links):
            for link in links:
                pair = next(pairs)
                nothing = pair, [*map(jnp.zeros_like, y)], talk.zero
                meet = functools.partial(on_link, talk, link, pair, y)
                pair, taken, squares = talk.when(matrix, meet, nothing)
                after.append(pair)
                change = [a + b for a, b in zip(change, taken, strict=True)]
                disagreement = disagreement + squares
        moved = [a + step_size * b for a, b in zip(steps, change, strict=True)]
        return Mixed(moved, after, disagreement)

    # Once all agree, all know it: copies that lagged behind would drive workers apart again.
    def shared_copies(
        talk: Talk, memory: PyTree, x: list[jax.Array]
    ) -> tuple[list[jax.Array], PyTree]:
        means = talk.mean(x)
        return means, (means, [*map(jnp.zeros_like, means)])

    def copies_per_neighbor(
        talk: Talk, memory: PyTree, x: list[jax.Array]
    ) -> tuple[list[jax.Array], PyTree]:
        means = talk.mean(x)
        links = [link for links in talk.links for link in links]
        after = [
            jax.tree.map(
                lambda new, old, link=link: jnp.where(talk.meets(link), new, old),
                (means, means),
                pair,
            )
            for link, pair in zip(links, memory, strict=True)
        ]
        return means, after

    return gossiped(
        given,
        axis_name,
        start,
        by_neighbour if apart else shared,
        average=copies_per_neighbor if apart else shared_copies,
        seed=seed,
        key=key,
        diagnostics=diagnostics,
        in_pairs=apart,
    )
