"""The comparison with other systems, at toy size; those that are not installed are listed."""

import importlib.util
import json

import pytest

from benchmarks.peers import check_losses, main, table

TOY = {
    "num_layers": 1,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "tile_size": 16,
}
PACKAGES = {"DeepSpeed ALST": "deepspeed", "yunchang Ulysses": "yunchang"}
"""Of the peers that the project does not depend on."""


def measured(seconds, mib):
    return {"loss": [4.0, 3.5], "memory_mib": mib, "wall": seconds, "cpu": seconds}


def test_ratios_are_those_within_a_round():
    """The machine became twice as slow in the second round; the systems did not change."""
    both = {
        "ours": measured([2.0, 4.0, 2.0], 100.0),
        "theirs": measured([3.0, 6.0, 2.8], 150.0),
        "missing": {"error": "ModuleNotFoundError: No module named 'x'"},
    }
    assert table(both).splitlines()[2:] == [
        "| ours | 2.0 s | 2.0 s | 100 MiB |",
        "| theirs | 1.50 (1.40 to 1.50) | 1.50 (1.40 to 1.50) | 1.50 |",
        "| missing | ModuleNotFoundError: No module named 'x' | | |",
    ]


def test_systems_with_other_losses_are_not_compared():
    systems = {"ours": measured([1.0], 1.0), "theirs": measured([1.0], 1.0)}
    check_losses(systems)
    systems["theirs"]["loss"] = [4.0, 3.5004]  # the first gradient is wrong
    with pytest.raises(ValueError, match="theirs has a loss of 3.5004"):
        check_losses(systems)


def test_ours_is_measured_and_what_is_not_installed_is_listed(tmp_path):
    results, picture = tmp_path / "peers.json", tmp_path / "peers.png"
    systems = "--systems", "ours, selective", *PACKAGES
    model = "--lengths", "32:1", "--shape", json.dumps(TOY), "--output", str(results)
    main([*model, *systems, "--ranks", "2", "--plot", str(picture)])
    found = json.loads(results.read_text())["lengths"]["32"]
    assert len(found["ours, selective"]["wall"]) == 1
    for name, package in PACKAGES.items():
        if importlib.util.find_spec(package) is None:
            assert found[name]["error"] == f"ModuleNotFoundError: No module named '{package}'"
        else:
            assert len(found[name]["wall"]) == 1
        assert f"| {name} | " in results.with_suffix(".md").read_text()
    assert picture.stat().st_size > 10_000
