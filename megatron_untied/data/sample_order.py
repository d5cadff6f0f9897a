"""What training samples and their order depend on, as a checkpoint keeps it."""

from typing import Any

from megatron_untied.checkpoint.provenance import Samples
from megatron_untied.data.blend import check_split, parse_blend
from megatron_untied.data.config import DataConfig
from megatron_untied.data.indexed_files import open_indexed_files


def describe_samples(data: DataConfig, *, seq_length: int, seed: int) -> Samples:
    """The training samples of a run, to be compared with those of another.

    Token files are known by their documents, not by their paths, so they may be moved.

    Raises:
        FileNotFoundError: token files are missing.
        ValueError: they are damaged, or ``--data-path`` or ``--split`` cannot be.
    """
    order: dict[str, Any] = {"--seed": seed, "--seq-length": seq_length}
    if data.mock_data:
        order["--mock-data"] = True
    else:
        check_split(data.split)
        shares = [float(share) for share in data.split.split(",")]
        order["--data-path"] = _describe_files(data.data_path)
        order["--split"] = f"{shares[0] / sum(shares):.6g} of the documents"
    content = {
        "--tokenizer-type": data.tokenizer_type,
        "--reset-position-ids": data.reset_position_ids,
        "--document-boundaries": data.document_boundaries,
        "--eod-mask-loss": data.eod_mask_loss,
        "--dataloader-inter-document-masking": data.dataloader_inter_document_masking,
    }
    return Samples(order=order, content=content)


def _describe_files(data_path: tuple[str, ...]) -> str:
    blend = parse_blend(data_path)
    described = []
    for index, prefix in enumerate(blend.prefixes):
        files = open_indexed_files(prefix)
        share = blend.weights and f"{blend.weights[index] / sum(blend.weights):.6g} x "
        described.append(
            f"{share or ''}{len(files.lengths):,} documents, {len(files.tokens):,} tokens "
            f"[{files.fingerprint()[:8]}]"
        )
    return "; ".join(described)
