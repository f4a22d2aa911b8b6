"""MovieLens 100K: `u.data`, one line per rating: user, item, rating (1 to 5), time; with tabs."""

import re
from pathlib import Path

import numpy as np

from experiments.cli.errors import ExperimentError
from experiments.tasks.data.base import (
    MAX_PARSED_BYTES,
    Dataset,
    read_bytes,
    require_examples,
    require_file,
    split_at_random,
)

TEST_FRACTION = 0.1
COLUMNS = 4
_NUMBERS = re.compile(
    rb"\t".join([rb" *([0-9]{1,18}) *"] * COLUMNS)
)  # 18 digits fit into an int64.


def read_ratings(path: Path) -> np.ndarray:
    """int64[ratings, 4]: the numbers of a file.

    Raises:
      ExperimentError: If a line is not four integers, or a rating is not from 1 to 5.
    """
    rows = []
    for number, line in enumerate(read_bytes(path, MAX_PARSED_BYTES).splitlines(), 1):
        if not (found := _NUMBERS.fullmatch(line)):
            raise ExperimentError(
                f"{path} line {number} is not user, item, rating and time with tabs between them: "
                f"{line[:40].decode('utf-8', 'replace')!r}."
            )
        rows.append([int(field) for field in found.groups()])
        if not 1 <= rows[-1][2] <= 5:
            raise ExperimentError(
                f"{path} line {number} holds the rating {rows[-1][2]}; ratings are 1 to 5."
            )
    return np.array(rows, np.int64).reshape(-1, COLUMNS)


def load_movielens(data: Path | None) -> Dataset:
    """Users and items, int32[ratings, 2], numbered from 0, and ratings, int32[ratings].

    A random tenth is the test set; the split is the same for all seeds.

    Raises:
      ExperimentError: If the file is missing, malformed, or has too few ratings.
    """
    file = require_file(data, "movielens", "the u.data of MovieLens")
    ratings = read_ratings(file)
    (users, user_of), (items, item_of) = (
        np.unique(ratings[:, column], return_inverse=True) for column in (0, 1)
    )
    inputs = np.stack([user_of, item_of], axis=1).astype(np.int32)
    sizes = len(users), len(items)
    labels = ratings[:, 2].astype(np.int32)
    return require_examples(split_at_random(inputs, labels, TEST_FRACTION, sizes), file)
