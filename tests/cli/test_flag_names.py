"""Names of flags and fields are mapped in one place, which agrees with the parser's table."""

from dataclasses import fields, is_dataclass

import pytest

from megatron_untied.cli.flags import FLAGS
from megatron_untied.config.flag_names import (
    IRREGULAR_FLAGS,
    SETTINGS_OF_SEVERAL_FLAGS,
    flag_of,
    value_name,
)
from tests.support.command_line import tiny_config

NAMES = {
    options.get("dest", value_name(name)): name
    for group in FLAGS.values()
    for name, options in reversed(group)
}
"""By value; of two flags that set one value, the first of the table."""


@pytest.mark.parametrize("value", NAMES)
def test_every_value_leads_back_to_its_flag(value):
    assert flag_of(value) == NAMES[value]


def paths(config, prefix: str = "") -> list[str]:
    found = []
    for field in fields(config):
        value = getattr(config, field.name)
        below = paths(value, f"{prefix}{field.name}.") if is_dataclass(value) else None
        found += below or [prefix + field.name]
    return found


def test_every_field_has_a_flag_that_exists_or_a_description():
    descriptions = set(SETTINGS_OF_SEVERAL_FLAGS.values())
    named = {path: flag_of(path) for path in paths(tiny_config())}
    unknown = {path: name for path, name in named.items() if name not in descriptions}
    assert not {path: name for path, name in unknown.items() if name not in NAMES.values()}


def test_no_irregular_name_is_left_over():
    ends = [path.split(".") for path in paths(tiny_config())]
    known = {".".join(parts[start:]) for parts in ends for start in range(len(parts))}
    assert IRREGULAR_FLAGS.keys() <= known | NAMES.keys()
