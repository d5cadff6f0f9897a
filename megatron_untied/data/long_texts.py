"""Encodes a long text in parts, for tokenizers that then give the ids of the whole text.

So progress is visible inside one document. A cut does not change ids for

- NullTokenizer at every space;
- SentencePiece BPE without normalization, before a space, if no piece of the vocabulary has a space
  after another character: no merge can cross that place;
- Hugging Face BPE, at a boundary between words of a pre-tokenizer that works from left to right
  and reads at most one character beyond a word. The boundary is taken far from the end of the
  encoded text, which therefore cannot have moved it.
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
"""Per part: characters of the text up to its end, and its ids."""
EncodeParts = Callable[[str], Parts]


def parts_encoder(
    tokenizer: MegatronTokenizerBase, *, parse_special_tokens: bool
) -> EncodeParts | None:
    """A function that encodes a text in parts; None if cuts may change ids."""
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
    backend.post_processor = None  # it may trim offsets, which cuts are computed from
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = not parse_special_tokens
    return lambda text: _at_words(text, backend)


def _at_spaces(text: str, encode: Callable[[str], list[int]], space: str) -> Parts:
    """Parts end before a match of ``space``, which is dropped: each part implies it."""
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
    # With a dummy prefix SentencePiece adds the space before each part by itself.
    cut = f"(?<=[^ {_SPACE}]) " if normalizer.add_dummy_prefix else f"(?<=[^ {_SPACE}])(?= )"
    return lambda text: _at_spaces(text, processor.encode_as_ids, cut)


def _at_words(text: str, backend: Tokenizer) -> Parts:
    start = 0
    while len(text) - start > PART_CHARACTERS:
        part = text[start : start + PART_CHARACTERS]
        # The tokens after the cut are encoded twice: a few thousand characters of each Mi.
        encoding = backend.encode(part, add_special_tokens=False)
        num_tokens, num_characters = _last_cut(part, encoding)
        if not num_tokens:
            break  # no word ends in a whole part: encode the rest in one call
        start += num_characters
        yield start, encoding.ids[:num_tokens]
    yield len(text), backend.encode(text[start:], add_special_tokens=False).ids


def _last_cut(part: str, encoding: Encoding) -> tuple[int, int]:
    """Tokens and characters before the last safe word boundary of ``part``; 0, 0 without one.

    Safe is one between a word and white space, far from the end, followed by another word in time.
    """
    words, offsets = encoding.word_ids, encoding.offsets
    for index in range(len(words) - 1, 0, -1):
        at = offsets[index][0]  # characters before this token
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
    """Whether a tokenizer, given as its ``tokenizer.json``, encodes words independently."""
    # Normalizers that change single characters, or combine neighbours inside a word.
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
            # GPT-2's lookahead reads one character. No other lookahead, lookbehind or anchor.
            rest = re.sub(r"\[(\\.|[^\]\\])*\]", "", regex.replace(r"(?!\S)", ""))
            return not re.search(r"\(\?<?[=!]|\(\?<|\\[bBAGZzK]|[$^]", rest)
    return False
