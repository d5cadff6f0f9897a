from benchmarks.compare_steps import ROOT, setting, step_seconds, table


def test_a_setting_is_a_name_and_flags():
    assert setting("one=--lr 1e-3 --seed=7") == ("one", ROOT, ["--lr", "1e-3", "--seed=7"])
    name, code, flags = setting("older@../other=--seed=7")
    assert (name, code.name, code.is_absolute(), flags) == ("older", "other", True, ["--seed=7"])


def test_ratios_are_those_within_a_round():
    """The machine became twice as slow in the second round; the settings did not change."""
    rows = table({"full": [2.0, 4.0, 2.0], "selective": [1.5, 3.0, 1.4]}).splitlines()[2:]
    assert rows == [
        "| full | 2.00 | 1.000 | 1.000 to 1.000 |",
        "| selective | 1.50 | 0.750 | 0.700 to 0.750 |",
    ]


def test_a_run_has_a_step_time():
    flags = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 32 "
    run = (flags + "--vocab-size 50 --train-iters 3 --num-workers 0").split()
    assert 0.0 < step_seconds(1, ROOT, run) < 60.0
