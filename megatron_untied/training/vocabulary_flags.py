"""How many tokens the tokenizer has and how many rows the model: flags, preset and checkpoint."""

from collections.abc import Mapping
from typing import Any

from megatron_untied.data.config import DataConfig
from megatron_untied.data.tokenizers import build_tokenizer
from megatron_untied.presets import read_preset

Values = Mapping[str, Any]


def tokenizer_vocab_size(values: Values) -> int | None:
    """--vocab-size; with a preset, NullTokenizer's is what gives the model the preset's rows."""
    null = values["tokenizer_type"] == "NullTokenizer"
    if null and values["model"] and values["vocab_size"] is None:
        return read_preset(values["model"]).vocab_size - 1  # the end of document is one more
    return values["vocab_size"]


def model_vocab_size(values: Values, data: DataConfig, stored: int | None) -> int:
    """Tokens of the tokenizer; or the rows of the architecture, which may be more.

    Rows that no token uses are as a published model has them; the softmax goes over them all the
    same. ``stored`` are those of a checkpoint that --use-checkpoint-args reads.

    Raises:
        ValueError: the tokenizer cannot be had, or has more tokens than there are rows.
    """
    num_tokens = build_tokenizer(
        data.tokenizer_type, model=data.tokenizer_model, vocab_size=data.vocab_size, quiet=True
    ).vocab_size
    if stored is not None:
        num_rows, owner = stored, f"the checkpoint in {values['load']}"
        remedy = "the tokenizer it was trained with"
    elif values["model"] and values["vocab_size"] is None:
        num_rows, owner = read_preset(values["model"]).vocab_size, f"--model {values['model']}"
        remedy = f"its own tokenizer, or --vocab-size {num_tokens} for a model with as many rows"
    else:
        return num_tokens
    if num_tokens > num_rows:
        raise ValueError(
            f"the tokenizer has {num_tokens} tokens and {owner} {num_rows}; give {remedy}"
        )
    return num_rows
