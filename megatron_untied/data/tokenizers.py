"""Builds the tokenizer that ``--tokenizer-type`` and ``--tokenizer-model`` name."""

import hashlib
import json
import logging
from pathlib import Path

from megatron.core.tokenizers import MegatronTokenizer, MegatronTokenizerBase
from megatron.core.utils import log_single_rank
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from megatron_untied.checkpoint.directory import require_content
from megatron_untied.config.data import TOKENIZER_TYPES, TokenizerType

logger = logging.getLogger(__name__)

TOKENIZER_FILE = "tokenizer.json"
_LIBRARIES = {
    "SentencePieceTokenizer": "sentencepiece",
    "HuggingFaceTokenizer": "huggingface",
    "NullTokenizer": "null",
}
# What pre-tokenizers and normalizers differ in. Its ids are part of tokenizer_hash, which existing
# token files name: a change here refuses all of them.
_VARIED_TEXT = "\n".join(
    (
        "The year 2023 had 31536000 seconds; 3.14159 and 1,234,567.89 are not 0x1F or 10e-7.",
        "I'll say: \"don't\", it's WE'VE HeLLo camelCase snake_case kebab-case e.g. U.S.A. a@b.org",
        "def f(x: int):\n    if x != 0 and y >= 1:\n\treturn {'k': [x**2, x // 3]}  # ?\r\n\r\n\n",
        "   three spaces,  two, trailing \t\t tabs \t\n \n\n\n\n      end  ",
        "naïve café Ångström ﬁ e\u0301 Ａ１ Ελληνικά Русский текст עברית العربية हिन्दी ไทย",
        "日本語のテキスト 中文字符 한국어 ٣٤٥ ४५ ① ½ x² ™ €100 £5 😀👩\u200d💻🇩🇪",
        "\u00a0nbsp\u200b\u2028\ufeff <html a='b'>&amp;</html> \\frac{a}{b} $x_1^2$ ~`|^#%",
    )
)


def build_tokenizer(
    tokenizer_type: TokenizerType,
    *,
    model: str | None = None,
    vocab_size: int | None = None,
    parse_special_tokens: bool = False,
    quiet: bool = False,
) -> MegatronTokenizerBase:
    """A tokenizer with ``vocab_size``, ``eod``, ``tokenize(text)`` and ``detokenize(ids)``.

    NullTokenizer reads numbers below ``vocab_size`` separated by one space; its end of document is
    one token more, so that its own vocab_size is one larger. No tokenizer adds a token of its
    own to the text. Of a Hugging Face folder ``tokenizer.json`` decides, also where the class that
    its configuration names would give other ids; one line is logged then, unless ``quiet``.

    The text of a special token, such as ``</s>``, is encoded as any text; Hugging Face tokenizers
    make it the token with ``parse_special_tokens``. User-defined symbols of SentencePiece are
    pieces of text, its control symbols never come from text.

    Raises:
        ValueError: for an unknown type, a model that cannot be read, a tokenizer without an
            end-of-document token, or one that does not have ``vocab_size`` tokens.
        FileNotFoundError: if the model is not a local path.
    """
    if tokenizer_type not in TOKENIZER_TYPES:
        raise ValueError(
            f"--tokenizer-type {tokenizer_type} is none of {', '.join(TOKENIZER_TYPES)}"
        )
    if tokenizer_type == "NullTokenizer":
        return _build_null(vocab_size)
    if not model:
        raise ValueError(f"--tokenizer-type {tokenizer_type} needs --tokenizer-model")
    if parse_special_tokens and tokenizer_type == "SentencePieceTokenizer":
        raise ValueError(
            "--parse-special-tokens: SentencePiece never makes a control symbol of text; leave the "
            "flag out"
        )
    tokenizer = _load(tokenizer_type, model)
    if tokenizer_type == "HuggingFaceTokenizer":
        _follow_tokenizer_file(tokenizer, Path(model), quiet=quiet)
        tokenizer._tokenizer.tokenizer.split_special_tokens = not parse_special_tokens
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


def tokenizer_hash(tokenizer: MegatronTokenizerBase) -> str:
    """Changes when the tokenizer gives other ids, and not with the files that it is stored in.

    Covers every token of the vocabulary with its id, the end of document, and a text that is
    difficult to encode: two vocabularies may be equal and their merges differ.
    """
    if tokenizer.library == "null":
        content = [tokenizer.vocab_size]
    else:
        vocabulary = sorted((id_, token) for token, id_ in _vocabulary(tokenizer).items())
        content = [vocabulary, tokenizer.tokenize(_VARIED_TEXT)]
    text = json.dumps([*content, tokenizer.eod])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def begin_of_text(tokenizer: MegatronTokenizerBase) -> int | None:
    """The id of the token that begins a text; None where the tokenizer has none."""
    if tokenizer.library == "null":
        return None
    bos = tokenizer.bos
    return None if bos is None or bos < 0 else bos


def _vocabulary(tokenizer: MegatronTokenizerBase) -> dict[str, int]:
    library = tokenizer._tokenizer.tokenizer
    if isinstance(library, PreTrainedTokenizerBase):
        return library.get_vocab()
    return {library.id_to_piece(id_): id_ for id_ in range(library.get_piece_size())}


def _build_null(vocab_size: int | None) -> MegatronTokenizerBase:
    if vocab_size is None or vocab_size < 1:
        raise ValueError(
            f"--tokenizer-type NullTokenizer needs --vocab-size of at least 1, not {vocab_size}"
        )
    return MegatronTokenizer.from_pretrained(
        metadata_path={"library": "null"}, vocab_size=vocab_size
    )


def _load(tokenizer_type: TokenizerType, model: str) -> MegatronTokenizerBase:
    wants_folder = tokenizer_type == "HuggingFaceTokenizer"
    wanted = "folder with tokenizer.json" if wants_folder else ".model file"
    if not Path(model).exists():
        raise FileNotFoundError(
            f"--tokenizer-model {model}: no such file or folder; --tokenizer-type {tokenizer_type} "
            f"needs a local {wanted}. Names on a hub are not looked up: download the tokenizer "
            "first (hf download NAME --local-dir FOLDER) and give its path"
        )
    if Path(model).is_dir() != wants_folder:
        raise ValueError(
            f"--tokenizer-model {model} is a {'file' if wants_folder else 'folder'}; "
            f"--tokenizer-type {tokenizer_type} needs a {wanted}"
        )
    for file in Path(model).iterdir() if wants_folder else [Path(model)]:
        if "token" in file.name or not wants_folder:
            require_content(file)
    try:
        return MegatronTokenizer.from_pretrained(
            model, metadata_path={"library": _LIBRARIES[tokenizer_type]}
        )
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"--tokenizer-model {model} cannot be read as a {tokenizer_type}: {reason}"
        ) from error


def _follow_tokenizer_file(tokenizer: MegatronTokenizerBase, folder: Path, *, quiet: bool) -> None:
    """Make ``tokenizer`` encode as ``tokenizer.json`` in ``folder`` does, if there is one.

    transformers 5 builds normalizer and pre-tokenizer of some classes anew and takes no more than
    the vocabulary from the file. Special tokens stay what configuration and class make them.
    """
    file = folder / TOKENIZER_FILE
    if not file.is_file():
        return
    library = tokenizer._tokenizer
    by_class = library.tokenizer
    by_file = Tokenizer.from_file(str(file))
    if getattr(by_file.model, "dropout", None):
        raise ValueError(
            f"--tokenizer-model {folder}: {TOKENIZER_FILE} has a dropout of "
            f"{by_file.model.dropout:g}, which gives the same text other ids each time; set "
            '"dropout" of its "model" to null'
        )
    by_file.no_truncation()
    by_file.no_padding()
    expected = by_file.encode(_VARIED_TEXT, add_special_tokens=False).ids
    if not quiet and by_class.encode(_VARIED_TEXT, add_special_tokens=False) != expected:
        log_single_rank(
            logger,
            logging.WARNING,
            f"{folder}: {type(by_class).__name__}, the class that tokenizer_config.json names, "
            f"gives other ids than {TOKENIZER_FILE}; {TOKENIZER_FILE} is used",
        )
    vocabulary = by_file.get_vocab(with_added_tokens=True)
    special_tokens = {
        name: token
        for name, token in by_class.special_tokens_map.items()
        if isinstance(token, str) and token in vocabulary
    }
    library.tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder), **special_tokens)
    library.add_special_tokens({})  # takes the names of the special tokens over
    if library.tokenizer.encode(_VARIED_TEXT, add_special_tokens=False) != expected:
        raise ValueError(
            f"--tokenizer-model {folder}: tokenizer_config.json changes the ids of "
            f"{TOKENIZER_FILE}; save the folder again with save_pretrained"
        )
