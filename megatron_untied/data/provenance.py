"""``PREFIX.provenance.json`` beside token files: the tokenizer and settings that made them."""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from megatron.core.tokenizers import MegatronTokenizerBase
from megatron.core.utils import log_single_rank

from megatron_untied.checkpoint.directory import read_object
from megatron_untied.config.data import TokenizerType
from megatron_untied.config.problems import first_few
from megatron_untied.data.indexed_files import IndexedFiles, fingerprint_of
from megatron_untied.data.tokenizers import tokenizer_hash

logger = logging.getLogger(__name__)

ENDING = ".provenance.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """How text became tokens. With equal provenance, equal text has equal tokens."""

    tokenizer_type: TokenizerType
    tokenizer_model: str | None
    """The path as given, for messages only: files may move."""
    tokenizer_hash: str
    vocab_size: int
    eod: int
    append_eod: bool
    """Whether every document ends with ``eod``."""
    bos: int | None
    """The token that was prepended to every document; None without one."""
    parse_special_tokens: bool

    def write(self, path: str, lengths: np.ndarray, num_empty: int) -> None:
        """Store it with a digest of the token files, from their ``lengths``: [documents]."""
        fields = {
            **asdict(self),
            "num_documents": len(lengths),
            "num_tokens": int(lengths.sum(dtype=np.int64)),
            "num_empty": num_empty,
            "fingerprint": fingerprint_of(lengths),
        }
        Path(path).write_text(json.dumps(fields, indent=1) + "\n")


def read_provenance(files: IndexedFiles) -> Provenance | None:
    """The stored provenance of token files; None without one.

    Raises:
        ValueError: if it is damaged, or describes other files than these.
    """
    prefix = files.prefix
    path = Path(prefix + ENDING)
    if not path.is_file():
        return None
    remedy = f"preprocess again, or delete it if another tool made {prefix}.bin"
    try:
        fields = read_object(path, remedy)
        # Further fields are ignored: a later version may add some.
        provenance = Provenance(**{name: fields[name] for name in Provenance.__slots__})
        described = fields["fingerprint"]
    except (ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is damaged ({reason}); {remedy}") from error
    if described != fingerprint_of(files.lengths):  # a .bin and .idx were copied over without it
        raise ValueError(f"{path} describes other documents than {prefix}.idx holds: {remedy}")
    return provenance


def check_provenance(all_files: Sequence[IndexedFiles], tokenizer: MegatronTokenizerBase) -> None:
    """Check that ``tokenizer`` made all token files that have a provenance.

    Files of other tools, such as Megatron's, have none; one log line counts them.

    Raises:
        ValueError: for the first files that another tokenizer made, even one of the same size.
    """
    unknown = []
    # By hash, not by path or name: a copy of the tokenizer elsewhere gives the same ids.
    for files in all_files:
        made_by = read_provenance(files)
        if made_by is None:
            unknown.append(files.prefix)
        elif made_by.tokenizer_hash != tokenizer_hash(tokenizer):
            raise ValueError(
                f"--data-path {files.prefix} was made with another tokenizer, "
                f"{made_by.tokenizer_type} {made_by.tokenizer_model or ''} "
                f"({made_by.vocab_size} tokens, end of document "
                f"{made_by.eod}); this run's has {tokenizer.vocab_size}, end of document "
                f"{tokenizer.eod}, or other ids for the same text. Give --tokenizer-type and "
                f"--tokenizer-model of that one, or preprocess again (see {files.prefix}{ENDING})"
            )
    if unknown:
        log_single_rank(
            logger,
            logging.WARNING,
            f"{first_few(unknown, 1)}: no {ENDING} names the tokenizer of these token files; "
            "whether it is this run's is not checked",
        )
