"""Names of flags and of configuration fields: the one place that maps between them.

A field and its flag differ only in ``--`` and dashes, except for those in ``IRREGULAR_FLAGS``.
"""

IRREGULAR_FLAGS = {
    "heads_per_chunk": "--cp-heads-per-chunk",
    "stages": "--seq-length-schedule",
    "distributed.backend": "--distributed-backend",
    "distributed.timeout_minutes": "--distributed-timeout-minutes",
    "activation_disk_checksums": "--no-activation-disk-checksums",
    "check_for_nan": "--no-check-for-nan-in-loss-and-grad",
    "exit_on_failed_save": "--no-exit-on-failed-save",
    "load_optim": "--no-load-optim",
    "load_rng": "--no-load-rng",
    "override_opt_param_scheduler": "--override-opt_param-scheduler",  # Megatron mixes _ and -
    "use_checkpoint_opt_param_scheduler": "--use-checkpoint-opt_param-scheduler",
    "add_bias_linear": "--disable-bias-linear",  # the flag is the negation
    "yarn_correction_range_round_to_int": "--no-yarn-correction-range-round-to-int",
    "rotary.base": "--rotary-base",
    "rotary.percent": "--rotary-percent",
    "rotary.beta_fast": "--yarn-beta-fast",
    "rotary.beta_slow": "--yarn-beta-slow",
    "rotary.attention_factor": "--yarn-mscale",
    "rotary.truncate": "--no-yarn-correction-range-round-to-int",
}
"""By field, without the section that contains it unless the name alone is ambiguous."""

SETTINGS_OF_SEVERAL_FLAGS = {
    "model.vocab_size": "tokens in the tokenizer's vocabulary",
    "model.add_bias_linear": "biases, off with --disable-bias-linear",
    "rotary.scaling": "scaling of the rotary embedding",
    "rotary.scaling_factor": "stretch factor of the rotary scaling",
    "rotary.original_max_positions": "original context of the rotary scaling",
    "rotary.low_freq_factor": "low_freq_factor of the rotary scaling",
    "rotary.high_freq_factor": "high_freq_factor of the rotary scaling",
}
"""Fields whose value no single flag gives: a description, for messages that compare two values."""


def flag_of(field: str) -> str:
    """The flag of a configuration field, for messages.

    Args:
        field: a name such as ``seq_length``, or a path such as ``batch.seq_length`` or
            ``model.rotary.base``.

    Returns:
        The flag, or the description of a setting that no single flag gives.
    """
    parts = field.split(".")
    # The most specific name first: distributed.backend is not the backend of attention.
    for start in range(len(parts)):
        name = ".".join(parts[start:])
        if found := SETTINGS_OF_SEVERAL_FLAGS.get(name) or IRREGULAR_FLAGS.get(name):
            return found
    return "--" + parts[-1].replace("_", "-")


def value_name(flag: str) -> str:
    """The name under which argparse stores the value of ``flag``, unless it sets ``dest``."""
    return flag.removeprefix("--").replace("-", "_")
