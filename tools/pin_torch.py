"""Print pip constraints that hold torch, and all that was built against it, as the base has them.

    python tools/pin_torch.py requirements.txt > constraints.txt

The base image's torch belongs to its CUDA and NCCL, and transformer-engine, apex and flash-attn to
its torch; another from an index would break them all. So a base without torch, or with one that
the requirements were not checked for, is refused.
"""

import argparse
import re
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path

DEFAULT_BASE = "the Dockerfile's default BASE_IMAGE has it"


def main(argv: list[str]) -> None:
    """Constraints of this Python for the requirements file in ``argv``, or one line of error."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("requirements", type=Path, help="a file with a line torch==VERSION")
    file = parser.parse_args(argv).requirements
    try:
        pin = re.search(r"^torch==(.+)$", file.read_text(), re.M)
        if pin is None:
            raise ValueError(f"{file} has no line torch==VERSION; give requirements.txt")
        pinned = pin[1]
        lines = constraints(distributions(), pinned)
        print("\n".join(lines))
        if snapshot := next((line for line in lines if re.match(r"torch==[\d.]+a\d", line)), None):
            print(
                f"note: {snapshot} is a snapshot from before the release; the tests that end the "
                "build show whether it has what is needed",
                file=sys.stderr,
            )
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


def constraints(installed: list[Distribution], pinned: str) -> list[str]:
    """``name==version`` of torch and of every package that requires it.

    Raises:
        ValueError: if torch is missing, or its first two numbers are not those of ``pinned``.
    """
    versions = {_name(one): one.version for one in installed if "torch" in _needs(one)}
    torch = versions.get("torch")
    wanted = ".".join(pinned.split(".")[:2])
    if torch is None:
        raise ValueError(
            f"the base image has no torch, which this image does not install; choose a base with "
            f"torch {wanted}: {DEFAULT_BASE}"
        )
    if torch.split(".")[:2] != wanted.split("."):
        raise ValueError(
            f"the base image has torch {torch}, and requirements.txt was checked with {wanted}; "
            f"choose a base with torch {wanted}: {DEFAULT_BASE}"
        )
    return [f"{name}=={version}" for name, version in sorted(versions.items())]


def _needs(package: Distribution) -> set[str]:
    """The package and those it requires without being asked for an extra, by name."""
    required = (r for r in package.requires or () if "extra ==" not in r)
    return {_name(package), *(re.match(r"[\w.-]+", r)[0] for r in required)}


def _name(package: Distribution) -> str:
    return re.sub(r"[-_.]+", "-", package.metadata["Name"]).lower()


if __name__ == "__main__":
    main(sys.argv[1:])
