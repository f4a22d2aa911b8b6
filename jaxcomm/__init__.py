"""Communication-efficient distributed training in JAX: compressors as optax transformations.

Place one transformation before the optimizer, and `make_step` sends fewer bytes:

    tx = optax.chain(jaxcomm.global_qsgd(bits=8), optax.sgd(0.1))
    step = jaxcomm.make_step(loss_fn, tx, mesh)

The public names, by purpose:

- **Methods**, named as in their papers: `deep_gradient_compression`, `ef_sign_sgd`, `fetch_sgd`,
  `global_qsgd`, `gtop_k`, `natural_compression`, `one_bit_sgd`, `parallax`, `qsgd`, `s2_reducer`,
  `sign_sgd`, `signum`, `sketched_sgd`, `sparcml`, `sparse_global_qsgd`, `terngrad`, `top_k_sgd`. Of
  low rank: `atomo`, `power_sgd`. Of momenta: `demo`, `dion`.
- **Means**, exact or with any codec: `all_gather_mean`, `all_reduce_mean`, `budgeted_mean`, `lazy`,
  `majority_vote`, `mean`, `merged_mean`, `recursive_doubling_mean`, `ring_mean`, `two_stage_mean`;
  `zeroth_order` without gradients.
- **Codecs** for means: the modules `quantizers`, `sparsifiers`, `sketches`, `low_rank`, `codes`
  and `feedback`; wrappers of codecs in `compression`.
- **Wrappers** of transformations: `accumulate`, `adaptive_budgets`, `adaptive_ratio`, `backup`,
  `delayed`, `gradient_norms`, `hierarchical`, `per_worker`, `proximal`, `shard_local`,
  `sharded_server`, `skip_nonfinite`, `sliced`, `warmup`; `regularizers` for `proximal`, and
  `warmup_schedule` for the rate.
- **Training**: `init`, `make_step`, `simulate`, `local_params`, `local_value_and_grad`; sums and
  extremes as metrics in `metrics`; local SGD,
  DiLoCo and Non-blocking SGD in `synchronization`; decentralized training in `gossip`; sending
  during the backward pass in `scheduling`.
- **State** of several workers: `PerWorker`, `replicate`, `consensus`, `consensus_distance`,
  `resize_workers`, `state_specs`.
- **The wire**: `wire.account` lists what a program sends, `wire.require` limits it;
  `gradient_density`, `or_reduce`.
- **The cost**: `perf` predicts the seconds of a step on a link; `advise` recommends a method.
- **Kernels**: `implementation` names the one that runs, reference or Pallas.
- **Your own methods**: `aggregation.aggregator`, `gossip.gossiped`,
  `synchronization.average_every`, `collectives`, and the type `Aggregator`.
- **Your own codecs**: `Codec`, `Context`, `Claims`, `Keys`, `Diagnostics`, `Memory`, `Entries`,
  `Fast`, `scattered`; `jaxcomm.testing` checks them.
"""

from jaxcomm import (
    aggregation,
    collectives,
    compression,
    gossip,
    methods,
    metrics,
    perf,
    scheduling,
    synchronization,
    training,
    wire,
)
from jaxcomm._axis import local_params, state_specs
from jaxcomm._contract import (
    Aggregator,
    Claims,
    Codec,
    Context,
    Diagnostics,
    Entries,
    Fast,
    Keys,
    Memory,
    PerWorker,
    scattered,
)
from jaxcomm._gradients import local_value_and_grad
from jaxcomm._resize import resize_workers
from jaxcomm._workers import consensus, consensus_distance, init, per_worker, replicate
from jaxcomm.advise import advise
from jaxcomm.aggregation import (
    accumulate,
    adaptive_budgets,
    adaptive_ratio,
    all_gather_mean,
    all_reduce_mean,
    backup,
    budgeted_mean,
    delayed,
    gradient_norms,
    hierarchical,
    lazy,
    majority_vote,
    mean,
    merged_mean,
    recursive_doubling_mean,
    ring_mean,
    shard_local,
    sharded_server,
    skip_nonfinite,
    sliced,
    two_stage_mean,
    warmup,
    zeroth_order,
)
from jaxcomm.aggregation._exchange import or_reduce
from jaxcomm.aggregation._gradient_norms import gradient_density
from jaxcomm.aggregation._warmup import warmup_schedule
from jaxcomm.compression import (
    codes,
    feedback,
    low_rank,
    quantizers,
    regularizers,
    sketches,
    sparsifiers,
)
from jaxcomm.compression.regularizers import proximal
from jaxcomm.methods import (
    atomo,
    deep_gradient_compression,
    demo,
    dion,
    ef_sign_sgd,
    fetch_sgd,
    global_qsgd,
    gtop_k,
    natural_compression,
    one_bit_sgd,
    parallax,
    power_sgd,
    qsgd,
    s2_reducer,
    sign_sgd,
    signum,
    sketched_sgd,
    sparcml,
    sparse_global_qsgd,
    terngrad,
    top_k_sgd,
)
from jaxcomm.training._make_step import make_step
from jaxcomm.training._simulate import simulate
from pallas_kernels import implementation

__all__ = [
    "Aggregator",
    "collectives",
    # Methods
    "atomo",
    "deep_gradient_compression",
    "demo",
    "dion",
    "ef_sign_sgd",
    "fetch_sgd",
    "global_qsgd",
    "gtop_k",
    "methods",
    "natural_compression",
    "one_bit_sgd",
    "parallax",
    "power_sgd",
    "qsgd",
    "s2_reducer",
    "sign_sgd",
    "signum",
    "sketched_sgd",
    "sparcml",
    "sparse_global_qsgd",
    "terngrad",
    "top_k_sgd",
    # Means
    "aggregation",
    "all_gather_mean",
    "all_reduce_mean",
    "budgeted_mean",
    "lazy",
    "majority_vote",
    "mean",
    "merged_mean",
    "recursive_doubling_mean",
    "ring_mean",
    "two_stage_mean",
    "zeroth_order",
    # Codecs
    "codes",
    "compression",
    "feedback",
    "low_rank",
    "quantizers",
    "regularizers",
    "sketches",
    "sparsifiers",
    # Wrappers of transformations
    "accumulate",
    "adaptive_budgets",
    "adaptive_ratio",
    "backup",
    "delayed",
    "gradient_norms",
    "hierarchical",
    "per_worker",
    "proximal",
    "shard_local",
    "sharded_server",
    "skip_nonfinite",
    "sliced",
    "warmup",
    "warmup_schedule",
    # Training
    "gossip",
    "init",
    "local_params",
    "local_value_and_grad",
    "make_step",
    "metrics",
    "scheduling",
    "simulate",
    "synchronization",
    "training",
    # State of several workers
    "PerWorker",
    "consensus",
    "consensus_distance",
    "replicate",
    "resize_workers",
    "state_specs",
    # The wire
    "gradient_density",
    "or_reduce",
    "wire",
    # The cost
    "advise",
    "perf",
    # Kernels
    "implementation",
    # Your own codecs
    "Claims",
    "Codec",
    "Keys",
    "Context",
    "Diagnostics",
    "Entries",
    "Memory",
    "scattered",
    "Fast",
]

__version__ = "0.1.0"
