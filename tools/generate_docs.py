"""Write the generated parts of the documentation: the flags reference and the table of settings.

    python tools/generate_docs.py            # write docs/flags.md and the table in docs/choosing_settings.md
    python tools/generate_docs.py --check    # exit 1 if either is out of date
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from megatron_untied.training.flags import FLAGS, NOT_YET, Flag

DOCS = Path(__file__).resolve().parent.parent / "docs"
FLAGS_HEADER = """# Flags

Generated from the parser by `tools/generate_docs.py`.

Flags are spelled as in Megatron-LM where Megatron-LM has them. A flag that is unknown, or whose feature is missing, is
an error, never ignored. Those of this project alone are marked with *.
"""
OWN = {
    "--model",
    "--cp-heads-per-chunk",
    "--no-cp-overlap",
    "--sequence-tile-size",
    "--loss-chunk-size",
    "--park-during-attention",
    "--heartbeat-seconds",
    "--metrics-jsonl",
}


def flags_page() -> str:
    """All flags by group, with defaults and meaning, and those that are refused."""
    lines = [FLAGS_HEADER]
    for group, flags in FLAGS.items():
        lines += [f"## {group.capitalize()}", "", "| flag | default | meaning |", "|---|---|---|"]
        lines += [_row(name, options) for name, options in flags]
        lines.append("")
    lines += ["## Refused", "", "| flag | reason |", "|---|---|"]
    lines += [f"| `{name}` | {reason} |" for name, reason in NOT_YET.items()]
    return "\n".join(lines) + "\n"


def _row(name: str, options: dict[str, Any]) -> str:
    default = options.get("default")
    is_switch = options.get("action") in ("store_true", "store_false")
    shown = "" if is_switch or default in (None, ()) else f"`{default}`"
    meaning = options.get("help", "")
    if "choices" in options:
        meaning += f"{'; ' * bool(meaning)}one of {', '.join(f'`{x}`' for x in options['choices'])}"
    value = "" if is_switch else f" {_value_name(name, options)}"
    cells = f"`{name}{value}`{'*' * (name in OWN)}", shown, meaning.replace("|", "\\|")
    return f"| {' | '.join(cells)} |"


def _value_name(name: str, options: dict[str, Any]) -> str:
    metavar = options.get("metavar") or name.rsplit("-", 1)[-1].upper()
    return metavar if isinstance(metavar, str) else " ".join(metavar)


PAGES = {"flags.md": flags_page}


def main() -> None:
    """Write the pages, or compare them with what is committed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if out of date")
    check = parser.parse_args().check
    for name, make in PAGES.items():
        file, text = DOCS / name, make()
        if not check:
            file.write_text(text)
        elif not file.exists() or file.read_text() != text:
            sys.exit(f"{file} is out of date; run python tools/generate_docs.py")


if __name__ == "__main__":
    main()
