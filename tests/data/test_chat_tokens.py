"""Which tokens of a chat are trained on, for templates in the formats of published models."""

import json
import re

import pytest

from megatron_untied.data import chat_tokens
from megatron_untied.data.chat_tokens import ChatEncoder
from megatron_untied.data.chats import parse_chat
from megatron_untied.data.documents import Document, Place
from megatron_untied.data.tokenizers import build_tokenizer
from tests.support.chats import (
    CHATS,
    EOS,
    TEMPLATES,
    TOOL,
    WITH_GENERATION,
    said,
    write_tokenizer,
)

NO_THOUGHT = "<think>\n\n</think>\n\n"
CALL = '{"name": "weather", "arguments": {"city": "Zürich", "days": 2}'
EXPECTED = {
    "llama_3": {
        "turns": ["Hello.", "Good bye"],
        "tools": [CALL.replace("arguments", "parameters") + "}", "It is -3 °C.", "Welcome"],
        "empty": ["", "Say something"],
        "unicode": ["😀 naïve 🇩🇪👍"],
        "thinking": ["<think>\neasy\n</think>\n\n4", "<think>\nalso easy\n</think>\n\n6"],
        "without a turn": [],
    },
    "qwen_3": {  # thoughts of earlier turns are left out, and the last turn has at least empty ones
        "turns": ["Hello.\n", f"{NO_THOUGHT}  Good bye  "],
        "tools": [
            f"<tool_call>\n{CALL}}}\n</tool_call>",
            "It is -3 °C.",
            f"{NO_THOUGHT}Welcome",
        ],
        "empty": ["", f"{NO_THOUGHT}Say something"],
        "unicode": [f"{NO_THOUGHT}😀 naïve 🇩🇪👍"],
        "thinking": ["4", "<think>\nalso easy\n</think>\n\n6"],
        "without a turn": [],
    },
    "mistral": {
        "turns": [" Hello.", " Good bye"],
        "tools": [f'[TOOL_CALLS][{CALL}, "id": "a1b2c3d4e"}}]', " It is -3 °C.", " Welcome"],
        "empty": [" ", " Say something"],
        "unicode": [" 😀 naïve 🇩🇪👍"],
        "thinking": [" <think>\neasy\n</think>\n\n4", " <think>\nalso easy\n</think>\n\n6"],
        "without a turn": [],
    },
}
"""What the assistant generates in each turn, before the token that ends it."""


@pytest.fixture(scope="module")
def tokenizer_of(tmp_path_factory):
    built = {}

    def tokenizer(template, eos="<|im_end|>"):
        if template not in built:
            folder = write_tokenizer(tmp_path_factory.mktemp("tokenizer"), template, eos)
            built[template] = build_tokenizer(
                "HuggingFaceTokenizer", model=folder, parse_special_tokens=True
            )
        return built[template]

    return tokenizer


def encoded(tokenizer, record, loss_on="completion"):
    """Ids, which of them are trained on, and the problem."""
    document = Document(
        place=Place(file_index=0, file="chats.jsonl", number=1),
        texts={"chat": json.dumps(record)},
        num_bytes=1,
    )
    result = ChatEncoder(tokenizer, loss_on=loss_on)(document)
    if result.problem:
        return None, None, result.problem
    return result.ids["tokens"].tolist(), result.ids["trained"].tolist(), None


def trained_texts(tokenizer, ids, trained) -> list[str]:
    """The text of each run of trained tokens."""
    runs, before = [], False
    for id_, is_trained in zip(ids, trained, strict=True):
        if is_trained:
            runs = [*runs[:-1], [*runs[-1], id_]] if before else [*runs, [id_]]
        before = is_trained
    return [tokenizer._tokenizer.tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize("model", TEMPLATES)
def test_the_trained_tokens_are_what_the_assistant_generates(tokenizer_of, model, name):
    tokenizer = tokenizer_of(TEMPLATES[model], EOS[model])
    ids, trained, _ = encoded(tokenizer, CHATS[name])
    chat = parse_chat(json.dumps(CHATS[name]))
    assert ids == tokenizer._tokenizer.tokenizer.apply_chat_template(
        chat.messages, tools=chat.tools, return_dict=False
    )
    expected = [turn + EOS[model] for turn in EXPECTED[model][name]]
    assert trained_texts(tokenizer, ids, trained) == expected


@pytest.mark.parametrize("name", ["turns", "empty", "unicode"])
def test_generation_in_the_template_marks_the_same(tokenizer_of, name):
    """The template without {% generation %} writes the same text, so the spans can be compared."""
    plain = WITH_GENERATION.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    marked, found = (encoded(tokenizer_of(x), CHATS[name]) for x in (WITH_GENERATION, plain))
    assert marked == found
    assert any(marked[1])


def test_loss_on_prompt_is_the_rest_and_on_all_is_everything(tokenizer_of):
    tokenizer = tokenizer_of(TEMPLATES["qwen_3"])
    of = {x: encoded(tokenizer, CHATS["tools"], x) for x in ("completion", "prompt", "all")}
    assert of["completion"][0] == of["prompt"][0] == of["all"][0]
    assert [not x for x in of["completion"][1]] == of["prompt"][1]
    assert all(of["all"][1])


def test_a_prompt_of_messages_is_not_trained_on(tokenizer_of):
    messages = CHATS["turns"]["messages"]
    for template in (TEMPLATES["qwen_3"], WITH_GENERATION):
        tokenizer = tokenizer_of(template)
        ids, trained, _ = encoded(tokenizer, {"prompt": messages[:4], "completion": messages[4:]})
        (text,) = trained_texts(tokenizer, ids, trained)
        assert text.endswith("  Good bye  <|im_end|>")


def test_texts_are_encoded_one_by_one_and_ended(tokenizer_of):
    tokenizer = tokenizer_of(None)  # no template is needed
    ids, trained, _ = encoded(tokenizer, {"prompt": "a b", "completion": " c d"})
    assert trained_texts(tokenizer, ids, trained) == [" c d<|im_end|>"]
    prompt, completion = (tokenizer.tokenize(text) for text in ("a b", " c d"))
    assert ids == [*prompt, *completion, tokenizer.eod]


def test_arguments_in_a_string_of_json_are_the_object(tokenizer_of):
    tokenizer = tokenizer_of(TEMPLATES["llama_3"], EOS["llama_3"])
    user, call, *rest = CHATS["tools"]["messages"]
    (called,) = call["tool_calls"]
    function = called["function"]
    in_string = {**function, "arguments": json.dumps(function["arguments"])}
    other = {**call, "tool_calls": [{**called, "function": in_string}]}
    record = {**CHATS["tools"], "messages": [user, other, *rest]}
    assert encoded(tokenizer, record) == encoded(tokenizer, CHATS["tools"])


def long_chat(num_turns, tools):
    """Turns of several lengths, some with trailing space; with tools, most of them are calls."""
    call, result = CHATS["tools"]["messages"][1:3]
    messages = [said("system", "Be brief."), said("user", "a question " * 30)]
    for turn in range(num_turns):
        if tools and turn % 5 < 4:
            messages += [call, {**result, "content": "x" * turn}]
        else:
            messages += [said("assistant", f"answer {turn}\n"), said("user", "more? " * turn)]
    return {"messages": [*messages, said("assistant", "Done.")]} | (
        {"tools": [TOOL]} if tools else {}
    )


@pytest.fixture
def rendered(monkeypatch):
    """Messages of each rendering."""
    counts, render = [], chat_tokens.render_jinja_template

    def counting(chats, *arguments, **keywords):
        counts.append(len(chats[0]))
        return render(chats, *arguments, **keywords)

    monkeypatch.setattr(chat_tokens, "render_jinja_template", counting)
    return counts


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("model", TEMPLATES)
def test_a_long_chat_is_rendered_a_few_times(tokenizer_of, rendered, monkeypatch, model, tools):
    """With the same spans as by the definition, which renders all messages before every turn."""
    chat, tokenizer = long_chat(40, tools), tokenizer_of(TEMPLATES[model], EOS[model])
    found = encoded(tokenizer, chat)
    assert found[0]
    assert sum(rendered) < 20 * len(chat["messages"])
    rendered.clear()
    monkeypatch.setattr(chat_tokens._MarkedChat, "places_in_windows", lambda self, turns: None)
    assert encoded(tokenizer, chat) == found
    assert sum(rendered) > 40 * len(chat["messages"])


def test_rendering_is_linear_in_the_messages(tokenizer_of, rendered):
    tokenizer, shares = tokenizer_of(TEMPLATES["qwen_3"], EOS["qwen_3"]), []
    for num_turns in (20, 100):
        chat = long_chat(num_turns, tools=True)
        rendered.clear()
        assert encoded(tokenizer, chat)[0]
        shares.append(sum(rendered) / len(chat["messages"]))
    assert shares[1] < 1.1 * shares[0], shares


def test_a_template_that_looks_far_back_is_given_all_messages(tokenizer_of, rendered):
    """It writes a point behind each answer for every question so far."""
    template = (
        "{% set ns = namespace(points='') %}{% for x in messages %}[{{ x.role }}]{{ x.content }}"
        "{% if x.role == 'user' %}{% set ns.points = ns.points + '.' %}{% endif %}"
        "{% if x.role == 'assistant' %}{{ ns.points }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    chat = long_chat(8, tools=False)
    ids, trained, _ = encoded(tokenizer_of(template), chat)
    answers = [f"answer {turn}\n{'.' * (turn + 1)}" for turn in range(8)]
    assert trained_texts(tokenizer_of(template), ids, trained) == [*answers, "Done" + "." * 10]
    assert sum(rendered) > 8 * len(chat["messages"])


def test_a_template_that_continues_otherwise_than_it_asks_is_refused_with_its_text(tokenizer_of):
    """It asks for thoughts, and writes turns without any."""
    template = WITH_GENERATION.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    template = template.replace("assistant\\n' }}{% endif", "assistant\\n<think>\\n' }}{% endif")
    _, _, problem = encoded(tokenizer_of(template), CHATS["turns"])
    assert "turns of the assistant cannot be found in the chat template's text" in problem
    assert r"The text: '<|im_start|>system\nBe brief.<|im_end|>\n" in problem
    assert encoded(tokenizer_of(template), CHATS["turns"], "all")[2] is None


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"text": "a"}, r"no chat: it needs messages, or prompt and completion .*; found: text"),
        ({}, "no chat: .* found: no key at all"),
        ({"messages": []}, "no messages: messages is empty"),
        ({"messages": "hello"}, "no messages: messages is no list"),
        ({"messages": ["hello"]}, "message 1 is not an object but a str"),
        ({"messages": [said("bot", "a")]}, "message 1 has the unknown role 'bot'; known are syst"),
        ({"messages": [{"from": "human", "value": "a"}]}, "role None; .* rename from and value"),
        ({"messages": [said("user", {"a": 1})]}, "the content of message 1 is a dict"),
        ({"messages": [said("assistant", "a")]}, "no message comes before the assistant's first"),
        ({"messages": [said("user", "\ud800")]}, "a lone surrogate at character"),
        ([1], "not an object but a list"),
        ({"messages": [said("user", "a")], "tools": "{"}, "tools is a text that is not JSON"),
    ],
)
def test_a_malformed_chat_is_refused_in_a_line(tokenizer_of, record, problem):
    _, _, found = encoded(tokenizer_of(TEMPLATES["qwen_3"]), record)
    assert re.search(problem, found)
