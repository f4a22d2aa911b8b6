"""Datasets of installed packages, and readers of standard files. Nothing is downloaded."""

from collections.abc import Callable
from pathlib import Path

from experiments.cli.errors import ExperimentError
from experiments.tasks.data.base import Dataset, hold_out
from experiments.tasks.data.cifar import load_cifar10
from experiments.tasks.data.digits import load_digits
from experiments.tasks.data.glyphs import load_glyphs
from experiments.tasks.data.idx import load_mnist
from experiments.tasks.data.movielens import load_movielens
from experiments.tasks.data.text import load_text
from experiments.tasks.data.words import load_words

DATASETS: dict[str, Callable[..., Dataset]] = {
    "digits": load_digits,
    "glyphs": load_glyphs,
    "mnist": load_mnist,
    "cifar10": load_cifar10,
    "text": load_text,
    "words": load_words,
    "movielens": load_movielens,
}


def load(name: str, data: str | None, **options: int) -> Dataset:
    """The dataset `name`, read from the folder or file `data` if it needs one.

    Args:
      name: The name of the dataset.
      data: The folder or file.
      **options: Further options of its reader.

    Raises:
      ExperimentError: If there is no such dataset, or its files are missing or malformed.
    """
    if name not in DATASETS:
        raise ExperimentError(f"--dataset must be one of {', '.join(DATASETS)}, got {name!r}.")
    return DATASETS[name](None if data is None else Path(data), **options)


__all__ = ["DATASETS", "Dataset", "hold_out", "load"]
