"""Where a run's tokens come from; fields are named as Megatron's flags."""

from dataclasses import dataclass
from typing import Literal, get_args

TokenizerType = Literal["SentencePieceTokenizer", "HuggingFaceTokenizer", "NullTokenizer"]
TOKENIZER_TYPES: tuple[str, ...] = get_args(TokenizerType)

DocumentBoundaries = Literal["idx", "eod"]
DOCUMENT_BOUNDARIES: tuple[str, ...] = get_args(DocumentBoundaries)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """The tokenizer, the token files and how samples are made of them."""

    tokenizer_type: TokenizerType
    tokenizer_model: str | None = None
    """SentencePiece: the .model file. Hugging Face: a local folder."""
    vocab_size: int | None = None
    """Tokens the tokenizer must have; None takes what it has. NullTokenizer needs it and adds one
    token of its own, the end of document."""
    data_path: tuple[str, ...] = ()
    """One prefix, several prefixes, or weight prefix weight prefix ...; see :mod:`.blend`."""
    split: str = "969,30,1"
    """Shares of the documents for training, validation and test, in file order."""
    data_cache_path: str | None = None
    """Folder for sample indices, of each node or shared; None is PREFIX/cache beside the data."""
    mock_data: bool = False
    """Train on a fixed synthetic dataset instead of ``data_path``."""
    num_workers: int = 2
    """Processes a rank that read samples ahead; 0 reads in the training process. Each holds two
    micro-batches ready in shared memory, 28 bytes a token."""
    reset_position_ids: bool = False
    """Positions start again at 0 with every document."""
    document_boundaries: DocumentBoundaries = "idx"
    """Where documents begin: those of the .idx file, or after every end-of-document token."""
    eod_mask_loss: bool = False
    """No loss where the input token is the end of document: nothing there tells what comes next."""
    dataloader_inter_document_masking: bool = False
    """Tokens attend only to tokens of their own document."""

    def __post_init__(self) -> None:
        if self.mock_data == bool(self.data_path):
            raise ValueError(
                "give either --data-path or --mock-data, "
                + ("not both" if self.mock_data else "there is neither")
            )
        if self.num_workers < 0:
            raise ValueError(f"--num-workers {self.num_workers} is negative; 0 reads in-process")
