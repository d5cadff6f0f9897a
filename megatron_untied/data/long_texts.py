"""Encodes a long text part by part, where that gives the ids of the whole.

Progress is then known inside one document. A cut is exact for

- NullTokenizer at every space;
- SentencePiece BPE without normalization, before a space, if no piece of the vocabulary has a space
  after another character: no merge can cross that place, and the rest is independent of it;
- Hugging Face BPE, at a boundary between words of a pre-tokenizer that goes from left to right
  and looks at no more than the character behind a word. The boundary is taken from the middle of a
  longer stretch of text, so that the end of that stretch cannot have moved it.
"""

import json
import re
from collections.abc import Callable, Iterator

from megatron.core.tokenizers import MegatronTokenizerBase
from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
from tokenizers import Encoding, Tokenizer

PART_CHARACTERS = 1 << 20
_MARGIN_CHARACTERS = 1 << 12
_SPACE = "\u2581"  # SentencePiece's

Parts = Iterator[tuple[int, list[int]]]
"""The characters of the text that a part and all before it cover, and the part's ids."""
EncodeParts = Callable[[str], Parts]


def parts_encoder(
    tokenizer: MegatronTokenizerBase, *, parse_special_tokens: bool
) -> EncodeParts | None:
    """Encodes a text in parts; None where a cut of it may change ids."""
    if tokenizer.library == "null":
        return lambda text: _at_spaces(text, tokenizer.tokenize, r" ")
    library = tokenizer._tokenizer.tokenizer
    if tokenizer.library == "sentencepiece":
        return _sentencepiece_parts(library)
    if not library.is_fast:
        return None
    backend = Tokenizer.from_str(library.backend_tokenizer.to_str())
    if not _cuts_between_words(json.loads(backend.to_str())):
        return None
    backend.post_processor = None  # offsets shall not be trimmed
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = not parse_special_tokens
    return lambda text: _at_words(text, backend)


def _at_spaces(text: str, encode: Callable[[str], list[int]], space: str) -> Parts:
    """Parts end before a match of ``space``; the space, which every part implies, is dropped."""
    cut = re.compile(space)
    start = 0
    while match := cut.search(text, start + PART_CHARACTERS):
        yield match.end(), encode(text[start : match.start()])
        start = match.end()
    yield len(text), encode(text[start:])


def _sentencepiece_parts(processor: SentencePieceProcessor) -> EncodeParts | None:
    model = sentencepiece_model_pb2.ModelProto.FromString(processor.serialized_model_proto())
    normalizer, trainer = model.normalizer_spec, model.trainer_spec
    inner_space = re.compile(f"[^ {_SPACE}][ {_SPACE}]")
    if (
        trainer.model_type != sentencepiece_model_pb2.TrainerSpec.BPE
        or trainer.treat_whitespace_as_suffix
        or normalizer.precompiled_charsmap
        or normalizer.remove_extra_whitespaces
        or not normalizer.escape_whitespaces
        or any(inner_space.search(piece.piece) for piece in model.pieces)
    ):
        return None
    # With a dummy prefix the space before a part is the one that SentencePiece puts there.
    cut = f"(?<=[^ {_SPACE}]) " if normalizer.add_dummy_prefix else f"(?<=[^ {_SPACE}])(?= )"
    return lambda text: _at_spaces(text, processor.encode_as_ids, cut)


def _at_words(text: str, backend: Tokenizer) -> Parts:
    start = 0
    while len(text) - start > PART_CHARACTERS:
        part = text[start : start + PART_CHARACTERS]
        encoding = backend.encode(part, add_special_tokens=False)
        num_tokens, num_characters = _last_cut(part, encoding)
        if not num_tokens:
            break  # no word ends in so long a stretch: the rest in one call
        start += num_characters
        yield start, encoding.ids[:num_tokens]
    yield len(text), backend.encode(text[start:], add_special_tokens=False).ids


def _last_cut(part: str, encoding: Encoding) -> tuple[int, int]:
    """Tokens and characters before the last word boundary that what follows cannot move; or 0, 0.

    That is one between a word and white space which ends, and far from the end of ``part``.
    """
    words, offsets = encoding.word_ids, encoding.offsets
    for index in range(len(words) - 1, 0, -1):
        at = offsets[index][0]
        if (
            0 < at <= len(part) - _MARGIN_CHARACTERS
            and words[index] != words[index - 1]
            and offsets[index - 1][1] == at
            and part[at].isspace()
            and not part[at - 1].isspace()
            and part[at : at + _MARGIN_CHARACTERS].strip()
        ):
            return index, at
    return 0, 0


def _cuts_between_words(spec: dict) -> bool:
    """Whether words of the tokenizer of a ``tokenizer.json`` are independent of each other."""
    normalizers = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase"}
    return (
        spec["model"].get("type") == "BPE"
        and not spec["model"].get("dropout")
        and (spec["normalizer"] or {"type": "NFC"})["type"] in normalizers
        and not any(token["single_word"] for token in spec["added_tokens"])
        and _looks_left_to_right(spec["pre_tokenizer"] or {"type": "None"})
    )


def _looks_left_to_right(pre_tokenizer: dict) -> bool:
    match pre_tokenizer:
        case {"type": "Sequence", "pretokenizers": [*steps]}:
            return bool(steps) and all(map(_looks_left_to_right, steps))
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return True
        case {"type": "Digits" | "Punctuation"}:
            return True
        case {"type": "Split", "pattern": {"Regex": regex}}:
            # The lookahead of GPT-2 sees one character. No other, no lookbehind, no anchor.
            rest = re.sub(r"\[(\\.|[^\]\\])*\]", "", regex.replace(r"(?!\S)", ""))
            return not re.search(r"\(\?<?[=!]|\(\?<|\\[bBAGZzK]|[$^]", rest)
    return False
