"""Methods that average parameters: gossip and local steps; and wrappers of aggregators."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxcomm import gossip, synchronization
from jaxcomm._workers import per_worker
from jaxcomm.aggregation import (
    accumulate,
    all_gather_mean,
    backup,
    gradient_norms,
    hierarchical,
    mean,
    skip_nonfinite,
    sliced,
)
from jaxcomm.catalogue._method import Build, Method, Size
from jaxcomm.compression import blockwise
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.quantizers import dither, e3m0
from jaxcomm.compression.regularizers import l1, proximal
from jaxcomm.compression.sparsifiers import top_k
from jaxcomm.gossip._extras import networkx as nx
from jaxcomm.methods import global_qsgd
from jaxcomm.scheduling import wait_free

PERIOD = 3


def _neighbors(name: str, call: str, graph: Any, method: Any, **rest: Any) -> Method:
    """Gossip of a mixing; `method` is `(size, mixing) -> transformation`."""

    def build(size: Size, workers: int = 8) -> optax.GradientTransformationExtraArgs:
        return method(size, graph(workers))

    return Method(name, call, build, "neighbors", kind="gossip", graph=graph, **rest)


def one_peer(workers: int) -> gossip.Mixing:
    """A receiver in each step, in turns."""
    return gossip.cyclic(gossip.one_peer_exponential(workers), "push")


def _half(workers: int) -> Any:
    return gossip.matcha_plan(gossip.ring(workers), budget=0.5)


def _directed(workers: int) -> gossip.Mixing:
    """Not regular, so that push-sum weights differ."""
    graph = gossip.exponential(workers)
    graph.add_edges_from((0, j) for j in range(1, workers))
    return gossip.to_mixing(graph, "push")


def _matchings(workers: int) -> gossip.Mixing:
    """The matchings of a ring, one at random in each step, as pairs that average."""
    parts = []
    for matching in gossip.matcha_plan(gossip.ring(workers), budget=1).matchings or [()]:
        part = nx.empty_graph(workers)
        part.add_edges_from(matching)
        parts.append(part)
    return gossip.randomized(parts)


def _largest(size: Size) -> dict[str, Any]:
    """The codec of few coordinates has three of twelve."""
    codec = size.of(top_k(k=3), top_k(ratio=size.ratio))
    return {"codec": codec, "step_size": size.of(0.3, 0.1)}


NEIGHBORS = [
    _neighbors("dpsgd", "gossip.dpsgd(graph)", gossip.ring,
        lambda size, mixing: gossip.dpsgd(mixing), bytes="degree P", letters={"degree": 2},
        paper="Lian et al. 2017"),
    _neighbors("dpsgd_adapt_then_combine",
        'gossip.dpsgd(gossip.to_mixing(graph, "best_constant"), order="adapt_then_combine")',
        lambda workers: gossip.to_mixing(gossip.ring(workers), "best_constant"),
        lambda size, mixing: gossip.dpsgd(mixing, order="adapt_then_combine"), like="dpsgd"),
    _neighbors("dpsgd_in_turns",
        "gossip.dpsgd(gossip.cyclic(gossip.one_peer_exponential(n, directed=False)))",
        lambda workers: gossip.cyclic(gossip.one_peer_exponential(workers, directed=False)),
        lambda size, mixing: gossip.dpsgd(mixing), letters={"degree": 1}, like="dpsgd"),
    _neighbors("matcha", "gossip.matcha(plan)", _half, lambda size, mixing: gossip.matcha(mixing),
        bytes="active P; on average at most `budget` of all matchings are active",
        letters={"active": 2}, paper="Wang et al. 2019"),
    _neighbors("matcha_periodic", "gossip.dpsgd(gossip.random_periodic(graph, budget=0.5))",
        lambda workers: gossip.random_periodic(gossip.ring(workers), budget=0.5),
        lambda size, mixing: gossip.dpsgd(mixing), bytes="degree P in half of the steps",
        paper="baseline in Wang et al. 2019"),
    _neighbors("choco_sgd", "gossip.choco_sgd(graph, top_k(k=k), step_size=0.1)", gossip.ring,
        lambda size, mixing: gossip.choco_sgd(mixing, **_largest(size)), bytes="degree p",
        letters={"degree": 2}, paper="Koloskova et al. 2019"),
    _neighbors("choco_sgd_over_matcha", "gossip.choco_sgd(plan, top_k(k=k), step_size=0.1)", _half,
        lambda size, mixing: gossip.choco_sgd(mixing, **_largest(size)), like="choco_sgd"),
    _neighbors("deep_squeeze", "gossip.deep_squeeze(graph, top_k(k=k), step_size=0.1)", gossip.ring,
        lambda size, mixing: gossip.deep_squeeze(mixing, **_largest(size)), bytes="degree p",
        letters={"degree": 2}, paper="Tang et al. 2019"),
    _neighbors("d2", "gossip.d2(gossip.lazy_mixing(graph))",
        lambda workers: gossip.lazy_mixing(gossip.ring(workers)),
        lambda size, mixing: gossip.d2(mixing), bytes="degree P", letters={"degree": 2},
        paper="Tang et al. 2018"),
    _neighbors("sgp", "gossip.sgp(graphs)", one_peer, lambda size, mixing: gossip.sgp(mixing),
        bytes="messages (P + 4); one message per receiver",
        letters={"messages": 1}, paper="Assran et al. 2018",
        suffix="; Overlap SGP with `overlap=`"),
    _neighbors("sgp_directed", "gossip.sgp(directed)", _directed,
        lambda size, mixing: gossip.sgp(mixing), letters={"messages": "n - 1"}, like="sgp"),
    _neighbors("overlap_sgp", "gossip.sgp(directed, overlap=2)", _directed,
        lambda size, mixing: gossip.sgp(mixing, overlap=2), letters={"messages": "n - 1"},
        like="sgp"),
    _neighbors("noloco", "gossip.noloco(gossip.random_pairs(n), 1)", gossip.random_pairs,
        lambda size, mixing: gossip.noloco(mixing, 1, momentum=size.of(0.0, 0.5),
            learning_rate=size.of(1.0, 0.7)), bytes="P", paper="Kolehmainen et al. 2025",
        suffix=", or a longer period"),
    _neighbors("gasloc", "gossip.gasloc(graph, 1)", gossip.ring,
        lambda size, mixing: gossip.gasloc(mixing, 1, momentum=size.of(0.0, 0.5),
            learning_rate=size.of(1.0, 0.7)), bytes="degree P", letters={"degree": 2},
        paper="Cagnasso et al. 2026", suffix=", or a longer period"),
    Method("ad_psgd", "gossip.ad_psgd(graph, staleness=2)",
        lambda size, workers=8: gossip.ad_psgd(gossip.ring(workers), staleness=2), "neighbors",
        bytes="P", paper="Lian et al. 2018", kind="gossip", graph=_matchings),
    _neighbors("periodic_averaging", "gossip.periodic_averaging(3, gossip.dpsgd(graph))",
        gossip.ring, lambda size, mixing: gossip.periodic_averaging(3, gossip.dpsgd(mixing)),
        note="as the inner method",
        bytes="As the inner method, plus 8 d (n-1)/n in every third step",
        suffix="; wraps any method of this table"),
]  # fmt: skip


def _after(inner: Any, method: Any) -> optax.GradientTransformationExtraArgs:
    return optax.chain(per_worker(inner), method)


def _outer(options: dict[str, Any]) -> optax.GradientTransformation:
    return options.pop("outer", None) or optax.sgd(0.7, momentum=0.9, nesterov=True)


_SGD = optax.sgd(0.1)


def _local(
    name: str, call: str, bytes: str, method: Any, default: Any = _SGD, **rest: Any
) -> Method:
    """Local steps; options of a builder replace those of the method."""

    def build(
        size: Size, inner: Any = None, period: int = PERIOD, **options: Any
    ) -> optax.GradientTransformationExtraArgs:
        return method(size, inner or default, period, options)

    return Method(name, call, build, "every period", bytes=bytes, kind="local", **rest)


def _with_outer(method: Build, **fixed: Any) -> Any:
    """The builder of a method of an inner and an outer optimizer."""
    return lambda size, inner, period, options: method(
        inner, _outer(options), period, **{**fixed, **options}
    )


def _of_momentum(inner: optax.GradientTransformation, period: int) -> dict[str, int]:
    """The period of the momentum, of an optimizer that has one."""
    state = jax.eval_shape(inner.init, jnp.zeros(1))
    return {} if optax.tree.get(state, "trace") is None else {"trace": period}


_PARTS = {"fragments": 2, "overlap": 1, "mixing_factor": 0.5}
LOCAL_STEPS = [
    _local("local_sgd", "optax.chain(jaxcomm.per_worker(inner), "
            "synchronization.local_sgd(period, aggregator=aggregator))",
        "The sum of a worker's updates since the last exchange", lambda size, inner, period,
            options: _after(inner, synchronization.local_sgd(period, **options)),
        paper="Stich 2018"),
    _local("local_sgd_post_local", "optax.chain(jaxcomm.per_worker(inner), "
            "synchronization.local_sgd(synchronization.post_local(10, period)))",
        "The same, and also in each of the first 10 steps", lambda size, inner, period, options:
            _after(inner, synchronization.local_sgd(synchronization.post_local(10, period),
            **options)), paper="Lin et al. 2018"),
    _local("slowmo",
        "optax.chain(jaxcomm.per_worker(inner), synchronization.slowmo(period, learning_rate=0.1))",
        "The same; a momentum step applies the mean", lambda size, inner, period, options: _after(
            inner, synchronization.slowmo(period, **{"learning_rate": 0.1, **options})),
        paper="Wang et al. 2019"),
    _local("diloco", "synchronization.diloco(inner, outer, period, aggregator=aggregator)",
        "The same; `outer` applies the mean", _with_outer(synchronization.diloco),
        paper="Douillard et al. 2023"),
    _local("streaming_diloco", "synchronization.streaming_diloco("
            "inner, outer, period, fragments=2, overlap=1, mixing_factor=0.5)",
        "The same for one fragment, applied `overlap` steps later",
        _with_outer(synchronization.streaming_diloco, **_PARTS), paper="Douillard et al. 2025"),
    _local("streaming_diloco_4_bits",
        "synchronization.streaming_diloco(inner, outer, period, fragments=2, overlap=1, "
            "mixing_factor=0.5, aggregator=jaxcomm.all_gather_mean(blockwise(e3m0(), 256)))",
        "The same, in 4 bits", _with_outer(synchronization.streaming_diloco, **_PARTS,
            aggregator=all_gather_mean(blockwise(e3m0(), 256))), paper="Douillard et al. 2025"),
    _local("eager_diloco",
        "synchronization.eager_diloco(inner, outer, period, aggregator=aggregator)",
        "The last period; a worker's own part is of this one",
        _with_outer(synchronization.eager_diloco), paper="Kale et al. 2025"),
    _local("eager_diloco_delayed",
        "synchronization.eager_diloco(inner, outer, period, aggregator=aggregator, eager=False)",
        "The last period",
        _with_outer(synchronization.eager_diloco, eager=False), paper="Kale et al. 2025"),
    _local("sparseloco", "synchronization.sparseloco(inner, period, k=64, block_size=128)",
        "The k largest of each block of the residual, in 2 bits", lambda size, inner,
            period, options: synchronization.sparseloco(inner, period, k=size.of(2, 64),
            block_size=size.of(4, 128), **options), paper="Sarfi et al. 2025"),
    _local("diloco_muloco",
        "synchronization.diloco(inner, outer, period, aggregator=jaxcomm.all_gather_mean("
            "error_feedback(blockwise(dither(bits=4), 32))))",
        "As `diloco`, in 4 bits with feedback", _with_outer(synchronization.diloco,
            aggregator=all_gather_mean(error_feedback(blockwise(dither(bits=4), 32)))),
        paper="Thérien et al. 2025", suffix=", with `optax.contrib.muon` as `inner`: MuLoCo"),
    _local("pr_sgd", "synchronization.pr_sgd(inner, period)",
        "The same, and the state (momentum) of `inner`",
        lambda size, inner, period, options: synchronization.pr_sgd(inner, period, **options),
        paper="Yu et al. 2019"),
    _local("des_loc", "synchronization.des_loc(optax.sgd(0.1, momentum=0.9), period, "
            '{"trace": 2 * period})',
        "The same, and each named field of the state in a period of its own",
        lambda size, inner, period, options: synchronization.des_loc(inner, period,
            **{"periods": _of_momentum(inner, 2 * period), **options}),
        default=optax.sgd(0.1, momentum=0.9), paper="Iacob et al. 2025"),
    _local("sparta",
        "optax.chain(jaxcomm.per_worker(inner), synchronization.sparta(0.25, period))",
        "A random share of the parameters", lambda size, inner, period, options: _after(inner,
            synchronization.sparta(**{"share": 0.25, "period": period, **options})),
        paper="Beton et al. 2025", suffix=", most often in every step"),
]  # fmt: skip


def _around(name: str, call: str, bytes: str, build: Any, **rest: Any) -> Method:
    """A wrapper, around the mean; `build` is `axis_name -> transformation`."""
    return Method(
        name,
        call,
        lambda size, axis_name="data", **_: build(axis_name),
        "as the inner aggregator",
        bytes=bytes,
        kind="wrapper",
        **rest,
    )


AROUND = [
    _around("accumulate", "jaxcomm.accumulate(aggregator, every=2)",
        "As the inner aggregator, in every second step",
        lambda axis: accumulate(mean(axis), every=2)),
    _around("skip_nonfinite", "jaxcomm.skip_nonfinite(aggregator)",
        "As the inner aggregator, plus 8 (n-1)/n", lambda axis: skip_nonfinite(mean(axis))),
    _around("gradient_norms", "jaxcomm.gradient_norms(aggregator)",
        "As the inner aggregator, plus 8 (n-1)/n", lambda axis: gradient_norms(mean(axis))),
    _around("wait_free", "jaxcomm.scheduling.wait_free(aggregator)",
        "As the inner aggregator, per group of leaves",
        lambda axis: wait_free(mean(axis))),
    _around("hierarchical", 'jaxcomm.hierarchical(jaxcomm.mean("ici"), jaxcomm.global_qsgd("dcn"))',
        "On each axis, as its aggregator",
        lambda axis: hierarchical(mean("ici"), global_qsgd("dcn"))),
    _around("sliced",
        'jaxcomm.hierarchical(jaxcomm.mean("ici"), jaxcomm.sliced(jaxcomm.global_qsgd("dcn"), '
            'axis_name="ici"))',
        "On \"dcn\" as its aggregator for d/m coordinates, with m devices on \"ici\"; plus "
            "4 (m-1)/m d over \"ici\"",
        lambda axis: hierarchical(mean("ici"), sliced(global_qsgd("dcn"), axis_name="ici"))),
    _around("backup",
        "jaxcomm.backup(aggregator, 2, times=synchronization.shifted_exponential(1.0).sample)",
        "As the inner aggregator, also from dropped workers; plus 4 (n-1) for measured times",
        lambda axis: backup(mean(axis), 2, times=synchronization.shifted_exponential(1.0).sample),
        paper="Chen et al. 2016"),
    _around("proximal", "jaxcomm.proximal(aggregator, regularizers.l1(0.001), learning_rate=1.0)",
        "As the aggregator",
        lambda axis: proximal(mean(axis), l1(0.001), learning_rate=1.0),
        paper="Parikh and Boyd 2014", suffix=", then the optimizer"),
    _around("proximal_point",
        "optax.chain(aggregator, synchronization.proximal_point(0.1, restart_period=10))",
        "As the aggregator", lambda axis: optax.chain(mean(axis),
            synchronization.proximal_point(0.1, restart_period=10))),
]  # fmt: skip
