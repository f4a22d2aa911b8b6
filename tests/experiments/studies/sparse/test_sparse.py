"""A comparison of sparse methods: numbers, sentences and record."""

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest

from experiments.cli.configs import Sparse
from experiments.cli.errors import ExperimentError
from experiments.methods.sparse import S2_METHODS, SPARSE_METHODS, Capacity
from experiments.studies.sparse import run as sparse
from experiments.studies.sparse import table as sparse_table
from experiments.studies.sparse.density import LeafDensity
from experiments.studies.sparse.findings import describe_findings
from experiments.studies.sparse.table import Row, summarize
from experiments.studies.survey import run as survey
from experiments.study.figures import draw
from experiments.study.record import read_metrics
from experiments.training.train import Program

RECORDS = sorted((Path(sparse.__file__).parents[2] / "records").glob("*_sparse*"))
LEAVES = [
    LeafDensity("a", (100, 4), 0.02, 0.08, 0.03, 0.1),
    LeafDensity("b", (4,), 1.0, 1.0, 1.0, 1.0),
]

# Bytes of the sparse leaf, and the distance from dense in its standard deviations.
SYNTHETIC = {
    "mean": (1000, 0.0),
    "all_gather": (100, 0.0),
    "s2_mean_0.25": (15, 2.0),
    "s2_mean_1": (60, 0.5),
    "s2_peel": (84, 0.0),
    "s2_peel_8_bits": (21, 1.0),
}


def synthetic(**changes: tuple[float, float]) -> list[Row]:
    """Losses of dense are 4, 5 and 6, whose standard deviation is 1."""
    methods = SYNTHETIC | changes
    costs = [
        {
            "method": method,
            "workers": 8,
            "sparse_bytes": sent,
            "step_bytes": 500 + sent,
            "encode_milliseconds": 1.0,
            "decode_milliseconds": math.nan,
        }
        for method, (sent, _) in methods.items()
    ]
    diagnostics = {"s2_peel": "unpeeled", "s2_mean_1": "expected_error"}
    runs = [
        {"method": method, "seed": seed, "learning_rate": 0.1, "test_loss": 4 + seed + above}
        | ({f"max_{diagnostics[method]}": 0.01 * seed} if method in diagnostics else {})
        for method, (_, above) in methods.items()
        for seed in range(3)
    ]
    trials = [
        {"method": "s2_mean_1", "learning_rate": rate, "validation_loss": loss}
        for rate, loss in ((0.03, 2.0), (0.1, 1.0))
    ]
    return summarize(costs, runs, trials)


def test_a_row_is_compared_with_dense_and_all_gather() -> None:
    rows = {row.method: row for row in synthetic()}
    row = rows["s2_mean_1"]
    assert (row.test_loss, row.test_loss_sd, row.difference) == pytest.approx((5.5, 1, 0.5))
    assert (row.dense_ratio, row.all_gather_ratio, row.step_bytes) == (0.06, 0.6, 560)
    assert row.expected_error == 0.02 and rows["s2_peel"].unpeeled == 0.02
    assert math.isnan(row.unpeeled) and math.isnan(rows["mean"].overflow)
    assert [name for name, row in rows.items() if not row.is_within] == ["s2_mean_0.25"]
    assert [name for name, row in rows.items() if row.at_edge] == ["s2_mean_1"]


def test_the_sentences_match_the_numbers() -> None:
    cuts, claims, additions, rest = describe_findings(synthetic(), LEAVES).split("\n\n")
    assert (
        "`s2_mean_1` sends 40.0 % less than the sparse all-gather and 94.0 % less than the dense "
        "all-reduce; its loss is +0.50 standard deviations from dense, within one."
    ) in cuts
    assert "+2.00 standard deviations from dense, not within one" in cuts
    assert (
        "Against the sparse all-gather it is reached within one standard deviation by none, and "
        "at a higher loss by `s2_mean_0.25`."
    ) in claims
    # 2 / 8 of a table for a union 4 times as dense as one worker's own: as much as the gather.
    assert "is 4.00 times as dense" in claims and "costs 1.00 times the all-gather" in claims
    assert (
        "at most 0.19 cells a coordinate, whose estimates have an expected error of 5.3" in claims
    )
    assert "Against the dense all-reduce it is reached within one standard deviation by" in claims
    assert "in the union: 81 %" not in claims
    assert "`s2_peel` sends 1.40 times the bytes of `s2_mean_1`" in additions
    assert "; 2 % of the union were not solved for at worst" in additions
    assert "`s2_peel_8_bits` sends 0.25 times the bytes of `s2_peel`" in additions
    assert "+1.00 standard deviations from dense in place of +0.00" in additions
    assert "`s2_peel_8_bits` sends least: 21 bytes" in rest
    assert rest.endswith("another rate may do better: `s2_mean_1`.")


def test_a_reached_claim_has_no_explanation() -> None:
    claims = describe_findings(synthetic(s2_median_1=(19, -0.5)), LEAVES).split("\n\n")[1]
    assert "within one standard deviation by `s2_median_1`, and at a higher loss by" in claims
    assert "times as dense" not in claims
    dense = describe_findings(
        synthetic(**dict.fromkeys(S2_METHODS, (300, 0.0))),
        [LeafDensity("a", (9, 2), 0.3, 0.4, 0.4, 0.5)],
    ).split("\n\n")[1]
    assert "room for 44.0 % in the union: 81 % are cut by tables of at most 0.43 cells" in dense


def test_a_diverged_run_is_reported() -> None:
    rows = synthetic(s2_mean_1=(60, math.nan))
    assert "`s2_mean_1` sends 40.0 % less than the sparse all-gather" in describe_findings(
        rows, LEAVES
    )
    assert "it diverged" in describe_findings(rows, LEAVES)


def test_one_seed_or_no_mean_is_not_judged() -> None:
    (cost, run) = (
        {"method": "s2_mean_1", "workers": 8, "sparse_bytes": 9.0, "step_bytes": 9.0}
        | dict.fromkeys(("encode_milliseconds", "decode_milliseconds"), 1.0),
        {"method": "s2_mean_1", "learning_rate": 0.1, "test_loss": 1.0},
    )
    rows = summarize([cost], [run], [])
    assert math.isnan(rows[0].difference) and not rows[0].is_within
    assert "No loss is judged" in describe_findings(rows, LEAVES)
    assert "`s2_mean_1` sends 9 bytes." in describe_findings(rows, LEAVES)


@pytest.fixture
def text(tmp_path: Path) -> str:
    words = np.random.default_rng(0).integers(0, 200, 3000)
    path = tmp_path / "text"
    path.write_text(" ".join(f"w{word}" for word in words), encoding="utf-8")
    return str(path)


def tiny(tmp_path: Path, text: str, methods: tuple[str, ...], **options: object) -> Path:
    settings = {
        "data": text,
        "vocabulary": 150,
        "methods": methods,
        "seeds": 2,
        "steps": 2,
        "batch": 8,
        "learning_rates": (0.1,),
        "calibration_batches": 2,
        "repetitions": 1,
        "devices": 2,
        "record": "tiny",
        "records": str(tmp_path),
    }
    assert sparse.main(Sparse(**(settings | options))) == 0
    (folder,) = tmp_path.glob("*_tiny")
    return folder


def leaves_of(record: Path) -> list[LeafDensity]:
    rows = read_metrics(record, "density")
    return [
        LeafDensity(row["leaf"], tuple(row["shape"]), *(row[name] for name in Capacity._fields))
        for row in rows
    ]


def check_readme(record: Path) -> list[Row]:
    settings = json.loads((record / "config.json").read_text(encoding="utf-8"))
    assert settings["finished"]
    rows = summarize(*(read_metrics(record, kind) for kind in ("sparse", "run", "tuning")))
    assert [row.method for row in rows] == settings["methods"]
    readme = (record / "README.md").read_text(encoding="utf-8")
    assert (
        describe_findings(rows, leaves_of(record)) in readme
        and sparse_table.to_markdown(rows) in readme
    )
    with (record / "table.csv").open(encoding="utf-8") as file:
        table = {line["method"]: line for line in csv.DictReader(file)}
    for row in rows:
        assert float(table[row.method]["sparse_bytes"]) == row.sparse_bytes
        assert table[row.method]["is_within"] == str(row.is_within)
    return rows


@pytest.mark.slow
def test_a_comparison_leaves_a_record_that_parses(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training is replaced, since it is slow to compile."""

    def fake(program: Program, seed: int, steps: int, log_every: int) -> list[dict]:
        run = {"kind": "run", "method": program.variant.label, "optimizer": program.optimizer}
        loss = 5 + 0.1 * seed + 0.01 * (run["method"] == "union")
        rate = {"learning_rate": program.learning_rate, "seed": seed, "max_overflow": 0.25}
        scores = {"train_loss": loss, "test_loss": loss, "test_accuracy": 0.5}
        costs = {"bytes_per_step": 4.0, "compression_error": 0.0, "step_milliseconds": 1.0}
        return [run | rate | scores | costs]

    monkeypatch.setattr(survey, "train", fake)
    folder = tiny(tmp_path, text, ("mean", "union"))
    dense, union = check_readme(folder)
    assert union.difference == pytest.approx(0.01 / (0.1 / 2**0.5)) and union.overflow == 0.25
    assert dense.step_bytes - dense.sparse_bytes == union.step_bytes - union.sparse_bytes > 0
    assert {row["seed"] for row in read_metrics(folder, "tuning")} == {2}
    assert [leaf.leaf for leaf in leaves_of(folder) if leaf.is_sparse] == ["Embed_0/embedding"]
    figure = folder / "held_out_loss_against_sparse_bytes.png"
    figure.unlink()
    assert draw(folder) == figure and figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_every_method_trains_and_exact_methods_agree(tmp_path: Path, text: str) -> None:
    rows = {row.method: row for row in check_readme(tiny(tmp_path, text, ("all",)))}
    assert set(rows) == set(SPARSE_METHODS)
    assert 0 < rows["union"].overflow + rows["union"].union_density < 1
    assert rows["s2_mean_1"].expected_error > 0 and rows["s2_peel"].unpeeled < 0.1
    for name in ("all_gather", "union", "s2_peel"):
        assert rows[name].test_loss == pytest.approx(rows["mean"].test_loss, rel=1e-4)


@pytest.mark.slow
def test_ratings_have_four_sparse_leaves(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    path = tmp_path / "u.data"
    path.write_text(
        "".join(
            f"{generator.integers(80)}\t{generator.integers(90)}\t{generator.integers(1, 6)}\t1\n"
            for _ in range(600)
        )
    )
    methods = ("mean", "s2_mean_1")
    options = {"dataset": "movielens", "vocabulary": None, "steps": 20}
    folder = tiny(tmp_path, str(path), methods, **options)
    check_readme(folder)
    assert [leaf.leaf for leaf in leaves_of(folder) if leaf.is_sparse] == [
        f"{name}/embedding" for name in ("item", "item_bias", "user", "user_bias")
    ]
    assert "squared error" in (folder / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": ("foo",)}, "no sparse method 'foo'"),
        ({"dataset": "movielens"}, "--vocabulary is only for --dataset words"),
        ({"batch": 3000}, "--batch 3000 exceeds the"),
        ({"batch": 9}, "--batch 9 is not divisible by 2 workers"),
        ({"data": "nowhere"}, "nowhere is not a file"),
    ],
)
def test_user_errors_are_reported(tmp_path: Path, text: str, options: dict, message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        tiny(tmp_path, text, **({"methods": ("mean",)} | options))


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.name)
def test_the_readme_of_a_record_matches_its_metrics(record: Path) -> None:
    assert {row.method for row in check_readme(record)} >= {"mean", "all_gather"}
