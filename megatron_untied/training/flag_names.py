"""The flag that sets a field of the configuration, for messages."""

from megatron_untied.checkpoint.compatibility import name_of_setting
from megatron_untied.training.flags import FLAGS

OTHERS = {
    "distributed.backend": "--distributed-backend",
    "distributed.timeout_minutes": "--distributed-timeout-minutes",
}


def flag_of(field: str) -> str:
    """The flag of a field such as ``batch.seq_length``, or words that say what sets it."""
    section, _, name = field.rpartition(".")
    by_value = {
        options.get("dest", flag.removeprefix("--").replace("-", "_")): flag
        for flags in FLAGS.values()
        for flag, options in flags
    }
    if section.startswith("model"):
        return name_of_setting(field.removeprefix("model."))
    return OTHERS.get(field) or by_value.get(name, field)
