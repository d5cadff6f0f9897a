"""Tiny chat tokenizers: templates in the formats of published models, and chats to encode."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).with_name("chat_templates")
TEMPLATES = {
    name: (FOLDER / f"{name}.jinja").read_text() for name in ("llama_3", "qwen_3", "mistral")
}
"""In the formats of Llama 3.1, Qwen 3 and Mistral v3, without what does not concern the turns."""
WITH_GENERATION = (FOLDER / "generation.jinja").read_text().removesuffix("\n")
"""With {% generation %} around the turns of the assistant."""
EOS = {"llama_3": "<|eot_id|>", "qwen_3": "<|im_end|>", "mistral": "</s>"}

SPECIAL = (
    "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|im_start|>",
    "<|im_end|>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
)  # fmt: skip
NOT_SPECIAL = ("<tool_call>", "</tool_call>", "<think>", "</think>")

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {
    "id": "a1b2c3d4e",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2}},
}


def said(role: str, content: str | None, **more) -> dict:
    """A message."""
    return {"role": role, "content": content, **more}


CHATS = {
    "turns": {
        "messages": [
            said("system", "Be brief."),
            said("user", "Hi there"),
            said("assistant", "Hello.\n"),
            said("user", "And now?"),
            said("assistant", "  Good bye  "),
        ]
    },
    "tools": {
        "tools": [TOOL],
        "messages": [
            said("user", "Weather in Zürich?"),
            said("assistant", None, tool_calls=[CALL]),
            said("tool", '{"degrees": -3}', tool_call_id="a1b2c3d4e"),
            said("assistant", "It is -3 °C."),
            said("user", "Thanks"),
            said("assistant", "Welcome"),
        ],
    },
    "empty": {
        "messages": [
            said("user", ""),
            said("assistant", ""),
            said("user", " "),
            said("assistant", "Say something"),
        ]
    },
    "unicode": {
        "messages": [
            said("user", "日本語 e\u0301 👩\u200d💻"),
            said("assistant", "😀 naïve 🇩🇪👍"),
        ]
    },
    "thinking": {
        "messages": [
            said("user", "2+2?"),
            said("assistant", "<think>\neasy\n</think>\n\n4"),
            said("user", "3+3?"),
            said("assistant", "<think>\nalso easy\n</think>\n\n6"),
        ]
    },
    "without a turn": {"messages": [said("user", "Anyone?")]},
}


def write_tokenizer(
    folder: Path, template: str | None = TEMPLATES["qwen_3"], eos: str = "<|im_end|>"
) -> str:
    """A byte-level BPE of 400 tokens with the special tokens of all templates, as saved by HF."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    # As Llama 3's: it trims the offsets of white space.
    bpe.post_processor = processors.ByteLevel(trim_offsets=True)
    texts = [json.dumps(CHATS, ensure_ascii=False), *TEMPLATES.values()]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=381, initial_alphabet=alphabet))
    bpe.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    bpe.add_tokens([AddedToken(token, special=False) for token in NOT_SPECIAL])
    bos = "<|begin_of_text|>" if template == TEMPLATES["llama_3"] else "<s>"
    PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=bos, eos_token=eos, chat_template=template
    ).save_pretrained(folder)
    return str(folder)


def write_chats(path: Path, records) -> str:
    """JSON lines."""
    lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    path.write_text("".join(lines), encoding="utf-8")
    return str(path)
