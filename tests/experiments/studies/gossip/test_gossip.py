"""The comparison of gossip: splits, claim and record."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from experiments.cli.configs import Compare, Gossip
from experiments.cli.errors import ExperimentError
from experiments.methods.gossip import GRAPHS, METHODS, make_topology
from experiments.studies.digits.run import main
from experiments.studies.gossip import run as gossip
from experiments.studies.gossip.report import verdict
from experiments.studies.gossip.table import claims, summarize
from experiments.study.figures import draw
from experiments.study.record import read_metrics
from experiments.tasks.partitions import orders, split

LABELS = np.random.default_rng(0).integers(0, 10, 1437)
RECORDS = sorted((Path(gossip.__file__).parents[2] / "records").glob("*_gossip*"))


@pytest.mark.parametrize("kind", ["iid", "skewed"])
def test_every_example_belongs_to_one_worker(kind: str) -> None:
    parts = split(LABELS, 8, kind, 0, 16)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(LABELS)))
    assert min(map(len, parts)) >= 16
    shares = np.stack([np.bincount(LABELS[part], minlength=10) / len(part) for part in parts])
    largest = shares.max(axis=1).mean()
    assert largest > 0.4 if kind == "skewed" else largest < 0.2


def test_workers_iterate_over_their_own_parts() -> None:
    parts = [np.arange(5), np.arange(5, 15)]
    steps = np.stack([*itertools.islice(orders(parts, 5, 0), 4)])
    assert (steps[:, :5] < 5).all() and (steps[:, 5:] >= 5).all()
    assert (np.sort(steps[:, :5], axis=1) == np.arange(5)).all()
    np.testing.assert_array_equal(np.sort(steps[:2, 5:].ravel()), np.arange(5, 15))


def test_an_impossible_split_is_an_error() -> None:
    with pytest.raises(ExperimentError, match="No split into 8 parts of at least 1000 examples"):
        split(LABELS, 8, "skewed", 0, 1000)


def curves(above: float) -> list[dict]:
    """D-PSGD's losses have the standard deviation 1 per step; MATCHA's are higher by `above`."""
    return [
        {"graph": "g", "split": "iid", "method": method, "seed": seed, "step": step,
         "train_loss": 10 + seed + (above if method == "matcha" and step > 20 else 0),
         "rounds": (1 if method == "matcha" else 2) * step}
        for method in ("dpsgd", "matcha") for seed in (-1, 0, 1) for step in (10, 20, 30, 40)
    ]  # fmt: skip


@pytest.mark.parametrize(("above", "holds"), [(0.9, True), (1.1, False), (-1.1, False)])
def test_the_claim_is_one_standard_deviation(above: float, holds: bool) -> None:
    (claim,) = claims(curves(above))
    np.testing.assert_allclose(claim.largest, abs(above))
    assert claim.holds == holds and claim.rounds == 0.5 and claim.above == (above > 0)
    assert ("as claimed." in claim.sentence) and ("not as claimed." in claim.sentence) != holds
    assert ("not on g (iid)" in verdict([claim])) != holds


def test_one_seed_makes_no_claim() -> None:
    alone = [row for row in curves(0.0) if row["seed"] == 0]
    assert claims(alone) == [] and "not put to the test" in verdict([])


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_match_their_names(name: str) -> None:
    topology = make_topology(name)
    assert sum(map(len, topology.matchings)) == topology.graph.size()
    assert len(topology.graph) == int(name.rsplit("_")[-1])


def test_mistakes() -> None:
    for options, message in [
        ({"methods": ("foo",)}, "--methods must be of dpsgd, matcha.* got 'foo'"),
        ({"graphs": ("foo",)}, "--graphs must be of .* got 'foo'"),
        ({"batch": 100}, "--batch 100 is not divisible by 8 workers"),
        ({"graphs": ("ring_8",), "methods": ("d2",)}, "are not compared on any of --graphs"),
    ]:
        with pytest.raises(ExperimentError, match=message):
            gossip.settings_of(Gossip(**options))
    with pytest.raises(ExperimentError, match="--batch 2000 exceeds the 1437 training examples"):
        gossip.main(Gossip(batch=2000, record="none"))
    with pytest.raises(ExperimentError, match="--preset gossip takes no --optimizers"):
        main(Compare(preset="gossip", optimizers=("adam",)))


def test_a_comparison_leaves_a_record_that_parses(tmp_path: Path) -> None:
    few = {"graphs": ("ring_8",), "splits": ("skewed",), "methods": ("dpsgd", "matcha")}
    config = Gossip(**few, seeds=2, steps=4, log_every=2, records=str(tmp_path))
    assert gossip.main(config) == 0
    (folder,) = tmp_path.iterdir()
    assert json.loads((folder / "config.json").read_text())["finished"]
    rows, runs = read_metrics(folder, "gossip"), read_metrics(folder, "gossip_run")
    assert len(rows) == 8 and len(runs) == 4 and len(summarize(runs)) == 2
    for row in rows:
        if row["method"] == "dpsgd":
            assert row["rounds"] == 2 * row["step"]
            assert row["bytes_sent"] == row["rounds"] * 10_858 * 4
        assert row["train_loss"] > 0 and row["distance"] > 0
    text = (folder / "README.md").read_text()
    assert "The claim" in text and "| ring_8 | skewed | matcha |" in text
    assert draw(folder).stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains(method: str) -> None:
    config = Gossip(graphs=("erdos_renyi_8",), methods=(method,), record="none", steps=30, seeds=1)
    (setting,) = gossip.settings_of(config)
    trainer = gossip.Trainer(gossip.Task("digits"), setting, config.learning_rate, config.batch)
    *rows, run = trainer.train("iid", 0, 30, 10)
    assert rows[-1]["train_loss"] < rows[0]["train_loss"] and run["bytes_per_step"] > 0


@pytest.mark.parametrize("folder", RECORDS, ids=lambda folder: folder.name)
def test_the_claims_in_readmes_match_the_metrics(folder: Path) -> None:
    text = (folder / "README.md").read_text()
    found = claims(read_metrics(folder, "gossip"))
    assert found and verdict(found) in text
    for claim in found:
        assert claim.sentence in text
