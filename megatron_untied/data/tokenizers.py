"""Builds the tokenizer of ``--tokenizer-type`` and ``--tokenizer-model``, and identifies it."""

import contextlib
import hashlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path

from megatron.core.tokenizers import MegatronTokenizer, MegatronTokenizerBase
from megatron.core.utils import log_single_rank
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from megatron_untied.checkpoint.directory import read_object, require_content
from megatron_untied.checkpoint.run_config import is_a
from megatron_untied.config.data import TOKENIZER_TYPES, TokenizerType
from megatron_untied.config.problems import in_one_line

logger = logging.getLogger(__name__)

TOKENIZER_FILE = "tokenizer.json"
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_LIBRARIES = {
    "SentencePieceTokenizer": "sentencepiece",
    "HuggingFaceTokenizer": "huggingface",
    "NullTokenizer": "null",
}
# Text that pre-tokenizers and normalizers treat differently. Its ids are part of tokenizer_hash,
# which token files store: with another text here all existing files would be refused.
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

    NullTokenizer reads numbers below ``vocab_size`` separated by one space. Its end of document is
    one more token, so its own vocab_size is one larger. No tokenizer adds tokens to the text. In a
    Hugging Face folder ``tokenizer.json`` takes precedence over the class that its configuration
    names; if their ids differ one line is logged, unless ``quiet``.

    The text of a special token, such as ``</s>``, is encoded as any other text. With
    ``parse_special_tokens`` Hugging Face tokenizers encode it as the token. User-defined symbols of
    SentencePiece are pieces of text; its control symbols never result from text.

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
        if vocab_size is None or vocab_size < 1:
            raise ValueError(
                f"--tokenizer-type NullTokenizer needs --vocab-size of at least 1, not {vocab_size}"
            )
        return MegatronTokenizer.from_pretrained(
            metadata_path={"library": "null"}, vocab_size=vocab_size
        )
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
    """A digest of the ids that the tokenizer gives, independent of the files that it is stored in.

    Covers every token with its id, the end of document, and the ids of a difficult text: tokenizers
    with the same vocabulary may have other merges.
    """
    if tokenizer.library == "null":
        content = [tokenizer.vocab_size]
    else:
        library = tokenizer._tokenizer.tokenizer
        if isinstance(library, PreTrainedTokenizerBase):
            ids = library.get_vocab()
        else:
            ids = {library.id_to_piece(id_): id_ for id_ in range(library.get_piece_size())}
        # Sorted: the order of get_vocab() differs between processes.
        vocabulary = sorted((id_, token) for token, id_ in ids.items())
        content = [vocabulary, tokenizer.tokenize(_VARIED_TEXT)]
    text = json.dumps([*content, tokenizer.eod])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def begin_of_text(tokenizer: MegatronTokenizerBase) -> int | None:
    """The id of the beginning-of-text token; None if the tokenizer has none."""
    if tokenizer.library == "null":
        return None
    bos = tokenizer.bos  # -1 in SentencePiece models that were trained without one
    return None if bos is None or bos < 0 else bos


def _load(tokenizer_type: TokenizerType, model: str) -> MegatronTokenizerBase:
    needs_folder = tokenizer_type == "HuggingFaceTokenizer"
    needed = "folder with tokenizer.json" if needs_folder else ".model file"
    if not Path(model).exists():
        raise FileNotFoundError(
            f"--tokenizer-model {model}: no such file or folder; --tokenizer-type {tokenizer_type} "
            f"needs a local {needed}. Names on a hub are not looked up: download the tokenizer "
            "first (hf download NAME --local-dir FOLDER) and give its path"
        )
    if Path(model).is_dir() != needs_folder:
        raise ValueError(
            f"--tokenizer-model {model} is a {'file' if needs_folder else 'folder'}; "
            f"--tokenizer-type {tokenizer_type} needs a {needed}"
        )
    for file in Path(model).iterdir() if needs_folder else [Path(model)]:
        if "token" in file.name or not needs_folder:
            require_content(file)
        if needs_folder and file.name in _SETTINGS:
            # Compared with the length of every text, though only to warn.
            limit = read_object(file, "save the tokenizer again").get("model_max_length", 0)
            if not is_a(limit, float | None):
                raise ValueError(f"{file}: model_max_length is {limit!r}, no number; correct it")
    with _unreadable(model, tokenizer_type):
        tokenizer = MegatronTokenizer.from_pretrained(
            model, metadata_path={"library": _LIBRARIES[tokenizer_type]}
        )
        tokenizer.tokenize(_VARIED_TEXT)  # some damage is met only by a text
        return tokenizer


@contextlib.contextmanager
def _unreadable(model: str | Path, tokenizer_type: TokenizerType) -> Iterator[None]:
    """Whatever a library of tokenizers raises over its files, as the user's error."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of Rust's is no Exception
        # These libraries append pages of advice.
        reason = in_one_line(next(iter(str(error).strip().splitlines()), type(error).__name__))
        raise ValueError(
            f"--tokenizer-model {model} cannot be read as a {tokenizer_type}: {reason}"
        ) from error


def _follow_tokenizer_file(tokenizer: MegatronTokenizerBase, folder: Path, *, quiet: bool) -> None:
    """Make ``tokenizer`` encode as ``tokenizer.json`` in ``folder``, if there is one.

    For some classes transformers 5 rebuilds normalizer and pre-tokenizer and takes only the
    vocabulary from the file. Special tokens remain those of the configuration and class.
    """
    file = folder / TOKENIZER_FILE
    if not file.is_file():
        return
    library = tokenizer._tokenizer
    by_class = library.tokenizer
    with _unreadable(folder, "HuggingFaceTokenizer"):
        by_file = Tokenizer.from_file(str(file))
    if getattr(by_file.model, "dropout", None):
        raise ValueError(
            f"--tokenizer-model {folder}: {TOKENIZER_FILE} has a dropout of "
            f"{by_file.model.dropout:g}, which gives the same text other ids each time; set "
            '"dropout" of its "model" to null'
        )
    # A file that was saved with these settings would cut documents, or fill short ones.
    by_file.no_truncation()
    by_file.no_padding()
    with _unreadable(folder, "HuggingFaceTokenizer"):
        expected = by_file.encode(_VARIED_TEXT, add_special_tokens=False).ids
        by_its_class = by_class.encode(_VARIED_TEXT, add_special_tokens=False)
    if not quiet and by_its_class != expected:
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
    # The base class takes the whole pipeline from the file; subclasses build their own.
    with _unreadable(folder, "HuggingFaceTokenizer"):
        library.tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder), **special_tokens)
        library.add_special_tokens({})  # updates its names of the special tokens
        found = library.tokenizer.encode(_VARIED_TEXT, add_special_tokens=False)
    if found != expected:
        raise ValueError(
            f"--tokenizer-model {folder}: tokenizer_config.json changes the ids of "
            f"{TOKENIZER_FILE}; save the folder again with save_pretrained"
        )
