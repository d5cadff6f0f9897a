"""Every command of the guide to 1M tokens, in order, with a tiny model in the place of Llama."""

import json
import os
import random

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from megatron_untied.checkpoint.directory import latest_iteration
from tests.hf.families import VOCAB_SIZE, save_model
from tests.test_readme import ROOT, commands, run

SMALL = (
    " --context-parallel-size 2 --cp-heads-per-chunk 2 --cpu-offloading-num-layers 2 "
    "--sequence-tile-size 48 --loss-chunk-size 48 --seq-length 256 --max-position-embeddings 256 "
    "--train-iters 2 --lr-warmup-iters 1 --num-workers 0 --distributed-backend gloo"
)


def documents() -> list[str]:
    words = [f"word{n}" for n in range(300)]
    draw = random.Random(0)
    return [" ".join(draw.choices(words, k=draw.randint(20, 200))) for _ in range(80)]


def save_tokenizer(texts: list[str], folder) -> None:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE - 100, special_tokens=["<unk>", "</s>"])
    tokenizer.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)


@pytest.fixture
def folder(tmp_path):
    """What the guide starts from, and this project."""
    for name in ("tools", "examples", "pretrain_gpt.py", "megatron_untied"):
        os.symlink(ROOT / name, tmp_path / name)
    texts = documents()
    save_model("llama3-wide-heads", tmp_path / "Llama-3.1-8B")
    save_tokenizer(texts, tmp_path / "Llama-3.1-8B")
    lines = (json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "books.jsonl").write_text("".join(lines))
    return tmp_path


@pytest.mark.timeout(900)  # a minute when the machine is idle
def test_every_command_of_the_guide(folder):
    for command in commands("docs/extend_llama_to_1m.md"):
        if command.startswith("bash examples/"):
            command = f"GPUS_PER_NODE=2 {command} {SMALL}"
        run(command, folder)
    assert latest_iteration(folder / "checkpoints/llama3.1-8b-1m") == 2
    exported = folder / "Llama-3.1-8B-1M"
    rope = AutoConfig.from_pretrained(exported).rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == ("yarn", 128.0, 500000.0)
    before = AutoModelForCausalLM.from_pretrained(folder / "Llama-3.1-8B").state_dict()
    after = AutoModelForCausalLM.from_pretrained(exported).state_dict()
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert "model.layers.0.self_attn.q_proj.weight" in changed
