import json
import re
import shlex

import pytest

from megatron_untied.commands import plan
from megatron_untied.planner.machine import read_gpus

FITS = (
    "--model llama3-8b --bf16 --seq-length 262144 --context-parallel-size 8 --use-torch-fsdp2 "
    "--recompute-granularity selective --cp-heads-per-chunk 8 --loss-chunk-size 8192 "
).split()


def test_prints_memory_by_phase_and_cause_and_says_that_it_fits(capsys):
    assert plan.main(FITS) == 0
    said = capsys.readouterr().out
    assert said.startswith("this run fits: the peak per GPU is ")
    for word in ("8,030,261,248 parameters in bf16", "attention backward", "activations",
                 "optimizer", "<- peak", "per node", "tokens/s/GPU", "fits: GPU"):  # fmt: skip
        assert word in said
    assert "\x1b[" not in said  # plain where it is no terminal


def test_says_which_flags_would_make_it_fit(capsys):
    assert plan.main([*FITS, "--gpu", "a100-40", "--seq-length", "1048576"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("this run does not fit: the peak per GPU is ")
    assert "does not fit: GPU" in said
    assert "would fit with --" in said


def test_automatic_settings_become_what_the_suggestion_promises(capsys):
    """A run with the suggested flags chooses its own chunk: those numbers are the ones printed."""
    flags = [*FITS, "--cp-heads-per-chunk", "auto", "--recompute-granularity", "auto"]
    flags += ["--seq-length", "1048576", "--gpu-memory-gib", "22"]
    assert plan.main(flags) == 1
    said = capsys.readouterr().out
    assert said.startswith("no automatic setting fits, the nearest is: --cp-heads-per-chunk")
    (line,) = [line for line in said.splitlines() if line.startswith("would fit with")]
    suggested, settings, sizes = re.fullmatch(
        r"would fit with (.*) \(auto: (.*)\): (.*)", line
    ).groups()
    assert "--cp-heads-per-chunk" not in suggested
    assert plan.main([*flags, *suggested.split()]) == 0
    assert capsys.readouterr().out.startswith(f"planned: {settings} | {sizes} | assumed: ")


def test_more_context_ranks_are_suggested_where_fewer_do_not_fit_or_are_far_slower(capsys):
    """One rank per sequence is what a missing --context-parallel-size means."""
    flags = "--model llama3-8b --bf16 --use-torch-fsdp2 --loss-chunk-size 8192 --json -".split()
    for length in ("2097152",):  # one rank could do it, at 0.8 of the speed
        assert plan.main([*flags, "--seq-length", length]) == 1
        found = json.loads(capsys.readouterr().out)["would_fit_with"]
        assert found[0] == "--context-parallel-size 8"
        words = [word for flag in found for word in flag.split()]
        assert plan.main([*flags, "--seq-length", length, *words]) == 0
        capsys.readouterr()


def test_the_size_that_fits_is_kept_if_it_is_about_as_fast(capsys):
    flags = "--model llama3-8b --bf16 --use-torch-fsdp2 --context-parallel-size 4 --json -"
    assert plan.main([*flags.split(), "--seq-length", "1048576"]) == 1
    found = json.loads(capsys.readouterr().out)["would_fit_with"]
    assert not any("--context-parallel-size" in flag for flag in found)


def test_says_when_nothing_makes_it_fit(capsys):
    assert plan.main([*FITS, "--gpu-memory-gib", "10", "--seq-length", "8388608"]) == 1
    assert "no flags make it fit: use more ranks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "lama3-8b"], "did you mean llama3-8b?"),
        (["--seq-length", "1000", *FITS[:2], "--context-parallel-size", "16"], "is not divisible"),
        (["--nodes", "0"], "argument --nodes: 0 is below 1"),
        (["--gpu", "v100"], f"--gpu v100 is not one of {', '.join(sorted(read_gpus()))}; to"),
        (["--gpu", "mine", "--gpu-memory-gib", "24"], "describe it: --gpu-tflops"),
        (["--gpu-tflops", "0"], "argument --gpu-tflops: 0 is below 0.001"),
        (["--gpu-memory-gib", "1"], "1 is below 5.0"),
        (["--num-layerz", "2"], "unknown flag --num-layerz; did you mean --num-layers?"),
        (["--model", "llama3-8b"], "missing --seq-length"),
        ([], "no flags: give those of the run and of the machine, such as --model"),
    ],
)
def test_bad_input_is_said_in_one_line(capsys, argv, message):
    assert plan.main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


def test_json_alone_on_stdout(capsys):
    assert plan.main([*FITS, "--json", "-", "--max-context"]) == 0
    answer = json.loads(capsys.readouterr().out)
    phases = answer["device"]["bytes_by_phase"]
    peak = phases[answer["device"]["peak_phase"]]
    assert sum(peak.values()) == answer["device"]["peak_bytes"]
    assert answer["host"]["node_bytes"] == 8 * answer["host"]["rank_bytes"]
    assert answer["longest"]["tokens"] >= 262144
    assert answer["fits"] is True


def test_writes_json_and_a_picture(tmp_path, capsys):
    json_file, png = tmp_path / "plan.json", tmp_path / "plan.png"
    assert plan.main([*FITS, "--json", str(json_file), "--plot", str(png)]) == 0
    assert json.loads(json_file.read_text())["fits"]
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "fits" in capsys.readouterr().out


def test_compares_with_published_methods(capsys):
    long = [*FITS, "--cpu-offloading-num-layers", "32", "--seq-length", "3145728", "--compare"]
    assert plan.main(long) == 0
    said = capsys.readouterr().out
    assert "Ulysses with tiling, with full sharding: 62.8 GiB" in said  # published: 64.6
    assert "untied Ulysses as published, with full sharding: 49.3 GiB" in said  # published: 51.1


def test_chooses_what_is_automatic(capsys):
    flags = [*FITS, "--cp-heads-per-chunk", "auto", "--recompute-granularity", "auto"]
    assert plan.main(flags) == 0
    assert "planned: --cp-heads-per-chunk" in capsys.readouterr().out


def test_takes_what_training_asks_for_too():
    """Flags of a training command as they stand."""
    training = "--micro-batch-size 1 --train-iters 5 --lr 1e-4 --tokenizer-type NullTokenizer"
    assert plan.main([*FITS, *training.split(), "--data-path", "somewhere/text"]) == 0


def test_a_sequence_that_no_kernel_can_index_is_one_line(capsys):
    flags = "--model llama3-8b --bf16 --context-parallel-size 8 --recompute-granularity full"
    assert plan.main([*flags.split(), "--seq-length", str(2**26)]) == 2
    assert "give more ring ranks" in capsys.readouterr().err


def test_the_longest_context_is_what_auto_could_reach_from_any_length(capsys, tmp_path):
    automatic = FITS + ["--cp-heads-per-chunk", "auto", "--recompute-granularity", "auto"]
    found = []
    for length in ("131072", "1048576"):
        file = tmp_path / f"{length}.json"
        flags = [*automatic, "--seq-length", length, "--max-context", "--json", str(file)]
        assert plan.main(flags) == 0
        found.append(json.loads(file.read_text())["longest"])
    assert found[0] == found[1]


HAND_PICKED = "--num-layers 4 --hidden-size 1024 --num-attention-heads 8 --bf16 --gpus-per-node 2"


def test_how_long_a_context_needs_no_length(capsys, tmp_path):
    """With the flags that were given and with the best ones, as a command that can be planned."""
    file = tmp_path / "plan.json"
    assert plan.main([*HAND_PICKED.split(), "--max-context", "--json", str(file)]) == 0
    said = capsys.readouterr().out
    found = json.loads(file.read_text())
    best = found["longest"]["best"]
    assert best["tokens"] > found["longest"]["tokens"]
    assert f"longest context with the best flags: {best['tokens']:,} tokens, limited by" in said
    assert f"longest context with these flags: {found['longest']['tokens']:,} tokens" in said
    assert found["seq_length"] == best["tokens"]
    start = "torchrun --nproc-per-node 2 pretrain_gpt.py "
    (command,) = [line for line in said.splitlines() if line.startswith(start)]
    assert command == best["command"]
    flags = shlex.split(command.removeprefix(start))
    assert plan.main([*flags, "--gpus-per-node", "2", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["device"] == found["device"]


def test_no_context_at_all(capsys):
    huge = f"{HAND_PICKED} --num-layers 99 --hidden-size 16384 --kv-channels 128"
    assert plan.main([*huge.split(), "--max-context", "--host-memory-gib", "64"]) == 1
    assert "longest context with the best flags: none fits" in capsys.readouterr().out


STAGES = (
    "--model llama3-8b --bf16 --context-parallel-size 8 --use-torch-fsdp2 --cp-heads-per-chunk 8 "
    "--recompute-granularity selective --loss-chunk-size 8192 --max-position-embeddings 4Mi "
    "--train-iters 300 --global-batch-size 128 --keep-batch-tokens"
).split()


def test_every_stage_of_a_schedule_is_planned_as_a_run_of_its_length(capsys):
    schedule = "0:8192,100:262144:rotary-base=4e6,200:524288"
    assert plan.main([*STAGES, "--seq-length-schedule", schedule]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("fits: stage 1 of 3, after iteration 0: 128 x 8,192 tokens, --cp-he")
    assert lines[2].startswith("fits: stage 3 of 3, after iteration 200: 2 x 524,288 tokens")
    assert "524,288 tokens, H = " in " ".join(lines[3:6])  # the tables are of the largest stage
    assert plan.main([*STAGES, "--seq-length-schedule", schedule, "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["seq_length"] == 524288
    for stage, samples in zip(found["stages"], (128, 4, 2), strict=True):
        alone = ["--seq-length", str(stage["seq_length"]), "--global-batch-size", str(samples)]
        alone = [*STAGES, *alone, "--json", "-"]
        alone.remove("--keep-batch-tokens")
        assert plan.main(alone) == 0
        expected = json.loads(capsys.readouterr().out)
        for name in ("device", "host", "step"):
            assert stage[name] == expected[name]


def test_a_stage_that_does_not_fit_gets_flags_that_make_it_fit(capsys):
    schedule = "0:8192,100:1048576"
    flags = [*STAGES, "--gpu", "a100-40", "--seq-length-schedule", schedule]
    assert plan.main(flags) == 1
    said = capsys.readouterr().out
    assert said.startswith("fits: stage 1 of 2")
    assert "\ndoes not fit: stage 2 of 2, after iteration 100: 1 x 1,048,576 tokens" in said
    assert "\nwould fit with --" in said


def test_stages_share_automatic_settings_but_for_chunks_of_heads(capsys):
    """The short stage takes all heads in one exchange."""
    auto = ["--cp-heads-per-chunk", "auto", "--recompute-granularity", "auto"]
    flags = [*STAGES, *auto, "--gpu", "a100-40", "--cpu-offloading-num-layers", "all"]
    assert plan.main([*flags, "--seq-length-schedule", "0:8192,100:1048576"]) == 0
    chosen, chunks = set(), []
    for line in capsys.readouterr().out.splitlines()[:2]:
        settings = line.partition(" tokens, ")[2].partition(" | ")[0]
        chunks.append(int(re.search(r"--cp-heads-per-chunk (\d+)", settings)[1]))
        chosen.add(re.sub(r"--cp-heads-per-chunk \d+", "", settings))
    (shared,) = chosen
    assert "--recompute-granularity" in shared
    assert chunks[0] > chunks[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-context"], "--max-context searches one length, and --seq-length-schedule has"),
        (["--train-iters", "100"], "stage 2: it starts after iteration 100, and --train-iters is"),
    ],
)
def test_refuses_a_schedule_that_cannot_be_planned(capsys, flags, message):
    assert plan.main([*STAGES, "--seq-length-schedule", "0:8192,100:65536", *flags]) == 2
    assert message in capsys.readouterr().err


def test_chats_without_files_are_asked_for(capsys):
    """And mock data, which chats do not have, are not spoken of."""
    assert plan.main([*FITS, "--sft", "--tokenizer-type", "HuggingFaceTokenizer"]) == 2
    assert capsys.readouterr().err == (
        "error: --sft needs --data-path, which names files of chats; give it\n"
    )
