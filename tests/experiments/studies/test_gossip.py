"""The study of gossip: splits, graphs, its methods and its claims."""

import itertools

import numpy as np
import pytest

from experiments.studies import gossip
from experiments.studies.gossip import GRAPHS, MATCHINGS, Gossip
from experiments.study.claims import Results
from experiments.tasks.partitions import orders, split

LABELS = np.random.default_rng(0).integers(0, 10, 1437)


@pytest.mark.parametrize(("kind", "workers"), [("iid", 8), ("skewed", 64)])
def test_every_example_belongs_to_one_worker(kind: str, workers: int) -> None:
    parts = split(LABELS, workers, kind, 0)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(LABELS)))
    assert {*map(len, parts)} == {len(LABELS) // workers, len(LABELS) // workers + 1}
    shares = np.stack([np.bincount(LABELS[part], minlength=10) / len(part) for part in parts])
    largest = shares.max(axis=1).mean()
    assert largest > 0.4 if kind == "skewed" else largest < 0.3


def test_workers_iterate_over_their_own_parts() -> None:
    parts = [np.arange(5), np.arange(5, 15)]
    steps = np.stack([*itertools.islice(orders(parts, 5, 0), 4)])
    assert (np.sort(steps[:, :5], axis=1) == np.arange(5)).all()
    np.testing.assert_array_equal(np.sort(steps[:2, 5:].ravel()), np.arange(5, 15))


def test_graphs_match_their_names_and_matchings() -> None:
    for name, graph in GRAPHS.items():
        assert sorted(graph) == [*range(int(name.rsplit("_")[-1]))]
    for name, matchings in MATCHINGS.items():
        assert sum(map(len, matchings)) == GRAPHS[name].size()
        assert all(len({*sum(each, ())}) == 2 * len(each) for each in matchings)


@pytest.mark.parametrize(
    ("ratio", "outcomes"), [(1.04, ["holds"] * 2), (0.5, ["holds", "does not hold"])]
)
def test_claims(ratio: float, outcomes: list[str]) -> None:
    rows = [
        {"kind": "run", "graph": "ring_8", "split": "iid", "method": method, "seed": seed,
         "learning_rate": 0.1, "test_loss": 1.0, "test_accuracy": 0.9,
         "rounds_per_step": 1.0, "bytes_per_step": 4.0,
         "late_loss": loss * (1 + 0.001 * seed**2 * (loss > 1))}
        for method, loss in (("dpsgd", 1.0), ("matcha", ratio)) for seed in range(5)
    ]  # fmt: skip
    results = Results(Gossip(), rows, gossip.TABLE.lines(rows))
    assert [claim.judge(results)[0].outcome for claim in gossip.CLAIMS[:2]] == outcomes


# The rounds of messages per step on the graph of figure 1a, whose largest degree is 5.
ROUNDS = {
    **dict.fromkeys(gossip.METHODS, 5),
    **dict.fromkeys(
        ("matcha", "choco_sgd_over_matcha"), gossip.plan("erdos_renyi_8").expected_rounds
    ),
    **{"periodic": 2.5, "sgp": 1, "overlap_sgp": 1, "ad_psgd": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize("method", gossip.METHODS)
def test_every_method_trains(method: str) -> None:
    config = Gossip(graphs=("erdos_renyi_8",), methods=(method,), steps=40)
    setting, _ = gossip.settings(config)
    *rows, run = gossip.train(config, setting)(setting, 0, {"learning_rate": 0.1}, validation=False)
    assert rows[-1]["train_loss"] < rows[0]["train_loss"]
    assert run["rounds_per_step"] == pytest.approx(ROUNDS[method], rel=0.3)
    sent = run["rounds_per_step"] * 4 * 10_858  # Of parameters.
    least = sent if method in ("dpsgd", "matcha") else 1
    assert 0.999 * least <= run["bytes_per_step"] <= 1.001 * sent  # Push-sum sends the mass, too.
