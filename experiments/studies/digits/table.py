"""The table of a comparison."""

from experiments.methods import BASELINE
from experiments.study.columns import SEEDS, Column, Table, key
from experiments.study.groups import first, mean_of, median_of, over_reference, spread

TABLE = Table(
    by=("optimizer", "method"),
    columns=(
        key("optimizer"),
        key("method"),
        SEEDS,
        Column("final training loss", spread("train_loss"), ",.4f", "train_loss"),
        Column("ratio", over_reference(mean_of("train_loss")), ",.2f", "loss_ratio"),
        Column("test accuracy %", spread("test_accuracy"), ",.1f", "test_accuracy", scale=100),
        Column("bytes/worker/step", first("bytes_per_step"), ",.0f", "bytes_per_step"),
        Column("ratio", over_reference(first("bytes_per_step")), ",.3f", "bytes_ratio"),
        Column("compression error", mean_of("compression_error"), ",.3f", "compression_error"),
        Column("ms/step", median_of("step_milliseconds"), ",.1f", "step_milliseconds"),
    ),
    reference={"method": BASELINE},
)
