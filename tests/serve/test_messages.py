"""Anthropic's messages API: texts, reasoning, calls and results of tools, whole and as events in Anthropic's order."""

import http.client
import itertools
import json

import pytest

from jaxstack.config.loader import build_component
from jaxstack.errors import ConfigError
from jaxstack.serve.config import ServerConfig

pytest.importorskip("starlette")
from jaxstack.serve.messages import MessagesRequest
from tests.serve.test_http import CITY, LIMITS, SCHEMA, ask, engine, idle, listen, port  # noqa: F401 fixtures
from tests.serve.test_reasoning import Says, tokenizer  # noqa: F401 fixture
from tests.serve.test_responses import CALL, TEMPLATE

PATH = "/v1/messages"
TOOL = {"name": "weather", "description": "Of a city.", "input_schema": SCHEMA}
ASKED = {
    "model": "tiny",
    "max_tokens": 200,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [{"role": "user", "content": "How is it in Oslo?"}],
    "tools": [TOOL],
}
BLOCK = ["content_block_start", "content_block_delta", "content_block_stop"]
EVENTS = ["message_start", *BLOCK * 3, "message_delta", "message_stop"]
CONTENT = [
    {"type": "thinking", "thinking": "Look it up.", "signature": ""},
    {"type": "text", "text": "I look."},
    {"type": "tool_use", "name": "weather", "input": {"city": "Oslo"}},
]


@pytest.fixture
def speaker(tokenizer, tmp_path):  # noqa: F811
    """The port of a server whose answers have reasoning, text and a call; and the engine."""
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    engine = Says(tokenizer, f"<think>\nLook it up.\n</think>\n\nI look.\n{CALL}")  # noqa: F811
    engine.context = 4096
    server, port = listen(engine, ServerConfig(chat_template=str(tmp_path / "chat.jinja")), tokenizer=tokenizer)  # noqa: F811
    yield port, engine
    server.should_exit = True


def without_ids(blocks: list[dict]) -> list[dict]:
    return [{name: value for name, value in block.items() if name != "id"} for block in blocks]


def ask_events(port: int, body: dict) -> list[dict]:  # noqa: F811
    """Return the events of a streamed answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", PATH, json.dumps(body | {"stream": True}), {"Content-Type": "application/json"})
    lines = [event.split("\n") for event in connection.getresponse().read().decode().split("\n\n") if event]
    events = [json.loads(data.removeprefix("data: ")) for _, data in lines]
    assert [name for name, _ in lines] == [f"event: {event['type']}" for event in events]
    return events


def test_the_content_has_a_block_for_reasoning_text_and_each_call(speaker):
    """Which are sent back with the result of the tool; the template gets all of them."""
    port, engine = speaker  # noqa: F811
    status, found, _ = ask(port, PATH, ASKED)
    assert status == 200 and (found["type"], found["role"], found["model"]) == ("message", "assistant", "tiny")
    assert without_ids(found["content"]) == CONTENT and found["stop_reason"] == "tool_use"
    count = ask(port, f"{PATH}/count_tokens", {name: value for name, value in ASKED.items() if name != "max_tokens"})
    usage = found["usage"]
    assert count[:2] == (200, {"input_tokens": len(engine.prompts[0])}) and usage["cache_read_input_tokens"] == 0
    assert (usage["input_tokens"], usage["output_tokens"]) == (len(engine.prompts[0]), len(engine.tokens))
    result = {"type": "tool_result", "tool_use_id": found["content"][2]["id"], "is_error": False}
    reply = [result | {"content": [{"type": "text", "text": "-3 degrees"}]}, {"type": "text", "text": "And now?"}]
    turns = [{"role": "assistant", "content": found["content"]}, {"role": "user", "content": reply}]
    ask(
        port, PATH, ASKED | {"messages": ASKED["messages"] + turns, "thinking": {"type": "enabled", "budget_tokens": 9}}
    )
    written = engine.tokenizer.decode_marked(engine.prompts[-1])
    assert "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHow is it in Oslo?" in written
    assert f"<think>\nLook it up.\n</think>\n\nI look.{CALL}<|im_end|>\n<|im_start|>tool\n-3 degrees" in written
    assert written.endswith("<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n")
    ask(port, PATH, ASKED | {"messages": [*ASKED["messages"], {"role": "assistant", "content": "It is"}]})
    assert engine.tokenizer.decode_marked(engine.prompts[-1]).endswith("<|im_start|>assistant\nIt is"), "which goes on"
    _, cut, _ = ask(port, PATH, ASKED | {"max_tokens": 12})
    assert cut["stop_reason"] == "max_tokens" and [block["type"] for block in cut["content"]] == ["thinking"]


def test_events_come_in_the_order_of_anthropic(speaker):
    port, _ = speaker  # noqa: F811
    events = ask_events(port, ASKED)
    assert [kind for kind, _ in itertools.groupby(event["type"] for event in events)] == EVENTS
    assert events[0]["message"]["content"] == [] and events[0]["message"]["usage"]["input_tokens"] > 0
    for number, (kind, name, text) in enumerate(
        (("thinking_delta", "thinking", "Look it up."), ("text_delta", "text", "I look."),
         ("input_json_delta", "partial_json", '{"city": "Oslo"}'))
    ):  # fmt: skip
        deltas = [e["delta"] for e in events if e["type"] == BLOCK[1] and e["index"] == number]
        assert "".join(delta[name] for delta in deltas if delta["type"] == kind) == text
    *_, delta, last = events
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None} and last == {"type": "message_stop"}
    assert delta["usage"]["output_tokens"] > 0


def test_the_client_of_anthropic_reads_the_answers(speaker):
    """Whole and streamed, put together by the client itself, with its header for the key."""
    anthropic = pytest.importorskip("anthropic")
    port, _ = speaker  # noqa: F811
    client = anthropic.Anthropic(base_url=f"http://127.0.0.1:{port}", api_key="none", max_retries=0, timeout=60)
    found = client.messages.create(**ASKED)
    dropped = {"id", "citations", "caller"}
    contents = [[block.model_dump(exclude=dropped) for block in found.content]]
    with client.messages.stream(**ASKED) as stream:
        assert "".join(stream.text_stream) == "I look."
        contents.append([block.model_dump(exclude=dropped) for block in stream.get_final_message().content])
        assert stream.get_final_message().stop_reason == "tool_use"
    for content in contents:
        assert [
            {name: block[name] for name in wanted} for wanted, block in zip(CONTENT, content, strict=True)
        ] == CONTENT
    asked = {name: value for name, value in ASKED.items() if name != "max_tokens"}
    assert client.messages.count_tokens(**asked).input_tokens == found.usage.input_tokens
    with pytest.raises(anthropic.NotFoundError, match="there is no model 'other'"):
        client.messages.create(**ASKED | {"model": "other"})


def test_a_model_answers_with_stop_texts_schemas_and_chosen_tools(port, engine):  # noqa: F811
    """With the same text as in the chat API."""
    chat = [{"role": "user", "content": "Hello"}]
    options = {"max_tokens": 12, "temperature": 0}
    _, wanted, _ = ask(port, "/v1/chat/completions", {"messages": chat, **options})
    text = wanted["choices"][0]["message"]["content"]
    _, found, _ = ask(port, PATH, {"messages": chat, **options})
    assert found["content"] == [{"type": "text", "text": text}] and text
    assert found["stop_reason"] == ("max_tokens" if wanted["choices"][0]["finish_reason"] == "length" else "end_turn")
    _, cut, _ = ask(port, PATH, {"messages": chat, "stop_sequences": ["\0\0", text[3:5]], **options})
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("stop_sequence", text[3:5])
    events = ask_events(port, {"messages": chat, **options})
    assert "".join(event["delta"]["text"] for event in events if event["type"] == BLOCK[1]) == text
    options["max_tokens"] = 100
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    _, placed, _ = ask(port, PATH, {"messages": chat, "output_config": form, **options})
    assert json.loads(placed["content"][0]["text"])["city"] in CITY["enum"]
    server, place = listen(engine, LIMITS.model_copy(update={"chat_template": "llama3"}), api_key="secret")
    body = {"messages": chat, "tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}, **options}
    status, refused, _ = ask(place, PATH, body)
    assert status == 401 and refused["type"] == "error" and refused["error"]["type"] == "authentication_error"
    _, called, _ = ask(place, PATH, body, headers={"x-api-key": "secret"})
    assert [block["type"] for block in called["content"]] == ["tool_use"] and called["stop_reason"] == "tool_use"
    assert called["content"][0]["input"]["city"] in CITY["enum"] and idle(engine)
    server.should_exit = True


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id is required in a block"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking"}]}]}, "'user' has no blocks of the type 'thin"),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}
                ]
            },
            "without calls can be continued",
        ),
        ({"system": [{"type": "image"}]}, "only blocks of the type 'text'"),
        ({"system": False}, "system: it must be a text or a list of blocks; found a value of type bool"),
        ({"system": {}}, "system: it must be a text or a list of blocks; found a value of type dict"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": 0}]}]},
            "it must be a text or a list of blocks; found a value of type int",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"mcp_servers": [{}]}, "mcp_servers is not supported"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice names 'x'"),
    ],
)
def test_wrong_requests_are_told_why(fields, message):
    with pytest.raises(ConfigError, match=message):
        _ = build_component(MessagesRequest, {**ASKED, "tools": None, **fields}, "the request").as_chat_request
