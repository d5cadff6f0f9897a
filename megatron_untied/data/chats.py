"""Reads chats from JSON lines, Parquet and Arrow files.

A record has ``messages``, or ``prompt`` and ``completion``, which are both texts or both lists of
messages. It may have ``tools`` and ``chat_template_kwargs``, as in TRL.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron_untied.checkpoint.directory import read_object, require_content
from megatron_untied.config.problems import in_one_line
from megatron_untied.data.documents import Document, Place, find_files
from megatron_untied.data.records import BYTE_ORDER_MARK, JSON_LINES, read_records

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_COMPRESSED = (".gz", ".zst")
_ARROW, _PARQUET = ".arrow", ".parquet"
_ROWS_AT_A_TIME = 256
_BYTES_AT_A_TIME = 1 << 24
KEY = "chat"
"""The key of a chat's JSON in ``Document.texts``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat:
    """One chat: messages for the chat template, or two texts for which none is needed."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    num_prompt_messages: int = 0
    """Messages at the beginning that are not trained on, whatever their role."""
    texts: tuple[str, str] | None = None
    """Prompt and completion, if they are texts."""
    tools: list[Any] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)


def chat_files(data_path: Sequence[str]) -> list[Path]:
    """The files that ``--data-path`` names: files, globs and folders.

    A folder of ``datasets.save_to_disk`` counts as the Arrow files that its ``state.json`` lists.
    Any other folder counts as the JSON lines, Parquet and Arrow files in it.

    Raises:
        FileNotFoundError: a path names nothing.
        ValueError: a file has another format, a folder has none of these files, or a saved
            dataset has several splits.
    """
    files = []
    for name in data_path:
        folder = Path(name)
        if (folder / "dataset_dict.json").is_file():
            saved = read_object(folder / "dataset_dict.json", "save the dataset again")
            splits = (folder / in_one_line(split) for split in saved.get("splits") or ())
            raise ValueError(
                f"--data-path {name} is a saved dataset of several splits; name one of "
                f"{', '.join(map(str, splits))}"
            )
        if (folder / "state.json").is_file():
            found = _saved_files(folder / "state.json")
        else:
            found = find_files([name], flag="--data-path")
        if folder.is_dir():  # beside the data there may be a README or a description in JSON
            found = [x for x in found if _is_data(x) and not x.name.startswith("dataset_info")]
        unread = [file for file in found if not _is_data(file)]
        if unread or not found:
            what = f"{unread[0]} is none" if unread else f"{name} holds none"
            raise ValueError(
                f"--data-path: {what} of JSON lines ({', '.join(JSON_LINES)}, also with "
                f"{' or '.join(_COMPRESSED)}), {_PARQUET} and {_ARROW}, which --sft reads"
            )
        files += found
    for file in files:
        require_content(file)
    return files


def _saved_files(state: Path) -> list[Path]:
    """The Arrow files that the state of a saved dataset lists, all in its folder."""
    listed = read_object(state, "save the dataset again").get("_data_files")
    entries = listed if isinstance(listed, list) else []
    names = [entry.get("filename") for entry in entries if isinstance(entry, dict)]
    # A name may not lead out of the folder.
    are_names = all(isinstance(name, str) and Path(name).name == name for name in names)
    # Without extra entries too: what cannot be read must not be left out in silence.
    files = [state.with_name(name) for name in names] if are_names else []
    if not files or len(files) < len(entries) or not all(map(_is_data, files)):
        raise ValueError(f"{state} lists no Arrow files of its folder; save the dataset again")
    return files


def _is_data(file: Path) -> bool:
    inner = file.with_suffix("") if file.suffix.lower() in _COMPRESSED else file
    return inner.suffix.lower() in JSON_LINES or file.suffix.lower() in (_ARROW, _PARQUET)


def digest_of(files: Sequence[Path]) -> str:
    """A digest of the files' content: copies of them have the same. Reads at 1 GB/s."""
    states = ((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    return hashlib.blake2b("".join(map(_digest, states)).encode(), digest_size=16).hexdigest()


@lru_cache(maxsize=1024)  # a run asks at its start, and again for the datasets
def _digest(state: tuple[str, int, int]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with open(state[0], "rb") as file:
        while block := file.read(_BYTES_AT_A_TIME):
            digest.update(block)
    return digest.hexdigest()


def read_chats(files: Sequence[Path]) -> Iterator[Document]:
    """Every record in order, as JSON under the key ``chat``, for :func:`parse_chat`.

    Raises:
        OSError: a file cannot be read.
    """
    for index, file in enumerate(files):
        suffix = file.suffix.lower()
        rows = _lines(file) if suffix not in (_ARROW, _PARQUET) else _rows(file, suffix)
        for number, text, problem in rows:
            yield Document(
                place=Place(file_index=index, file=str(file), number=number),
                texts={} if problem else {KEY: text},
                num_bytes=len(text),
                problem=problem,
            )


Row = tuple[int, str, str | None]
"""Number, JSON, and the reason why there is none."""


def _lines(file: Path) -> Iterator[Row]:
    for record in read_records(file, ()):
        try:
            text = record.content.removeprefix(BYTE_ORDER_MARK).decode("utf-8")
        except UnicodeDecodeError as error:
            yield record.number, "", f"not UTF-8 (byte {error.start})"
        else:
            yield record.number, text, record.problem


def _rows(file: Path, suffix: str) -> Iterator[Row]:
    import pyarrow  # takes a second to import, and most chats are JSON lines
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.memory_map(str(file)) as source:
            if suffix == _PARQUET:
                parquet = pyarrow.parquet.ParquetFile(source)
                batches = parquet.iter_batches(batch_size=_ROWS_AT_A_TIME)
            else:
                batches = pyarrow.ipc.open_stream(source)  # what datasets.save_to_disk writes
            for batch in batches:
                batch.validate(full=True)  # else offsets beyond a buffer are followed
                for row in batch.to_pylist():
                    number += 1
                    # default: a column of dates or bytes that belongs to no chat.
                    yield number, json.dumps(_without_nulls(row), default=str), None
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        yield number + 1, "", f"the file is damaged or cut short ({in_one_line(error)})"


def _without_nulls(value: Any) -> Any:
    """Columns have the keys of all rows: those that a row does not have are null."""
    if isinstance(value, dict):
        return {key: _without_nulls(x) for key, x in value.items() if x is not None}
    return [_without_nulls(x) for x in value] if isinstance(value, list) else value


def parse_chat(text: str) -> Chat:
    """The chat in one record's JSON.

    Content that is missing or null becomes empty, and arguments of a tool call that are JSON in a
    string become the object that templates expect.

    Raises:
        ValueError: it is no chat, has no messages, or an unknown role.
    """
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a line of JSON ({error}); each line must be one object") from error
    if not isinstance(record, dict):
        raise ValueError(f"not an object but a {type(record).__name__}")
    tools = record.get("tools")
    try:
        tools = json.loads(tools) if isinstance(tools, str) and tools else tools
    except (ValueError, RecursionError) as error:
        raise ValueError(f"tools is a text that is not JSON ({error})") from error
    kwargs = record.get("chat_template_kwargs") or {}
    if tools and not _are_objects(tools):
        raise ValueError("tools is no list of objects")
    if not isinstance(kwargs, dict):
        raise ValueError(f"chat_template_kwargs is not an object but a {type(kwargs).__name__}")
    # Parquet has an empty list where a chat has no tools.
    common = {"tools": tools or None, "template_kwargs": kwargs}
    prompt, completion = record.get("prompt"), record.get("completion")
    if "messages" in record:
        return Chat(messages=_messages(record["messages"], "messages"), **common)
    if isinstance(prompt, str) and isinstance(completion, str):
        return Chat(texts=(prompt, completion))
    if isinstance(prompt, list) and isinstance(completion, list):
        first = _messages(prompt, "prompt")
        return Chat(
            messages=first + _messages(completion, "completion"),
            num_prompt_messages=len(first),
            **common,
        )
    raise ValueError(
        "no chat: it needs messages, or prompt and completion (two texts or two lists of "
        f"messages); found: {in_one_line(', '.join(record)) or 'no key at all'}"
    )


def _messages(value: Any, key: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"no messages: {key} is {'empty' if value == [] else 'no list'}")
    messages = []
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict):
            raise ValueError(f"message {number} is not an object but a {type(message).__name__}")
        role, content = message.get("role"), message.get("content") or ""
        if role not in ROLES:
            hint = "; rename from and value to role and content" if "from" in message else ""
            raise ValueError(
                f"message {number} has the unknown role {role!r}; known are {', '.join(ROLES)}"
                f"{hint}"
            )
        if not isinstance(content, str) and not _are_objects(content):
            raise ValueError(
                f"the content of message {number} is a {type(content).__name__}; it must be a text "
                "or a list of objects"
            )
        calls, message = message.get("tool_calls"), {**message, "content": content}
        if calls and not all(map(_is_call, calls if isinstance(calls, list) else [None])):
            raise ValueError(f"tool_calls of message {number} are no list of calls with names")
        if calls:
            message["tool_calls"] = [_with_object(call) for call in calls]
        else:  # templates ask whether it is defined
            message.pop("tool_calls", None)
        messages.append(message)
    return messages


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(x, dict) for x in value)


def _is_call(call: Any) -> bool:
    function = call.get("function", call) if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name", ""), str)


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call whose arguments are an object, if they were one in a string of JSON."""
    if "function" in call:
        return {**call, "function": _with_object(call["function"])}
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None  # any other text stays what it is
        arguments = parsed if isinstance(parsed, dict) else arguments
    return {**call, "arguments": arguments} if "arguments" in call else call
