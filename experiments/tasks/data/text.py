"""Text as bytes: each byte is predicted from the bytes before it."""

from pathlib import Path

import numpy as np

from experiments.cli.errors import ExperimentError
from experiments.tasks.data.base import Dataset, read_text

WINDOW = 64
TEST_FRACTION = 0.1


def load_text(data: Path | None, *, window: int = WINDOW) -> Dataset:
    """Bytes, and the next bytes as labels. The last tenth is the test set.

    Args:
      data: Any plain-text file. Default: see `read_text`.
      window: Bytes per example.

    Raises:
      ExperimentError: If the file is missing or too short for one window of each set.
    """
    raw = read_text(data, "text")
    windows = (len(raw) - 1) // window
    test = max(1, round(windows * TEST_FRACTION))
    if windows <= test:
        raise ExperimentError(
            f"{data} holds {len(raw)} bytes; at least {2 * window + 1} are needed."
        )
    text = np.frombuffer(raw, np.uint8)
    inputs = text[: windows * window].reshape(windows, window)
    labels = text[1 : windows * window + 1].reshape(windows, window).astype(np.int32)
    return Dataset(inputs[:-test], labels[:-test], inputs[-test:], labels[-test:])
