"""Gossip of compressed messages: CHOCO-SGD with copies at neighbors, DeepSqueeze with feedback."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomm import _axis
from jaxcomm._collectives import Message, to_message
from jaxcomm._contract import AxisName, Codec, Context, PyTree
from jaxcomm._require import Share, checked, require_option
from jaxcomm.compression._scaled import require_contraction
from jaxcomm.gossip._gossiped import Mixed, gossiped, require_fixed, require_symmetric
from jaxcomm.gossip._neighbors import MessageRound, MixingStep, to_links, toward
from jaxcomm.gossip._to_mixing import agreeing


def require_standalone_codec(codec: Codec, method: str, units: list[jax.Array]) -> None:
    """Raises unless workers can encode separately, without memory, and the codec contracts."""
    if "or" in jax.tree.leaves(codec.reduce_statistics):
        raise ValueError(f"`{method}` needs a codec without a support shared by all workers.")
    if jax.tree.leaves(codec.init(jnp.zeros(2))):
        raise ValueError(f"`{method}` needs a codec without feedback or other memory.")
    for x in units:
        require_contraction(codec, x.size, 1, method)


def encode(
    codec: Codec, mixing_step: MixingStep, units: list[jax.Array]
) -> tuple[Message, list[jax.Array], Callable[[PyTree], list[jax.Array]]]:
    """The message of all units, its decoded values, and a function that decodes contents."""
    contexts: list[Context] = []
    contents: list[Any] = []
    for keys, x in zip(mixing_step.keys, units, strict=True):
        context, narrow = Context(keys, shape=x.shape), x.astype(jnp.float32)
        statistics = codec.measure(context, narrow)
        payload, _ = codec.encode(context.replace(statistics=statistics), narrow)
        contexts.append(context)
        contents.append((payload, statistics))

    def decoded(contents: PyTree) -> list[jax.Array]:
        return [
            codec.decode(context.received().replace(statistics=statistics), payload).astype(x.dtype)
            for context, (payload, statistics), x in zip(contexts, contents, units, strict=True)
        ]

    axis_name = mixing_step.axis_name
    message = Message(axis_name, contents, _axis.as_varying(to_message(contents), axis_name))
    return message, decoded(contents), decoded


def choco_step_size(mixing: Any, contraction: float) -> float:
    r"""The step size of CHOCO's convergence proof; much larger ones often converge.

    .. math:: \frac{r^2 \delta}{16 r + r^2 + 4 b^2 + 2 r b^2 - 8 r \delta}, \qquad
              r = 1 - |\lambda_2(W)|, \quad b = \|I - W\|_2

    Args:
      mixing: As for :func:`choco_sgd`, the same in all steps.
      contraction: The :math:`\delta` of the codec, in (0, 1].

    Returns:
      A `step_size` for :func:`choco_sgd`.

    Raises:
      ValueError: If `contraction` is out of range, or the mixing changes between steps.

    Example:
      >>> from jaxcomm import gossip
      >>> round(gossip.choco_step_size(gossip.ring(8), contraction=0.1), 5)
      0.00035
    """
    require_option(contraction, "contraction", Share)
    mixing = require_fixed(require_symmetric(agreeing(mixing), "choco_sgd"), "choco_step_size")
    eigenvalues = np.linalg.eigvalsh(mixing.matrices[0])
    others = eigenvalues[:-1] if len(eigenvalues) > 1 else np.zeros(1)
    r, b = 1 - float(np.abs(others).max()), float(1 - eigenvalues[0])
    delta = contraction
    return r**2 * delta / (16 * r + r**2 + 4 * b**2 + 2 * r * b**2 - 8 * r * delta)


@checked
def choco_sgd(
    mixing: Any,
    codec: Codec,
    *,
    step_size: Share,
    per_neighbor: bool | None = None,
    axis_name: AxisName = "data",
    seed: int | jax.Array = 0,
    diagnostics: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Gossip of compressed differences: neighbors store copies :math:`\hat x_i` of each other.

    .. math:: y_i = x_i + \Delta_i, \qquad q_i = Q(y_i - \hat x_i), \qquad
              \hat x_j \gets \hat x_j + q_j \;\text{ for all } j, \qquad
              x_i \gets y_i + \gamma \sum_j W_{ij} (\hat x_j - \hat x_i)

    A worker sends one payload to each neighbor. Under one fixed matrix it stores two arrays:
    :math:`\hat x_i` and the sum over neighbors. If the mixing changes between steps, or workers may
    be absent, not all neighbors receive every :math:`q_i`. The worker then stores two copies per
    neighbor: the accumulated messages in each direction.

    Args:
      mixing: As for :func:`dpsgd`; a plan of :func:`matcha_plan` is also valid.
      codec: A codec of :mod:`jaxcomm.compression` without memory. It must be a contraction:
        :math:`\mathbb{E}\|Q(x) - x\|^2 \le (1 - \delta) \|x\|^2` with :math:`\delta > 0`. Wrap an
        unbiased codec whose relative variance :math:`\omega` is at least 1 in
        :func:`jaxcomm.compression.scaled`.
      step_size: :math:`\gamma` in (0, 1]. Coarser codecs need smaller values. A value of 1 with a
        lossless codec is D-PSGD. :func:`choco_step_size` returns the value from theory.
      per_neighbor: Whether to store copies for each neighbor. Default: only if the mixing changes.
      axis_name: The mesh axis, or axes, of the workers, which are the nodes of the graph.
      seed: Seed of the codec and of random mixing.
      diagnostics: As for :func:`dpsgd`. The `disagreement` compares the copies :math:`\hat x`, not
        the parameters.

    Returns:
      A transformation as returned by :func:`dpsgd`.

    Raises:
      ValueError: If an option is out of range, the graph is directed or not connected, or the codec
        needs shared statistics, has memory, or is not a contraction. In `update`, if `present` is
        passed and there are no copies for each neighbor.

    Example:
      >>> import optax
      >>> from jaxcomm import compression, gossip
      >>> codec = compression.sparsifiers.top_k(ratio=0.1)
      >>> tx = optax.chain(optax.sgd(0.1), gossip.choco_sgd(gossip.ring(8), codec, step_size=0.2))

    References:
      Koloskova et al., `Decentralized Stochastic Optimization and Gossip Algorithms with Compressed
      Communication <https://arxiv.org/abs/1902.00340>`_, 2019.
    """
    mixing = require_symmetric(agreeing(mixing), "choco_sgd")
    if per_neighbor is None:
        per_neighbor = not mixing.constant
    if not per_neighbor:
        require_fixed(mixing, "choco_sgd(per_neighbor=False)")
    rounds = [link for links in to_links(mixing, in_pairs=True) for link in links]

    def start(units: list[jax.Array]) -> PyTree:
        require_standalone_codec(codec, "choco_sgd", units)
        zeros = [*map(jnp.zeros_like, units)]
        return [(zeros, zeros) for _ in rounds] if per_neighbor else (zeros, zeros)

    def shared_method(
        mixing_step: MixingStep, memory: PyTree, x: list[jax.Array], steps: list[jax.Array]
    ) -> Mixed:
        if mixing_step.present is not None:
            raise ValueError("`present` needs `choco_sgd(..., per_neighbor=True)`.")
        copy, gap = memory
        message, sent, decode = encode(
            codec, mixing_step, [a + b - c for a, b, c in zip(x, steps, copy, strict=True)]
        )
        gap_changes, _ = mixing_step.sum_of_differences(message, sent, decode)
        copy, gap = jax.tree.map(jnp.add, memory, (sent, gap_changes))
        # Only the sum over neighbors is stored: sum_ij W_ij |x_i - x_j|^2 is computed from it as
        # 2 sum_ij W_ij <x_i, x_i - x_j>.
        disagreement = sum(-2 * jnp.sum(a * b) for a, b in zip(copy, gap, strict=True))
        changes = [a + step_size * b for a, b in zip(steps, gap, strict=True)]
        return Mixed(changes, (copy, gap), jnp.asarray(disagreement))

    def update_link(
        mixing_step: MixingStep, link: MessageRound, copies: PyTree, y: list[jax.Array]
    ) -> tuple[PyTree, PyTree]:
        message, sent, decode = encode(codec, mixing_step, jax.tree.map(jnp.subtract, y, copies[0]))
        received, weight = mixing_step.receive(link, message)
        active = weight != 0
        copies = jax.tree.map(
            lambda a, b: jnp.where(active, a + b, a), copies, (sent, decode(received))
        )
        return copies, jax.tree.map(
            lambda x: jnp.where(active, x, 0), toward(copies[0], copies[1], weight)
        )

    def per_neighbor_method(
        mixing_step: MixingStep, memory: PyTree, x: list[jax.Array], steps: list[jax.Array]
    ) -> Mixed:
        y = jax.tree.map(jnp.add, x, steps)

        def add(matrix: int, copies: PyTree, sums: PyTree) -> tuple[PyTree, PyTree]:
            after = []
            for link, pair in zip(mixing_step.links[matrix], copies, strict=True):
                pair, weighted = update_link(mixing_step, link, pair, y)
                after.append(pair)
                sums = jax.tree.map(jnp.add, sums, weighted)
            return after, sums

        before = iter(memory)
        copies = [[next(before) for _ in links] for links in mixing_step.links]
        zeros = [*map(jnp.zeros_like, y)], mixing_step.zero
        found, (total, disagreement) = mixing_step.over_matrices(add, copies, zeros)
        after = [pair for each in found for pair in each]
        changes = [a + step_size * b for a, b in zip(steps, total, strict=True)]
        return Mixed(changes, after, disagreement)

    # After an exact average all workers have the mean, so copies become the mean too: stale copies
    # would move workers away from it.
    def average_shared(
        mixing_step: MixingStep, memory: PyTree, x: list[jax.Array]
    ) -> tuple[list[jax.Array], PyTree]:
        means = mixing_step.mean(x)
        return means, (means, [*map(jnp.zeros_like, means)])

    def average_per_neighbor(
        mixing_step: MixingStep, memory: PyTree, x: list[jax.Array]
    ) -> tuple[list[jax.Array], PyTree]:
        means = mixing_step.mean(x)
        after = [
            jax.tree.map(
                lambda new, old, link=link: jnp.where(mixing_step.both_present(link), new, old),
                (means, means),
                pair,
            )
            for link, pair in zip(rounds, memory, strict=True)
        ]
        return means, after

    return gossiped(
        mixing,
        start,
        per_neighbor_method if per_neighbor else shared_method,
        average=average_per_neighbor if per_neighbor else average_shared,
        seed=seed,
        diagnostics=diagnostics,
        in_pairs=per_neighbor,
        axis_name=axis_name,
    )


@checked
def deep_squeeze(
    mixing: Any,
    codec: Codec,
    *,
    step_size: Share,
    axis_name: AxisName = "data",
    seed: int | jax.Array = 0,
    diagnostics: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Gossip of compressed parameters with feedback of the compression error.

    .. math:: v_i = x_i + \Delta_i + e_i, \qquad e_i \gets v_i - C(v_i), \qquad
              x_i \gets x_i + \Delta_i + \eta \sum_j W_{ij} (C(v_j) - C(v_i))

    A worker sends one payload to each neighbor. It stores one array, :math:`e_i`, of the size of
    the parameters. The graph may change from step to step.

    Args:
      mixing: As for :func:`dpsgd`; a plan of :func:`matcha_plan` is also valid.
      codec: A codec of :mod:`jaxcomm.compression` without memory. It must be a contraction:
        :math:`\mathbb{E}\|C(x) - x\|^2 \le (1 - \delta) \|x\|^2` with :math:`\delta > 0`. Wrap an
        unbiased codec whose relative variance :math:`\omega` is at least 1 in
        :func:`jaxcomm.compression.scaled`.
      step_size: :math:`\eta` in (0, 1]. A value of 1 with a lossless codec is D-PSGD.
      axis_name: The mesh axis, or axes, of the workers, which are the nodes of the graph.
      seed: Seed of the codec and of random mixing.
      diagnostics: As for :func:`dpsgd`. The `disagreement` compares the decoded messages
        :math:`C(v)`, not the parameters.

    Returns:
      A transformation as returned by :func:`dpsgd`.

    Raises:
      ValueError: If an option is out of range, the graph is directed or not connected, or the codec
        needs shared statistics, has memory, or is not a contraction.

    Example:
      >>> import optax
      >>> from jaxcomm import compression, gossip
      >>> codec = compression.quantizers.dither(levels=7)
      >>> tx = optax.chain(
      ...     optax.sgd(0.1), gossip.deep_squeeze(gossip.ring(8), codec, step_size=0.5)
      ... )

    References:
      Tang et al., `DeepSqueeze: Decentralization Meets Error-Compensated Compression
      <https://arxiv.org/abs/1907.07346>`_, 2019.
    """
    mixing = require_symmetric(agreeing(mixing), "deep_squeeze")

    def start(units: list[jax.Array]) -> PyTree:
        require_standalone_codec(codec, "deep_squeeze", units)
        return [*map(jnp.zeros_like, units)]

    def method(
        mixing_step: MixingStep,
        residual: list[jax.Array],
        x: list[jax.Array],
        steps: list[jax.Array],
    ) -> Mixed:
        corrected = [a + b + e for a, b, e in zip(x, steps, residual, strict=True)]
        message, sent, decode = encode(codec, mixing_step, corrected)
        total, disagreement = mixing_step.sum_of_differences(message, sent, decode)
        residual = jax.tree.map(jnp.subtract, corrected, sent)
        changes = [a + step_size * b for a, b in zip(steps, total, strict=True)]
        return Mixed(changes, residual, disagreement)

    def average(
        mixing_step: MixingStep, residual: list[jax.Array], x: list[jax.Array]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        # An exact mean has no compression error, and old residuals would move workers off it.
        return mixing_step.mean(x), [*map(jnp.zeros_like, residual)]

    return gossiped(
        mixing,
        start,
        method,
        average=average,
        seed=seed,
        diagnostics=diagnostics,
        axis_name=axis_name,
    )
