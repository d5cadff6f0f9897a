"""Write the sources of Python's standard library as a corpus: JSON lines, one document a file.

    python tools/build_corpus.py --output data/corpus.jsonl

Real text that every machine has. Tests, IDLE, installed packages and generated files are left out,
and so is what is not UTF-8. The order is a fixed shuffle (by a hash of the path), so that any
contiguous part, such as the validation share of --split, is a sample of the whole.
"""

import argparse
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

EXCLUDED_FOLDERS = frozenset(
    ("test", "tests", "idle_test", "idlelib", "site-packages", "dist-packages", "__pycache__")
)
EXCLUDED_PREFIXES = ("config-", "_sysconfigdata")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the tool."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="the .jsonl file to write")
    try:
        write_corpus(parser.parse_args(arguments).output)
    except OSError as error:
        parser.exit(2, f"build_corpus: --output: {error}\n")


def write_corpus(output: Path) -> None:
    """Write the sources to ``output``, which has its name once it is complete.

    Raises:
        OSError: if it cannot be written.
    """
    if output.is_dir():
        raise IsADirectoryError(f"{output} is a folder; give the file to write")
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(output.name + ".partial")
    num_documents = num_characters = 0
    with partial.open("w", encoding="utf-8") as file:
        for path, text in source_files(Path(sysconfig.get_path("stdlib"))):
            file.write(json.dumps({"path": path, "text": text}, ensure_ascii=False) + "\n")
            num_documents += 1
            num_characters += len(text)
    os.replace(partial, output)
    print(f"{output}: {num_documents:,} documents, {num_characters:,} characters")


def source_files(root: Path) -> Iterator[tuple[str, str]]:
    """(path below ``root``, text) of each Python source to train on, in the fixed order."""
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    kept = (path for path in paths if not any(map(is_excluded, path.parts)))
    for path in sorted(kept, key=lambda path: hashlib.sha256(path.as_posix().encode()).digest()):
        try:
            text = (root / path).read_bytes().decode("utf-8")
        except UnicodeDecodeError:  # a few sources show other encodings on purpose
            continue
        if text.strip():
            yield path.as_posix(), text


def is_excluded(part: str) -> bool:
    """Whether a folder or file of this name is left out."""
    return part in EXCLUDED_FOLDERS or part.startswith(EXCLUDED_PREFIXES)


if __name__ == "__main__":
    main()
