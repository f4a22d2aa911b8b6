"""Learning rates to start from: the choices of the survey of 2026-11-21, with SGD on digits."""

DEFAULT = {"sgd": 0.05, "adam": 0.002}
"""For other methods, and with other optimizers."""

_METHODS_BY_RATE = {
    0.001: "sign_sgd",
    0.003: "ef_random_10_percent random_10_percent signum sparse_global_qsgd",
    0.01: "ef_fixed_threshold ef_sign_sgd ef_stc_two_stage gtop_1_percent",
    0.03: (
        "ada_comp adaptive_ratio ef_sbc ef_stc ef_threshold ef_top_1_percent_blocks "
        "ef_top_1_percent_sampled ef_top_1_percent_two_stage global_qsgd:6 global_qsgd:8 "
        "global_qsgd_exponential one_bit_sgd variance_based warm_up"
    ),
    0.1: (
        "adaptive_levels diana ecq ef21_top_10_percent ef_adaptive_threshold ef_top_10_percent "
        "ef_top_1_percent global_qsgd:10 global_qsgd:16 global_qsgd_exponential_two_stage mean "
        "mean_bfloat16 mean_float8 min_max_two_stage natural_compression natural_two_stage qsgd "
        "qsgd:4 ring_mean rotated_two_stage terngrad terngrad_shared top_1_percent truncating "
        "two_stage:4 two_stage:8 wangni_10_percent"
    ),
    0.3: "deep_gradient_compression",
}
SURVEYED = {label: rate for rate, labels in _METHODS_BY_RATE.items() for label in labels.split()}


def first_rate(label: str, optimizer: str) -> tuple[float, str]:
    """A learning rate that suits a method, and where it is from.

    Example:
      >>> first_rate("signum", "sgd")
      (0.003, "the survey's choice for signum on digits")
      >>> first_rate("signum", "adam")
      (0.002, 'the default with adam')
    """
    if optimizer == "sgd" and label in SURVEYED:
        return SURVEYED[label], f"the survey's choice for {label} on digits"
    return DEFAULT[optimizer], f"the default with {optimizer}"
