"""Write the generated pages of the documentation: flags, files, and the table of settings.

    python tools/generate_docs.py            # write docs/{flags,files,choosing_settings}.md
    python tools/generate_docs.py --check    # exit 1 if one of them is out of date

The pages are committed; a test compares them with the code.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from megatron_untied.cli.flags import FLAGS, NOT_YET
from megatron_untied.cli.planner_flags import parse_plan_request
from megatron_untied.planner.plan import Plan
from megatron_untied.planner.search import search
from megatron_untied.platform.device import GIB

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
FLAGS_HEADER = """# Flags

Generated from the parser by `tools/generate_docs.py`.

Flags are spelled as in Megatron-LM where Megatron-LM has them. A flag that is unknown, or whose
feature is missing, is an error, never ignored. Flags of this project alone are marked with *.
"""
OWN = {
    "--model",
    "--cp-heads-per-chunk",
    "--cp-overlap",
    "--no-cp-overlap",
    "--attention-output-layers",
    "--sequence-tile-size",
    "--loss-chunk-size",
    "--park-during-attention",
    "--heartbeat-seconds",
    "--metrics-jsonl",
    "--loss-on",
    "--long-samples",
    "--loss-weighting",
    "--freeze",
    "--lora-rank",
    "--lora-alpha",
    "--lora-targets",
    "--lora-dropout",
    "--save-on-signal-now",
    "--no-exit-on-failed-save",
    "--most-recent-k",
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
    if isinstance(default, tuple):
        default = " ".join(map(str, default))
    shown = "" if is_switch or default in (None, "") else f"`{default}`"
    meaning = options.get("help", "")
    if "choices" in options:
        meaning += f"{'; ' * bool(meaning)}one of {', '.join(f'`{x}`' for x in options['choices'])}"
    value = "" if is_switch else f" {_value_name(name, options)}"
    cells = f"`{name}{value}`{'*' * (name in OWN)}", shown, meaning.replace("|", "\\|")
    return f"| {' | '.join(cells)} |"


def _value_name(name: str, options: dict[str, Any]) -> str:
    metavar = options.get("metavar") or name.rsplit("-", 1)[-1].upper()
    return metavar if isinstance(metavar, str) else " ".join(metavar)


FILES_HEADER = """# Files

Generated from the first lines of the files by `tools/generate_docs.py`.
"""
GROUPS = {
    "The method": ("context_parallel", "context_parallel/kernels", "streaming", "loss"),
    "The model": (".",),
    "The trainer": ("config", "cli", "training", "sharding", "data", "checkpoint"),
    "Conversion and Megatron-LM": ("hf", "megatron_lm"),
    "Planning": ("planner", "tracing", "presets"),
    "Programs": ("commands",),
    "Machines": ("platform",),
}
"""Folders of the package, in the order in which a reader wants them."""


def files_page() -> str:
    """Every module of the package and every script with its purpose."""
    package = ROOT / "megatron_untied"
    lines = [FILES_HEADER]
    for group, folders in GROUPS.items():
        lines += [f"## {group}", ""]
        for folder in folders:
            lines += _table(f"megatron_untied/{folder}".rstrip("/."), package / folder)
    for title, folder in (
        ("Tools", "tools"),
        ("Benchmarks", "benchmarks"),
        ("Report on a GPU", "benchmarks/gpu"),
        ("Examples", "examples"),
        ("Recipes", "examples/recipes"),
    ):
        lines += [f"## {title}", "", *_table(folder, ROOT / folder)]
    return "\n".join(lines)


def _table(name: str, folder: Path) -> Iterator[str]:
    init = folder / "__init__.py"
    yield f"**`{name}/`** {_purpose(init) if init.exists() else ''}".rstrip()
    suffixes = ".py", ".sh", ".sbatch", ".yaml"
    files = [x for x in sorted(folder.iterdir()) if x.suffix in suffixes and x != init]
    yield ""
    if files:
        yield from ("| file | purpose |", "|---|---|")
        yield from (f"| `{file.name}` | {_purpose(file)} |" for file in files)
        yield ""


def _purpose(file: Path) -> str:
    """The first sentence of a module's docstring, or of a script's first comment."""
    text = file.read_text()
    if file.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    else:
        text = re.search(r"^# ?(?!!)(.*?)$(?!\n# ?\S)", text, re.M | re.S)[1].replace("\n# ", " ")
    return text.split("\n\n")[0].split("\n#\n")[0].replace("\n", " ").replace("|", "\\|")


H100_2TIB = "--gpus-per-node 8 --gpu h100-80 --host-memory-gib 2048"
TABLE_ROWS = {
    ("llama3-8b", "8 x H100 80 GB, 2 TiB"): f"{H100_2TIB} --context-parallel-size 8",
    ("llama3-8b", "8 x H100 80 GB, 1 TiB"): (
        "--gpus-per-node 8 --gpu h100-80 --host-memory-gib 1024 --context-parallel-size 8"
    ),
    ("llama3-8b", "8 x A100 40 GB, 1 TiB"): (
        "--gpus-per-node 8 --gpu a100-40 --host-memory-gib 1024 --context-parallel-size 8"
    ),
    ("llama3-8b", "1 x H100 80 GB, 512 GiB"): (
        "--gpus-per-node 1 --gpu h100-80 --host-memory-gib 512"
    ),
    ("qwen3-32b", "8 x H100 80 GB, 2 TiB"): f"{H100_2TIB} --context-parallel-size 8",
    ("qwen3-32b", "2 nodes of 8 x H100 80 GB, 2 TiB"): (
        f"{H100_2TIB} --nodes 2 --context-parallel-size 16 --cp-comm-type a2a+p2p "
        "--hierarchical-context-parallel-sizes 8 2"
    ),
}
"""By model and nodes: flags of the machine and of its ranks."""
LENGTHS = {"128K": 1 << 17, "512K": 1 << 19, "1M": 1 << 20, "2M": 1 << 21, "5M": 5 << 20}
SETTINGS = (
    "--model {model} --bf16 --use-torch-fsdp2 --cp-heads-per-chunk all "
    "--loss-chunk-size 2048 --seq-length {tokens} {machine}"
)
TABLE = re.compile(r"(?<=<!-- table -->\n).*?(?=<!-- end of table -->)", re.S)


def settings_page() -> str:
    """The page on choosing settings with its table made anew; takes a minute."""
    lines = ["", "| model | node | tokens | flags to add | GPU, GiB | host, GiB | step |"]
    lines.append("|---" * 7 + "|")
    for ((model, node), machine), (length, tokens) in product(TABLE_ROWS.items(), LENGTHS.items()):
        flags = SETTINGS.format(model=model, tokens=tokens, machine=machine)
        request = parse_plan_request(flags.split())
        found = search(Plan(request.config, request.machine))
        cells = [f"`{model}`", node, length, "does not fit", "", "", ""]
        if found is not None:
            changes, plan = found
            cells[3] = " ".join(f"`{change}`" for change in changes) or "none"
            cells[4:] = [
                f"{plan.peak.num_bytes / GIB:.1f}",
                f"{plan.host.total() * request.machine.gpus_per_node / GIB:,.0f}",
                f"{plan.time.seconds:,.0f} s",
            ]
        lines.append(f"| {' | '.join(cells)} |")
    table = "\n".join([*lines, "", ""])
    return TABLE.sub(lambda _: table, (DOCS / "choosing_settings.md").read_text())


PAGES = {"flags.md": flags_page, "files.md": files_page}
SLOW_PAGES = {"choosing_settings.md": settings_page}


def main() -> None:
    """Write the pages, or compare them with what is committed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if out of date")
    check = parser.parse_args().check
    for name, make in (PAGES | SLOW_PAGES).items():
        file, text = DOCS / name, make()
        if not check:
            file.write_text(text)
        elif not file.exists() or file.read_text() != text:
            sys.exit(f"{file} is out of date; run python tools/generate_docs.py")


if __name__ == "__main__":
    main()
