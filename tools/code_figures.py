"""Print how the code is cut: functions per thousand lines, their length, comments, parameters.

    python tools/code_figures.py
    python tools/code_figures.py --path megatron_untied/context_parallel

The figures are those of CONTRIBUTING.md, which a test compares with the goals stated there.
"""

import argparse
import ast
import statistics
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHORTEST_FILE = 5  # lines; a shorter file holds no code worth counting
TINY_BODY = 3  # lines

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What is counted over some files."""

    files: int
    lines: int
    functions_per_1000_lines: float
    tiny_bodies: float
    """Share of functions whose body, docstring included, has at most ``TINY_BODY`` lines."""
    comment_lines: float
    """Share of lines that hold a comment."""
    median_function_lines: float
    longest_function_lines: int
    """Lines of code of the longest function: no docstring, no blank lines, no comments."""
    longest_function: str
    most_parameters: int
    most_parameters_function: str


def figures_of(paths: list[Path]) -> Figures:
    """Figures over the Python files under ``paths``."""
    files = [file for file in _python_files(paths) if len(_lines(file)) >= SHORTEST_FILE]
    lines = sum(len(_lines(file)) for file in files)
    functions = [(f"{_short(file)}:{f.name}", f, file) for file in files for f in _functions(file)]
    bodies = [n for _, f, _ in functions if (n := _body_lines(f)) is not None]
    code = [(_code_lines(f, file), name) for name, f, file in functions]
    parameters = [(_num_parameters(f), name) for name, f, _ in functions]
    longest, longest_name = max(code)
    most, most_name = max(parameters)
    return Figures(
        files=len(files),
        lines=lines,
        functions_per_1000_lines=1000 * len(functions) / lines,
        tiny_bodies=sum(n <= TINY_BODY for n in bodies) / len(bodies),
        comment_lines=sum(len(_comment_lines(file)) for file in files) / lines,
        median_function_lines=statistics.median(
            f.end_lineno - f.lineno + 1 for _, f, _ in functions
        ),
        longest_function_lines=longest,
        longest_function=longest_name,
        most_parameters=most,
        most_parameters_function=most_name,
    )


def _python_files(paths: list[Path]) -> Iterator[Path]:
    for path in paths:
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path]


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines()


def _short(file: Path) -> str:
    return str(file.relative_to(ROOT)) if file.is_relative_to(ROOT) else str(file)


def _functions(file: Path) -> list[Function]:
    return [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, Function)]


def _body_lines(function: Function) -> int | None:
    """Lines of the body with its docstring; None of a declaration that has nothing else."""
    body = function.body
    if len(body) == 1 and ast.get_docstring(function):
        return None
    return body[-1].end_lineno - body[0].lineno + 1


def _code_lines(function: Function, file: Path) -> int:
    lines, comments = _lines(file), _comment_lines(file, alone=True)
    first = function.lineno
    docstring = function.body[0] if ast.get_docstring(function) else None
    skipped = set(range(docstring.lineno, docstring.end_lineno + 1)) if docstring else set()
    return sum(
        1
        for number in range(first, function.end_lineno + 1)
        if lines[number - 1].strip() and number not in skipped and number not in comments
    )


def _comment_lines(file: Path, *, alone: bool = False) -> set[int]:
    """Numbers of the lines with a comment; ``alone``: with nothing but a comment."""
    with tokenize.open(file) as stream:
        comments = [
            t for t in tokenize.generate_tokens(stream.readline) if t.type == tokenize.COMMENT
        ]
    return {t.start[0] for t in comments if not alone or t.line.lstrip().startswith("#")}


def _num_parameters(function: Function) -> int:
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls", "ctx")])


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--path", type=Path, nargs="*", help="files or folders (default: the package)"
    )
    arguments = parser.parse_args()
    paths = arguments.path or [ROOT / "megatron_untied", ROOT / "pretrain_gpt.py"]
    f = figures_of([path.resolve() for path in paths])
    print(f"files                       {f.files:8d}")
    print(f"lines                       {f.lines:8d}")
    print(f"functions per 1000 lines    {f.functions_per_1000_lines:8.1f}")
    print(f"bodies of {TINY_BODY} lines or fewer   {f.tiny_bodies:8.1%}")
    print(f"lines with a comment        {f.comment_lines:8.1%}")
    print(f"median lines of a function  {f.median_function_lines:8.0f}")
    print(f"longest function            {f.longest_function_lines:8d}  {f.longest_function}")
    print(f"most parameters             {f.most_parameters:8d}  {f.most_parameters_function}")


if __name__ == "__main__":
    main()
