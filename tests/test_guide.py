"""Every command of the guides to 1M tokens, chats and evaluation, in order, with a tiny model."""

import json
import re

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
