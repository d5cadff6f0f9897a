"""Turns chats into tokens and marks those that are trained on.

The text is the chat template's, as transformers renders it. Which characters of it the assistant
generates is known from ``{% generation %}`` in the template. Without it :func:`generated_spans`
renders the chat again with a marker character at the end of every message, and locates

- the beginning of a turn: behind the text that the template puts between the message before it and
  the answer when it is asked for a generation prompt;
- its end: behind the first special token that the template writes after the message, as this ends
  generation; without one, the end of what it writes there.

A token is trained on if it has any character of such a span.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from megatron.core.tokenizers import MegatronTokenizerBase
from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from megatron_untied.config.data import LossOn
from megatron_untied.config.problems import in_one_line
from megatron_untied.data.chats import KEY, Chat, parse_chat
from megatron_untied.data.documents import Document
from megatron_untied.data.tokenize_documents import Advance, EncodedDocument
from megatron_untied.data.tokenizers import begin_of_text, tokenizer_hash

Messages = Sequence[dict[str, Any]]
Render = Callable[[Messages, bool], str]
"""(messages, whether to add a generation prompt) -> their text."""
Span = tuple[int, int]
"""Characters of a text, from and up to."""

_SHOWN_CHARACTERS = 600
_MARKERS = (0xF0000, 0x100000)
"""First characters of the two planes for private use: no text should have any of one of them."""


class ChatEncoder:
    """Encodes chats: ``tokens`` int32 [n], and ``trained`` bool [n], the tokens with a loss.

    The ids are those of transformers' ``apply_chat_template``. A prompt and completion that are
    texts are encoded one by one, as for generation, between the tokenizer's beginning of text, if
    it adds one to every text, and its end of text. ``trained`` is by ``loss_on`` the completions,
    the prompts or all; completions of a chat are the assistant's turns.
    """

    def __init__(self, tokenizer: MegatronTokenizerBase, *, loss_on: LossOn):
        library = tokenizer._tokenizer.tokenizer
        if not library.is_fast:
            raise ValueError(
                "--sft needs a tokenizer with a tokenizer.json, for the places of its tokens in a "
                "text; save the folder again with a fast tokenizer"
            )
        self._library, self._loss_on = library, loss_on
        self._backend = Tokenizer.from_str(library.backend_tokenizer.to_str())
        self._backend.post_processor = None  # it may trim offsets
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = False
        special = (str(x) for x in library.added_tokens_decoder.values() if x.special)
        self._special_token = re.compile(
            "|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)"
        )
        bos = begin_of_text(tokenizer)
        adds_bos = bos is not None and library.encode("")[:1] == [bos]
        self._before = [bos] if adds_bos else []
        self._eod = tokenizer.eod

    def __call__(
        self, document: Document, advance: Advance = lambda num_bytes: None
    ) -> EncodedDocument:
        """Encode one chat of :func:`megatron_untied.data.chats.read_chats`."""
        ids, problem = {}, document.problem
        if not problem:
            try:
                chat = parse_chat(document.texts[KEY])
                encode = self._encode_texts if chat.texts else self._encode_messages
                tokens, trained = encode(chat)
                ids = {"tokens": np.array(tokens, np.int32), "trained": trained}
            except UnicodeEncodeError as error:  # JSON has it, UTF-8 does not
                problem = f"a lone surrogate at character {error.start} of its text"
            except ValueError as error:
                problem = str(error)
        return EncodedDocument(
            place=document.place, ids=ids, num_bytes=document.num_bytes, problem=problem
        )

    def waits_for(self, document: Document) -> bool:
        """Whether encoding needs a warning; never, as chats are short beside corpora."""
        return False

    def _encode_texts(self, chat: Chat) -> tuple[list[int], np.ndarray]:
        prompt, completion = (
            self._backend.encode(text, add_special_tokens=False).ids for text in chat.texts
        )
        prompt = self._before + prompt
        completion = [*completion, self._eod]
        is_completion = np.arange(len(prompt) + len(completion)) >= len(prompt)
        return prompt + completion, self._trained(is_completion)

    def _encode_messages(self, chat: Chat) -> tuple[list[int], np.ndarray]:
        text, spans = self.text_and_spans(chat)
        text.encode("utf-8")
        encoding = self._backend.encode(text, add_special_tokens=False)
        # Tokens of parts of one character have the offsets of all of it: both are non-decreasing.
        starts, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        is_completion = np.zeros(len(starts), bool)
        for start, end in spans:
            first = np.searchsorted(ends, start, side="right")
            is_completion[first : np.searchsorted(starts, end, side="left")] = True
        return encoding.ids, self._trained(is_completion)

    def _trained(self, is_completion: np.ndarray) -> np.ndarray:
        if self._loss_on == "all":
            return np.ones_like(is_completion)
        return is_completion if self._loss_on == "completion" else ~is_completion

    def text_and_spans(self, chat: Chat) -> tuple[str, list[Span]]:
        """The chat as the template writes it, and the characters that are completions.

        Raises:
            ValueError: there is no template, it refuses the chat, or the turns of the assistant
                cannot be found in its text, which the message shows.
        """
        template = self._template(chat)
        kwargs = {**self._library.special_tokens_map, **chat.template_kwargs}

        def rendered(messages: Messages, *, prompt: bool = False, spans: bool = False):
            try:
                texts, found = render_jinja_template(
                    [list(messages)],
                    chat.tools,
                    chat_template=template,
                    return_assistant_tokens_mask=spans,
                    add_generation_prompt=prompt,
                    **kwargs,
                )
            except Exception as error:  # a template is a program of its own
                reason = in_one_line(error) or type(error).__name__
                raise ValueError(f"the chat template refuses the chat: {reason}") from error
            return texts[0], found[0] if spans else []

        assistants = [i for i, x in enumerate(chat.messages) if x["role"] == "assistant"]
        if self._loss_on == "all" or not assistants:
            return rendered(chat.messages)
        num_prompt = sum(i < chat.num_prompt_messages for i in assistants)
        if re.search(r"\{%-?\s*generation\s*-?%\}", template):
            text, spans = rendered(chat.messages, spans=True)
            if len(spans) != len(assistants):
                raise _not_found(
                    text,
                    f"{{% generation %}} marks {len(spans)} of {len(assistants)} assistant turns",
                )
            return text, [tuple(span) for span in spans[num_prompt:]]
        text, _ = rendered(chat.messages)
        turns = assistants[num_prompt:]
        return text, generated_spans(
            chat.messages,
            turns,
            text,
            lambda messages, prompt: rendered(messages, prompt=prompt)[0],
            self._special_token,
        )

    def _template(self, chat: Chat) -> str:
        try:
            return self._library.get_chat_template(tools=chat.tools)
        except ValueError as error:
            raise ValueError(
                "the tokenizer has no chat template for the chat: put chat_template.jinja into the "
                "folder of --tokenizer-model, or give prompt and completion as texts"
            ) from error


def encoder_hash(tokenizer: MegatronTokenizerBase) -> str:
    """A digest of the tokenizer with its chat template: with the same, a chat has the same ids."""
    library = tokenizer._tokenizer.tokenizer
    template, special = library.chat_template, sorted(library.special_tokens_map.items())
    content = json.dumps([tokenizer_hash(tokenizer), template, special], default=str)
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def generated_spans(
    messages: Messages, turns: Sequence[int], text: str, render: Render, special_token: re.Pattern
) -> list[Span]:
    """The characters of ``text`` that the assistant generates in ``turns``, in their order.

    ``text`` is ``render(messages, False)``. Time is linear in the messages, but for a template that
    looks further back than :meth:`_MarkedChat.windows`: there it is quadratic.

    Raises:
        ValueError: a turn is not where the template itself would continue.
    """
    chat = _MarkedChat.of(messages, text, render)
    if 0 in turns:
        raise _not_found(text, "no message comes before the assistant's first turn")
    found = chat.places_in_windows(turns) or [
        chat.places(turn, chat.marked[: turn + 1]) for turn in turns
    ]
    spans = []
    for turn, (start, end) in zip(turns, found, strict=True):
        stop = special_token.search(text, chat.ends[chat.markers[turn]], end)
        spans.append((start, stop.end() if stop else end))
    return spans


@dataclass(frozen=True, kw_only=True, slots=True)
class _MarkedChat:
    """A chat with another character for private use at the end of each message."""

    messages: Messages
    text: str
    """As the template writes ``messages``."""
    render: Render
    markers: list[str]
    marked: Messages
    """``messages`` with ``markers``."""
    ends: dict[str, int]
    """Where messages end in ``text``, by marker; templates may leave some out."""

    @classmethod
    def of(cls, messages: Messages, text: str, render: Render) -> "_MarkedChat":
        """Mark all messages, render them once, and look for the markers."""
        base = next((x for x in _MARKERS if not re.search(_range(x, len(messages)), text)), None)
        if base is None:
            raise _not_found(text, "it has characters for private use in both of Unicode's planes")
        markers = [chr(base + i) for i in range(len(messages))]
        marked = [_with_marker(*pair) for pair in zip(messages, markers, strict=True)]
        pieces = re.split(f"({_range(base, len(messages))})", render(marked, False))
        if "".join(pieces[::2]) != text or len(set(pieces[1::2])) != len(pieces) // 2:
            raise _not_found(text, "what it writes depends on the content of messages")
        ends, length = {}, 0
        for piece, marker in zip(pieces[::2], [*pieces[1::2], ""], strict=True):
            length += len(piece)
            ends[marker] = length
        return cls(
            messages=messages, text=text, render=render, markers=markers, marked=marked, ends=ends
        )

    def places(self, turn: int, shown: Messages) -> tuple[int, int]:
        """Where ``turn`` starts in the text, and the end of what the template writes with it.

        ``shown`` are the messages up to and with the turn, or some of them.
        """
        found = []
        for last, before, prompt in ((turn - 1, shown[:-1], True), (turn, shown, False)):
            _, is_there, follows = self.render(before, prompt).partition(self.markers[last])
            end = self.ends.get(self.markers[last])
            if not is_there or end is None or not self.text.startswith(follows, end):
                raise _not_found(
                    self.text, "an earlier turn reads otherwise when a later one follows"
                )
            found.append(end + len(follows))
        return found[0], found[1]

    def places_in_windows(self, turns: Sequence[int]) -> list[tuple[int, int]] | None:
        """:meth:`places` of all turns by :meth:`windows`; None for a template that looks further.

        All messages before a turn are rendered too, to compare, where their number has doubled and
        where the roles in a window are new: a few times as many as there are.
        """
        windows, known, checked, found = dict(self.windows()), set(), 0, []
        for turn in turns:
            window = windows[turn]
            try:
                found.append(self.places(turn, window))
            except ValueError:  # it refuses a part of a chat, and perhaps not the chat
                return None
            roles = tuple(role for role, _ in groupby(x["role"] for x in window))
            if roles not in known or turn >= 2 * checked or turn == turns[-1]:
                known.add(roles)
                checked = turn
                if found[-1] != self.places(turn, self.marked[: turn + 1]):
                    return None
        return found

    def windows(self) -> Iterator[tuple[int, Messages]]:
        """Each turn of the assistant, behind messages that decide what templates write around it.

        These are the system's at the beginning, the user's before the turn, and what comes between,
        of earlier turns the last one alone. What many windows show has no content but its marker:
        all windows together are linear in the messages.
        """
        system, last_user, user, recent = [], [], [], []
        for index, message in enumerate(self.marked):
            role = message["role"]
            if role == "assistant":
                yield index, [*system, *user, *recent, message]
                user, recent = last_user, [message]
            elif role == "user":
                last_user = [_without_content(self.messages[index], self.markers[index])]
                if not recent or recent[-1]["role"] != "user":
                    user, recent = [], []
                recent.append(message)
            elif index == len(system) and role in ("system", "developer"):
                system.append(_without_content(self.messages[index], self.markers[index]))
            else:
                recent.append(message)


def _without_content(message: dict[str, Any], marker: str) -> dict[str, Any]:
    content = [] if isinstance(message["content"], list) else ""
    return _with_marker({**message, "content": content}, marker)


def _range(base: int, count: int) -> str:
    return f"[{chr(base)}-{chr(base + count - 1)}]"


def _with_marker(message: dict[str, Any], marker: str) -> dict[str, Any]:
    """The message with ``marker`` at its end.

    That is in the name of its last tool call, or in its content before trailing white space, which
    templates may trim.
    """
    if message.get("tool_calls"):
        *others, call = message["tool_calls"]
        function = call.get("function", call)
        named = {**function, "name": f"{function.get('name', '')}{marker}"}
        call = {**call, "function": named} if "function" in call else named
        return {**message, "tool_calls": [*others, call]}
    content = message["content"]
    if isinstance(content, list):  # parts of text, and perhaps of other kinds
        last = content[-1] if content else {}
        part = {"type": "text", **last, "text": _marked(last.get("text", ""), marker)}
        return {**message, "content": [*content[:-1], part]}
    return {**message, "content": _marked(content, marker)}


def _marked(text: str, marker: str) -> str:
    kept = text.rstrip()
    return kept + marker + text[len(kept) :]


def _not_found(text: str, reason: str) -> ValueError:
    shown = repr(text[:_SHOWN_CHARACTERS]) + ("..." if len(text) > _SHOWN_CHARACTERS else "")
    return ValueError(
        f"the turns of the assistant cannot be found in the chat template's text: {reason}. Put "
        "{% generation %} and {% endgeneration %} around them in the template, or give "
        f"--loss-on all. The text: {shown}"
    )
