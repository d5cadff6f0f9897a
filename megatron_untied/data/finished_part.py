"""What a run of ``tools/preprocess_data.py`` had done when it ended early, for ``--resume``.

The tokens of all documents up to some place are complete token files,
``PREFIX_KEY_document.incomplete``; ``PREFIX.incomplete.json`` says up to where, and of what input.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_untied.data.documents import Place, records_digest
from megatron_untied.data.indexed_writer import IndexedWriter
from megatron_untied.data.provenance import ENDING, Provenance

INCOMPLETE = ".incomplete"


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedPart:
    """State of the run, without its tokens."""

    made_by: dict[str, Any]
    """The provenance, without the tokenizer's path."""
    last: Place
    """The last document that was written or left out."""
    num_empty: dict[str, int]
    """By JSON key, as the token files are; of a key that has no token yet there are none."""
    files_before: list[list]
    """Path and bytes of the files that come before that of ``last``."""
    digest: str
    """Of the records of that file up to ``last``."""


def state_path(output_prefix: str) -> Path:
    """Where the state is stored; that there is one means that the part is complete."""
    return Path(f"{output_prefix}{INCOMPLETE}.json")


def save_finished_part(
    output_prefix: str,
    writers: Mapping[str, IndexedWriter],
    files: Sequence[Path],
    last: Place,
    provenance: Provenance,
) -> None:
    """Publish what ``writers`` by JSON key hold, and the state, in place of an earlier part."""
    part = FinishedPart(
        made_by=_settings(provenance),
        last=last,
        num_empty={key: writer.num_empty for key, writer in writers.items()},
        files_before=_sizes(files[: last.file_index]),
        digest=records_digest(files[last.file_index], list(writers), last.number),
    )
    filled = [writer for writer in writers.values() if writer.num_documents]
    for writer in filled:
        writer.finish()
    remove_finished_part(output_prefix, writers)
    for writer in filled:
        writer.publish(writer.prefix + INCOMPLETE)
    partial = state_path(output_prefix).with_suffix(".partial")
    partial.write_text(json.dumps(asdict(part), indent=1) + "\n")
    partial.replace(state_path(output_prefix))


def load_finished_part(
    output_prefix: str,
    writers: Mapping[str, IndexedWriter],
    files: Sequence[Path],
    provenance: Provenance,
) -> Place:
    """Put the tokens of the part into ``writers`` and return the place after which to go on.

    Raises:
        ValueError: there is no part, or flags or input up to that place are not those it had.
    """
    path = state_path(output_prefix)
    if not path.is_file():
        raise ValueError(f"--resume: there is no {path}; leave the flag out to begin anew")
    fields = json.loads(path.read_text())
    part = FinishedPart(**{**fields, "last": Place(**fields["last"])})
    remedy = f"; give the same, or leave --resume out to begin anew ({path})"
    if part.made_by != _settings(provenance) or list(part.num_empty) != list(writers):
        raise ValueError(f"--resume: tokenizer, its flags or --json-keys are others{remedy}")
    index = part.last.file_index
    same_files = _sizes(files[:index]) == part.files_before and index < len(files)
    if not same_files or str(files[index]) != part.last.file:
        raise ValueError(f"--resume: files of --input before {part.last} are others{remedy}")
    if records_digest(files[index], list(writers), part.last.number) != part.digest:
        raise ValueError(f"--resume: {part.last.file} changed before {part.last}{remedy}")
    for key, writer in writers.items():
        writer.num_empty = part.num_empty[key]
        if Path(f"{writer.prefix}{INCOMPLETE}.idx").is_file():
            writer.add_files(writer.prefix + INCOMPLETE)
    return part.last


def remove_finished_part(output_prefix: str, writers: Mapping[str, IndexedWriter]) -> None:
    """Remove the state, then the token files; after a run that wrote all, they are superseded."""
    state_path(output_prefix).unlink(missing_ok=True)
    for writer in writers.values():
        for ending in (".idx", ".bin", ENDING):
            Path(writer.prefix + INCOMPLETE + ending).unlink(missing_ok=True)


def _settings(provenance: Provenance) -> dict[str, Any]:
    return {k: v for k, v in asdict(provenance).items() if k != "tokenizer_model"}


def _sizes(files: Sequence[Path]) -> list[list]:
    return [[str(file), file.stat().st_size] for file in files]
