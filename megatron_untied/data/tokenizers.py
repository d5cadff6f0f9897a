"""Builds the tokenizer that ``--tokenizer-type`` and ``--tokenizer-model`` name."""

from pathlib import Path

from megatron.core.tokenizers import MegatronTokenizer, MegatronTokenizerBase

from megatron_untied.data.config import TOKENIZER_TYPES, TokenizerType

_LIBRARIES = {
    "SentencePieceTokenizer": "sentencepiece",
    "HuggingFaceTokenizer": "huggingface",
    "NullTokenizer": "null",
}


def build_tokenizer(
    tokenizer_type: TokenizerType, *, model: str | None = None, vocab_size: int | None = None
) -> MegatronTokenizerBase:
    """A tokenizer with ``vocab_size``, ``eod``, ``tokenize(text)`` and ``detokenize(ids)``.

    NullTokenizer reads numbers below ``vocab_size`` separated by one space; its end of document is
    one token more, so that its own vocab_size is one larger. No tokenizer adds a token of its
    own to the text.

    Raises:
        ValueError: for an unknown type, a model that cannot be read, a tokenizer without an
            end-of-document token, or one that does not have ``vocab_size`` tokens.
        FileNotFoundError: if the model is a path where nothing is.
    """
    if tokenizer_type not in TOKENIZER_TYPES:
        raise ValueError(
            f"--tokenizer-type {tokenizer_type} is none of {', '.join(TOKENIZER_TYPES)}"
        )
    if tokenizer_type == "NullTokenizer":
        return _build_null(vocab_size)
    if not model:
        raise ValueError(f"--tokenizer-type {tokenizer_type} needs --tokenizer-model")
    tokenizer = _load(tokenizer_type, model)
    if tokenizer.eod is None or tokenizer.eod < 0:
        raise ValueError(
            f"--tokenizer-model {model} has no end-of-sentence token to end documents with; "
            "take a tokenizer that defines one"
        )
    if vocab_size is not None and vocab_size != tokenizer.vocab_size:
        raise ValueError(
            f"--vocab-size {vocab_size} does not match {model}, which has {tokenizer.vocab_size} "
            f"tokens; write --vocab-size {tokenizer.vocab_size} or leave it out"
        )
    return tokenizer


def _build_null(vocab_size: int | None) -> MegatronTokenizerBase:
    if vocab_size is None or vocab_size < 1:
        raise ValueError(
            f"--tokenizer-type NullTokenizer needs --vocab-size of at least 1, not {vocab_size}"
        )
    return MegatronTokenizer.from_pretrained(
        metadata_path={"library": "null"}, vocab_size=vocab_size
    )


def _load(tokenizer_type: TokenizerType, model: str) -> MegatronTokenizerBase:
    # A Hugging Face name on the hub is NAME or OWNER/NAME; what cannot be one is a path.
    is_path = tokenizer_type == "SentencePieceTokenizer" or model.count("/") > 1 or model[0] in "./"
    if is_path and not Path(model).exists():
        raise FileNotFoundError(f"--tokenizer-model {model}: no such file or folder")
    try:
        return MegatronTokenizer.from_pretrained(
            model, metadata_path={"library": _LIBRARIES[tokenizer_type]}
        )
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"--tokenizer-model {model} cannot be read as a {tokenizer_type}: {reason}"
        ) from error
