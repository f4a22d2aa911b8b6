"""The study of gossip: splits, graphs, and its methods."""

import itertools

import numpy as np
import pytest

from experiments.methods.gossip import GRAPHS, MATCHINGS, METHODS, make_topology, methods_of
from experiments.studies.gossip import Gossip
from experiments.tasks.partitions import orders, split
from experiments.training.gossip import Trainer, settings

LABELS = np.random.default_rng(0).integers(0, 10, 1437)
PARAMETERS = 10_858


@pytest.mark.parametrize(("kind", "workers"), [("iid", 8), ("skewed", 64)])
def test_every_example_belongs_to_one_worker(kind: str, workers: int) -> None:
    parts = split(LABELS, workers, kind, 0)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(LABELS)))
    assert {*map(len, parts)} == {len(LABELS) // workers, len(LABELS) // workers + 1}
    shares = np.stack([np.bincount(LABELS[part], minlength=10) / len(part) for part in parts])
    largest = shares.max(axis=1).mean()
    assert largest > 0.4 if kind == "skewed" else largest < 0.3
    for seed, same in ((0, True), (1, False)):
        again = split(LABELS, workers, kind, seed)
        assert all(map(np.array_equal, parts, again)) == same


def test_workers_iterate_over_their_own_parts() -> None:
    parts = [np.arange(5), np.arange(5, 15)]
    steps = np.stack([*itertools.islice(orders(parts, 5, 0), 4)])
    assert (steps[:, :5] < 5).all() and (steps[:, 5:] >= 5).all()
    assert (np.sort(steps[:, :5], axis=1) == np.arange(5)).all()
    np.testing.assert_array_equal(np.sort(steps[:2, 5:].ravel()), np.arange(5, 15))


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_match_their_names(name: str) -> None:
    topology = make_topology(name)
    if name in MATCHINGS:
        assert sum(map(len, topology.matchings)) == topology.graph.size()
    assert len(topology.graph) == int(name.rsplit("_")[-1])
    assert {"dpsgd", "dpsgd_bfloat16", "matcha", "periodic"} <= {*methods_of(name)}


@pytest.mark.slow
def test_rates_splits_and_seeds_share_a_program() -> None:
    setting = {"graph": "ring_8", "method": "dpsgd", "split": "iid"}
    trainer = Trainer(Gossip(steps=4, log_every=2), setting)
    options = itertools.product(("iid", "skewed"), (0, 1), (0.1, 0.2), (False, True))
    losses = [
        [*trainer({**setting, "split": kind}, seed, {"learning_rate": rate}, validation=trial)][-1]
        for kind, seed, rate, trial in options
    ]
    assert trainer._advance._cache_size() == 1
    found = [row.get("train_loss", row.get("validation_loss")) for row in losses]
    assert len({*found}) == len(found)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains(method: str) -> None:
    config = Gossip(graphs=("erdos_renyi_8",), methods=(method,), steps=40)
    setting, _ = settings(config)
    *rows, run = Trainer(config, setting)(setting, 0, {"learning_rate": 0.1}, validation=False)
    assert rows[-1]["train_loss"] < rows[0]["train_loss"] and rows[-1]["distance"] > 0
    assert run["rounds_per_step"] == pytest.approx(run["expected_rounds"], rel=0.3)
    if method in ("dpsgd", "matcha"):
        sent = run["rounds_per_step"] * 4 * PARAMETERS
        assert run["bytes_per_step"] == pytest.approx(sent)
        assert run["expected_bytes"] / sent == pytest.approx(
            run["expected_rounds"] / run["rounds_per_step"], rel=1e-4
        )
    assert run["bytes_per_step"] > 0
