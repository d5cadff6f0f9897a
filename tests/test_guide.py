"""Every command of the guides and every recipe, in order, with a tiny model."""

import json
import re
import shutil
import sysconfig
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from megatron_untied.checkpoint.directory import latest_iteration
from tests.test_readme import ROOT, commands, run


@pytest.mark.slow
@pytest.mark.timeout(900)  # two minutes when the machine is idle
@pytest.mark.parametrize("guide", ["docs/extend_llama_to_1m.md", "docs/one_gpu.md"])
def test_every_command_of_the_guide(guide, tmp_path):
    first, *others = commands(guide)
    folder = tmp_path / "rehearsal"
    run(first.replace("--folder rehearsal", f"--folder {folder}"))
    own = "checkpoints/llama3.1-8b-1m"
    for command in others:
        if command.startswith("bash examples/") and "--dry-run" not in command:
            command += " --rehearse"
        run(command.replace(f"--load {own}", f"--load {own}-rehearsal"), folder)
    assert latest_iteration(folder / f"{own}-rehearsal") == 4
    assert not (folder / own).exists()
    exported = folder / "Llama-3.1-8B-1M"
    rope = AutoConfig.from_pretrained(exported).rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == ("yarn", 128.0, 500000.0)
    before = AutoModelForCausalLM.from_pretrained(folder / "Llama-3.1-8B").state_dict()
    after = AutoModelForCausalLM.from_pretrained(exported).state_dict()
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert "model.layers.0.self_attn.q_proj.weight" in changed


@pytest.mark.slow
@pytest.mark.timeout(900)  # two minutes when the machine is idle
def test_every_command_of_the_guide_to_chats(tmp_path):
    first, *others = commands("docs/fine_tune_on_chats.md")
    folder = tmp_path / "rehearsal"
    run(first.replace("--folder rehearsal", f"--folder {folder}"))
    said = "".join(run(command, folder) for command in others)
    assert (folder / "lengths.png").stat().st_size > 10_000
    assert re.search(
        r"assistant<\|end_header_id\|>\n\n\u27e6[^\u27e7]+<\|eot_id\|>\u27e7<\|start_h", said
    )
    described = re.findall(
        r"^ ?sft: 300 chats \| \d+ longer than 4096 tokens dropped \| .*", said, re.M
    )
    assert len(described) == 3  # by the tool and by both runs
    assert re.search(r"iteration +6/ +6 .* lm loss", said)
    assert "trained |" in said
    adapters = json.loads((folder / "Llama-3.1-8B-adapters" / "adapter_config.json").read_text())
    assert (adapters["r"], adapters["lora_alpha"]) == (8, 16.0)
    assert AutoModelForCausalLM.from_pretrained(folder / "Llama-3.1-8B-merged").num_parameters()
    tokenizer = AutoTokenizer.from_pretrained(folder / "Llama-3.1-8B-chat")
    assert tokenizer.chat_template


@pytest.mark.timeout(900)  # a minute when the machine is idle
def test_every_command_of_the_guide_to_evaluation(tmp_path):
    for name in ("tools", "pretrain_gpt.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    said = [run(command, tmp_path) for command in commands("docs/evaluate_context.md")]
    assert "far context is worth" in said[2]
    assert "no leak: random tokens cost" in said[2]
    report = json.loads((tmp_path / "copy/context/context.json").read_text())
    assert {"documents", "passkey", "needles", "copy"} < set(report)
    assert re.search(r"loader +[\d,]+ tokens/s", said[3])


CONVERT = (
    "python tools/convert_checkpoint.py hf-to-megatron --hf-path Llama-3.1-8B --save checkpoints/it"
)
JOIN = (
    "python tools/preprocess_data.py --input repositories/* --join-folders --output-prefix code "
    "--tokenizer-type HuggingFaceTokenizer --tokenizer-model checkpoints/it/tokenizer --append-eod"
)


@pytest.mark.slow  # the guide to 1M tokens rehearses another one
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("recipe", "paths", "said"),
    [
        ("extend_qwen3_8b_512k", "", "planned for a model of its shape"),
        ("sft_chats_128k", "checkpoints/it own board checkpoints/it/tokenizer chats.jsonl",
         r"sft: 300 chats \| \d+ longer than 512 tokens dropped"),
        ("code_repositories_256k",
         "checkpoints/it own board checkpoints/it/tokenizer code_text_document", "long documents"),
    ],
)  # fmt: skip
def test_every_recipe_is_rehearsed(recipe, paths, said, tmp_path):
    folder = tmp_path / "rehearsal"
    run(f"python tools/tiny_llama.py --folder {folder}")
    if paths:
        run(CONVERT, folder)
        for package in ("json", "email", "http"):
            source = Path(sysconfig.get_path("stdlib"), package)
            shutil.copytree(source, folder / "repositories" / package)
        run(JOIN, folder)
    found = run(f"bash examples/recipes/{recipe}.sh {paths} --rehearse", folder)
    assert re.search(said, found)
    assert "rehearsal: done, nothing failed" in found
    own = folder / ("own" if paths else f"runs/{recipe}/checkpoints")
    assert latest_iteration(own.with_name(f"{own.name}-rehearsal")) == 4


RECIPES = sorted(ROOT.glob("examples/recipes/*_*.sh"))


@pytest.mark.slow  # the planner takes seconds for each
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_the_numbers_of_a_recipe_are_those_of_its_plan(recipe):
    page = (ROOT / "examples/recipes/README.md").read_text()
    (row,) = re.findall(rf"^\| `{recipe.name}` \| .* \| (.*) \| (.*) \| (.*) \|$", page, re.M)
    plan = " ".join(run(f"bash examples/recipes/{recipe.name} --dry-run").split())
    step = re.search(r"this run fits: .* a step takes about ([\d.,]+) s", plan)[1]
    peak, host = re.search(
        r"fits: GPU ([\d.]+) of [\d.]+ GiB .*?; host ([\d.,]+) of", plan
    ).groups()
    assert row == (peak, *(f"{float(x.replace(',', '')):.0f}" for x in (host, step)))
