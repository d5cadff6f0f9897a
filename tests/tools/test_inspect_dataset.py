import pytest

from megatron_untied.commands.inspect_dataset import main
from tests.support.chats import CHATS, EOS, TEMPLATES, said, write_chats, write_tokenizer


@pytest.fixture
def flags(tmp_path):
    tokenizer = write_tokenizer(tmp_path / "tokenizer", TEMPLATES["llama_3"], EOS["llama_3"])
    long = {"messages": [said("user", "tell"), said("assistant", "more " * 400)]}
    escape = {"messages": [said("user", "\x1b[2J"), said("assistant", "no")]}
    chats = write_chats(tmp_path / "chats.jsonl", [CHATS["turns"], escape, long])
    return ["--data-path", chats, "--tokenizer-model", tokenizer, "--seq-length", "256",
            "--split", "1", "--num-workers", "0"]  # fmt: skip


def test_prints_trained_tokens_in_brackets_and_draws_lengths(flags, tmp_path, capsys):
    picture = tmp_path / "lengths.png"
    main([*flags, "--long-samples", "drop", "--histogram", str(picture)])
    said = capsys.readouterr().out
    assert "⟦Hello.<|eot_id|>⟧<|start_header_id|>user<|end_header_id|>\n\nAnd now?" in said
    assert "\x1b" not in said  # a chat does not clear the reader's screen
    assert "␛[2J" in said
    assert "sft: 3 chats | 1 longer than 256 tokens dropped | 0 without" in said
    assert picture.stat().st_size > 10_000


def test_a_long_chat_is_one_line_behind_the_lengths(flags, capsys):
    with pytest.raises(SystemExit, match=r"^error: .* 1 of 3 chats are longer .* number 3\)"):
        main([*flags, "--samples", "0"])
    assert "tokens of a chat: 50%: " in capsys.readouterr().out
