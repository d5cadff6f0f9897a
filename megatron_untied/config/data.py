"""Configuration of the tokenizer and the dataset; fields are named as Megatron's flags."""

from dataclasses import dataclass
from typing import Literal, get_args

TokenizerType = Literal["SentencePieceTokenizer", "HuggingFaceTokenizer", "NullTokenizer"]
TOKENIZER_TYPES: tuple[str, ...] = get_args(TokenizerType)

DocumentBoundaries = Literal["idx", "eod"]
DOCUMENT_BOUNDARIES: tuple[str, ...] = get_args(DocumentBoundaries)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """The tokenizer, the token files, and how samples are built from them."""

    tokenizer_type: TokenizerType
    tokenizer_model: str | None = None
    """SentencePiece: the .model file. Hugging Face: a local folder."""
    vocab_size: int | None = None
    """Required number of tokens of the tokenizer; None accepts any. NullTokenizer needs it and adds
    one token, the end of document."""
    data_path: tuple[str, ...] = ()
    """One prefix, several prefixes, or weight prefix weight prefix ...; see :mod:`.blend`."""
    split: str = "969,30,1"
    """Proportions of documents for training, validation and test, in file order."""
    data_cache_path: str | None = None
    """Folder for sample indices, local to each node or shared; None is PREFIX/cache."""
    mock_data: bool = False
    """Train on a fixed synthetic dataset instead of ``data_path``."""
    num_workers: int = 2
    """Data workers per rank; 0 reads in the training process. Each worker holds two micro-batches
    in shared memory, 28 bytes per token."""
    reset_position_ids: bool = False
    """Restart positions at 0 at every document."""
    document_boundaries: DocumentBoundaries = "idx"
    """Documents of the .idx file, or those between end-of-document tokens."""
    eod_mask_loss: bool = False
    """No loss where the input is the end-of-document token, as it predicts nothing."""
    dataloader_inter_document_masking: bool = False
    """Restrict attention to tokens of the same document."""

    def __post_init__(self) -> None:
        # Here and not in validate.py: other tools build a DataConfig without a whole run.
        if self.mock_data == bool(self.data_path):
            raise ValueError(
                "give either --data-path or --mock-data, "
                + ("not both" if self.mock_data else "neither was given")
            )
        if self.num_workers < 0:
            raise ValueError(f"--num-workers {self.num_workers} is negative; use 0 for no workers")
