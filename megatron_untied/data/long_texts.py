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
WHOLE_CHARACTERS = 16 * PART_CHARACTERS
"""A longer text is not encoded in one call unless asked for: it shows no progress and takes many
times its size in memory, with some tokenizers also time that grows faster than the text."""
_MARGIN_CHARACTERS = 1 << 12
_SPACE = "\u2581"  # SentencePiece's

Parts = Iterator[tuple[int, list[int]]]
"""Per part: characters of the text up to its end, and its ids."""
EncodeParts = Callable[[str], Parts]


def parts_encoder(
    tokenizer: MegatronTokenizerBase, *, parse_special_tokens: bool, most: float = WHOLE_CHARACTERS
) -> EncodeParts | str:
    """A function that encodes a text in parts, or the reason why cuts may change ids.

    The function raises ``ValueError`` where it would have to encode over ``most`` characters in one
    call, as there is no place to cut.
    """
    if tokenizer.library == "null":
        return lambda text: _at_spaces(text, tokenizer.tokenize, r" ", most)
    library = tokenizer._tokenizer.tokenizer
    if tokenizer.library == "sentencepiece":
        return _sentencepiece_parts(library, most)
    if not library.is_fast:
        return "a slow tokenizer does not say which characters a token is made of"
    backend = Tokenizer.from_str(library.backend_tokenizer.to_str())
    if problem := _reaches_beyond_words(json.loads(backend.to_str())):
        return problem
    backend.post_processor = None  # it may trim offsets, which cuts are computed from
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = not parse_special_tokens
    return lambda text: _at_words(text, backend, most)


def require_at_most(most: float, num_characters: int, reason: str) -> None:
    """Raise ``ValueError`` if a text is too long to be encoded in one call, for ``reason``."""
    if num_characters > most:
        raise ValueError(
            f"{num_characters:,} characters in one call, since parts of them may give other ids: "
            f"{reason}; use a tokenizer of another kind, cut the text into documents, or give "
            "--long-texts-in-one-call, which shows no progress meanwhile and takes much memory"
        )


def _at_spaces(text: str, encode: Callable[[str], list[int]], space: str, most: float) -> Parts:
    """Parts end before a match of ``space``, which is dropped: each part implies it."""
    cut = re.compile(space)
    start = 0
    while match := cut.search(text, start + PART_CHARACTERS):
        yield match.end(), encode(text[start : match.start()])
        start = match.end()
    require_at_most(most, len(text) - start, f"no space follows character {start:,}")
    yield len(text), encode(text[start:])


def _sentencepiece_parts(processor: SentencePieceProcessor, most: float) -> EncodeParts | str:
    model = sentencepiece_model_pb2.ModelProto.FromString(processor.serialized_model_proto())
    normalizer, trainer = model.normalizer_spec, model.trainer_spec
    if trainer.model_type != sentencepiece_model_pb2.TrainerSpec.BPE:
        return "its pieces are not chosen by BPE, so each depends on all of the text"
    if normalizer.precompiled_charsmap or normalizer.remove_extra_whitespaces:
        return "it normalizes the text as a whole"
    inner_space = re.compile(f"[^ {_SPACE}][ {_SPACE}]")
    if (
        trainer.treat_whitespace_as_suffix
        or not normalizer.escape_whitespaces
        or any(inner_space.search(piece.piece) for piece in model.pieces)
    ):
        return "its pieces may have a space inside"
    # With a dummy prefix SentencePiece adds the space before each part by itself.
    cut = f"(?<=[^ {_SPACE}]) " if normalizer.add_dummy_prefix else f"(?<=[^ {_SPACE}])(?= )"
    return lambda text: _at_spaces(text, processor.encode_as_ids, cut, most)


def _at_words(text: str, backend: Tokenizer, most: float) -> Parts:
    start, size = 0, PART_CHARACTERS
    while len(text) - start > size:
        part = text[start : start + size]
        # The tokens after the cut are encoded twice: a few thousand characters of each Mi.
        encoding = backend.encode(part, add_special_tokens=False)
        num_tokens, num_characters = _last_cut(part, encoding)
        if num_tokens:
            start, size = start + num_characters, PART_CHARACTERS
            yield start, encoding.ids[:num_tokens]
        else:
            size *= 2  # so a word of any length is encoded a few times
            reason = f"no word ends in the {len(part):,} behind character {start:,}"
            require_at_most(most, min(size, len(text) - start), reason)
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


def _reaches_beyond_words(spec: dict) -> str | None:
    """Why a tokenizer, given as its ``tokenizer.json``, may not encode words independently."""
    # Normalizers that change single characters, or combine neighbours inside a word.
    normalizers = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase"}
    model, normalizer = spec["model"], (spec["normalizer"] or {"type": "NFC"})["type"]
    if model.get("type") != "BPE" or model.get("dropout"):
        return f"its model, {model.get('type')}, is no BPE without dropout"
    if normalizer not in normalizers:
        return f"its normalizer, {normalizer}, may change a text across words"
    if any(token["single_word"] for token in spec["added_tokens"]):
        return "it has added tokens that depend on the characters around them"
    if not _looks_left_to_right(spec["pre_tokenizer"] or {"type": "None"}):
        return "its pre-tokenizer may cut words by what is far from them"
    return None


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
