"""The programs: each module is one, and is started in two ways.

An installed package has them as commands, ``megatron-untied-plan`` and so on (the list is in
pyproject.toml). In a checkout, short scripts under ``tools/`` and ``benchmarks/`` start the same
``main``.
"""

import argparse
import re
import sys
from pathlib import Path


def documentation(text: str) -> str:
    """The text for ``--help``, with examples that name the program as it was called.

    Args:
        text: a module's docstring, whose examples start with ``python tools/NAME.py``.
    """
    program = Path(sys.argv[0]).name
    if not program.startswith("megatron-untied-"):  # a script, which the examples name
        return text
    return re.sub(r"python (tools|benchmarks)/\w+\.py", program, text)


def parser_beside_training(text: str, own_flags: str) -> argparse.ArgumentParser:
    """A parser of a program's own flags, which leaves those of training to their own parser.

    Args:
        text: the program's docstring.
        own_flags: those that must be given, for the usage line.
    """
    return argparse.ArgumentParser(
        description=documentation(text),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=f"%(prog)s {own_flags} [these] FLAGS OF TRAINING",
        epilog="Flags of training: python pretrain_gpt.py --help",
        allow_abbrev=False,  # training flags must reach their own parser whole
    )
