"""Updates of various distributions on which codecs are tested."""

import numpy as np


def inputs(size: int, workers: int = 1) -> dict[str, np.ndarray]:
    """Returns arrays [workers, size] by name: float32 values, stored as float64."""
    rng, shape = np.random.default_rng(size), (workers, size)
    found = {
        "normal": rng.normal(size=shape),
        "heavy_tailed": rng.standard_t(2, size=shape),
        "sparse": rng.normal(size=shape) * (rng.random(shape) < 0.1),
        "one_hot": np.stack([np.eye(size)[(size // 2 + i) % size] for i in range(workers)]),
        "constant": np.full(shape, -0.7),
        "zero": np.zeros(shape),
        "tiny": rng.normal(size=shape) * 1e-15,
        "huge": rng.normal(size=shape) * 1e15,
    }
    if workers > 1:
        found["of_unlike_scales"] = found["normal"] * np.logspace(0, -6, workers)[:, None]
        found["of_one_worker"] = found["normal"] * (np.arange(workers) == 0)[:, None]
    return {name: x.astype(np.float32).astype(np.float64) for name, x in found.items()}


def with_extremes(size: int, workers: int, seed: int = 4) -> dict[str, np.ndarray]:
    """Returns updates with the extreme value in a coordinate of all workers; a sum may wrap."""
    rng = np.random.default_rng(seed)
    normal = rng.normal(size=(workers, size)).astype(np.float32)
    normal[:, 0] = np.abs(normal).max()
    sparse = np.zeros_like(normal)
    sparse[:, 0] = -1
    signs = np.tile(np.where(np.arange(size) % 2, -1, 1).astype(np.float32), (workers, 1))
    return {"normal": normal, "sparse": sparse, "extreme": signs}
