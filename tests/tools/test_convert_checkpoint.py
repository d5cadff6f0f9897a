import json

import pytest
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer, Qwen2TokenizerFast

from megatron_untied.commands import convert
from megatron_untied.data.tokenizers import build_tokenizer
from tests.hf.test_conversion import assert_same, tensors
from tests.support.hf_conversion import config_of
from tests.support.hf_models import VOCAB_SIZE, save_model


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A model with more rows than its tokenizer has tokens, as Qwen's."""
    folder = save_model("qwen2-tied", tmp_path_factory.mktemp("hf"))
    vocabulary = {byte: number for number, byte in enumerate(sorted(ByteLevel.alphabet()))}
    end = {"<|endoftext|>": 256}
    Qwen2TokenizerFast(vocab=vocabulary | end, merges=[]).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def imported(source, tmp_path_factory):
    save = tmp_path_factory.mktemp("save")
    convert.main(["hf-to-megatron", "--hf-path", str(source), "--save", str(save)])
    return save


def test_there_and_back(source, imported, tmp_path, capsys):
    back = tmp_path / "back"
    flags = ["--max-shard-gb", "0.0001", "--dtype", "fp32"]
    convert.main(["megatron-to-hf", "--load", str(imported), "--hf-path", str(back), *flags])
    assert_same(tensors(back), tensors(source))
    assert "284,800 bytes, float32; copied tokenizer.json" in capsys.readouterr().out
    assert len(list(back.glob("model-*.safetensors"))) == 2
    expected = AutoTokenizer.from_pretrained(source)("the sea").input_ids
    assert AutoTokenizer.from_pretrained(back)("the sea").input_ids == expected


def test_the_tokenizer_comes_with_the_checkpoint(imported):
    folder = str(imported / "tokenizer")
    tokenizer = build_tokenizer("HuggingFaceTokenizer", model=folder)
    assert tokenizer.vocab_size == 257
    assert tokenizer.tokenize("the sea") == [83, 71, 68, 220, 82, 68, 64]
    config = config_of(
        1, imported, tokenizer_type="HuggingFaceTokenizer", tokenizer_model=folder, vocab_size=None
    )
    assert config.model.vocab_size == VOCAB_SIZE  # all rows, not only those with tokens


def test_rejects_a_tokenizer_with_more_tokens_than_rows(imported):
    with pytest.raises(ValueError, match="the tokenizer has 1004 tokens and the checkpoint in "):
        config_of(1, imported, vocab_size=VOCAB_SIZE)


def test_says_that_there_is_no_tokenizer(tmp_path, capsys):
    source = save_model("llama2", tmp_path / "hf")
    (source / "generation_config.json").unlink()
    save, back = tmp_path / "save", tmp_path / "back"
    convert.main(["hf-to-megatron", "--hf-path", str(source), "--save", str(save)])
    assert "copied config.json" in capsys.readouterr().out
    convert.main(["megatron-to-hf", "--load", str(save), "--hf-path", str(back)])
    assert "no tokenizer files: there were none to copy" in capsys.readouterr().out


def test_the_iteration_can_be_chosen(imported, tmp_path):
    flags = ["--load", str(imported), "--hf-path", str(tmp_path / "back"), "--ckpt-step"]
    convert.main(["megatron-to-hf", *flags, "0"])
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == "qwen2"
    with pytest.raises(SystemExit, match="error: --ckpt-step names iteration 7; "):
        convert.main(["megatron-to-hf", *flags, "7"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hf-to-megatron", "--hf-path", "absent", "--save", "s"], "absent is no folder"),
        (["megatron-to-hf", "--load", "absent", "--hf-path", "o"], "absent has no checkpoint"),
        (["megatron-to-hf", "--load", "absent", "--hf-path", "o", "--max-shard-gb", "0"],
         "--max-shard-gb 0.0 must be above 0, such as 5"),
    ],
)  # fmt: skip
def test_ends_with_one_line(arguments, message):
    with pytest.raises(SystemExit, match=f"error: .*{message}"):
        convert.main(arguments)
