"""Give a container the pip settings of this machine, whatever they are.

    mapfile -t volumes < <(python tests/support/pip_settings.py pip.conf)

Writes what ``pip config list`` says, the environment's included, to the file named, and prints the
options of buildah that mount it, and each file or folder that it names, at the same place.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path


def main(argv: list[str]) -> None:
    """Write the file in ``argv`` and print the options, one word a line."""
    listed = subprocess.check_output([sys.executable, "-m", "pip", "config", "list"], text=True)
    values = settings(listed)
    target = Path(argv[0]).resolve()
    target.write_text(configuration(values))
    mounts = [f"{target}:/etc/pip.conf:ro", *(f"{path}:{path}:ro" for path in paths(values))]
    sys.stdout.writelines(f"--volume\n{mount}\n" for mount in mounts)


def settings(listed: str) -> dict[str, list[str]]:
    """Names and values of ``pip config list``; what comes from the environment wins."""
    lines = [line.partition("=") for line in listed.splitlines() if "=" in line]
    lines.sort(key=lambda line: line[0].startswith(":env:"))
    return {name.split(".", 1)[1]: ast.literal_eval(value).split() for name, _, value in lines}


def configuration(values: dict[str, list[str]]) -> str:
    """A pip.conf with these values."""
    lines = [f"{name} = " + "\n    ".join(value) for name, value in values.items()]
    return "\n".join(["[global]", *lines, ""])


def paths(values: dict[str, list[str]]) -> list[str]:
    """Files and folders of this machine that are named, index folders in whole.

    >>> paths({"find-links": ["/srv/wheels"], "index-url": ["file:///srv/pypi/simple"]})
    ['/srv/pypi', '/srv/wheels']
    """
    words = [word for value in values.values() for word in value]
    indices = [re.sub(r"^file://|/simple/?$", "", word) for word in words if "file://" in word]
    return sorted({*indices, *(word for word in words if word.startswith("/"))})


if __name__ == "__main__":
    main(sys.argv[1:])
