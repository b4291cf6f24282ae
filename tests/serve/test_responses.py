"""The responses API, asked by OpenAI's client: texts, reasoning and calls, whole and as events in OpenAI's order."""

import itertools
import json

import pytest

from jaxstack.config.loader import build_component
from jaxstack.data.tool_calls import EXAMPLE, derive_format
from jaxstack.decoding.requests import Request
from jaxstack.decoding.scores import TokenScore
from jaxstack.decoding.text_stream import TextStream
from jaxstack.errors import ConfigError

pytest.importorskip("starlette")
from jaxstack.serve.answers import Readers, TextAnswer
from jaxstack.serve.chat_format import ReasoningReader
from jaxstack.serve.config import ServerConfig
from jaxstack.serve.responses import LOG_PROBABILITIES, ResponsesRequest
from jaxstack.serve.token_details import Part, TokenDetails, TokenTexts
from jaxstack.serve.tools import ToolReader, Tools
from tests.serve.test_http import CITY, LIMITS, SCHEMA, ask, client, engine, listen, port  # noqa: F401 fixtures
from tests.serve.test_reasoning import FORMATS, Says, tokenizer  # noqa: F401 fixture

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TOOL = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
TEMPLATE = (
    "{{ tools | tojson if tools }}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
    '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASKED = {"model": "tiny", "input": [{"role": "user", "content": "How is it in Oslo?"}], "tools": [TOOL]}
EVENTS = [
    "response.created", "response.in_progress",
    "response.output_item.added", "response.content_part.added", "response.reasoning_text.delta",
    "response.reasoning_text.done", "response.content_part.done", "response.output_item.done",
    "response.output_item.added", "response.content_part.added", "response.output_text.delta",
    "response.output_text.done", "response.content_part.done", "response.output_item.done",
    "response.output_item.added", "response.function_call_arguments.delta", "response.function_call_arguments.done",
    "response.output_item.done",
    "response.completed",
]  # fmt: skip


@pytest.fixture
def speaker(tokenizer, tmp_path):  # noqa: F811
    """A client of a server whose answers have reasoning, text and a call; and the engine."""
    openai = pytest.importorskip("openai")
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    engine = Says(tokenizer, f"<think>\nLook it up.\n</think>\n\nI look.\n{CALL}")  # noqa: F811
    engine.context = 4096
    server, port = listen(engine, ServerConfig(chat_template=str(tmp_path / "chat.jinja")), tokenizer=tokenizer)  # noqa: F811
    yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60), engine
    server.should_exit = True


def test_the_output_has_an_item_for_reasoning_text_and_each_call(speaker):
    client, engine = speaker  # noqa: F811
    found = client.responses.create(**ASKED)
    reasoning, message, call = found.output
    assert found.status == "completed" and found.output_text == "I look." and found.store is False
    assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "Look it up.")
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", {"city": "Oslo"})
    usage = found.usage
    assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens == len(engine.tokens)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    reply = {"type": "function_call_output", "call_id": call.call_id, "output": "-3 degrees"}
    client.responses.create(**ASKED | {"input": [*ASKED["input"], *found.output, reply], "instructions": "Be brief."})
    written = engine_text(engine)
    assert (
        f"<think>\nLook it up.\n</think>\n\nI look.{CALL}<|im_end|>\n<|im_start|>tool\n-3 degrees<|im_end|>" in written
    )
    assert "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHow is it in Oslo?" in written
    cut = client.responses.create(max_output_tokens=12, **ASKED)
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"
    assert [item.type for item in cut.output] == ["reasoning"] and cut.output[0].status == "incomplete"


def engine_text(engine: Says) -> str:  # noqa: F811
    """Return the newest prompt as text."""
    return engine.tokenizer.decode_marked(engine.prompts[-1])


def test_events_come_in_the_order_of_openai(speaker):
    client, _ = speaker  # noqa: F811
    events = list(client.responses.create(stream=True, **ASKED))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [kind for kind, _ in itertools.groupby(event.type for event in events)] == EVENTS
    texts = {"response.reasoning_text": "Look it up.", "response.output_text": "I look."}
    for name, text in texts.items():
        assert "".join(event.delta for event in events if event.type == f"{name}.delta") == text
        (done,) = [event for event in events if event.type == f"{name}.done"]
        assert done.text == text
    last = events[-1].response
    done = [event for event in events if event.type == "response.output_item.done"]
    assert [event.item.id for event in done] == [item.id for item in last.output]
    assert [event.output_index for event in done] == [0, 1, 2] and last.usage.output_tokens > 0
    with client.responses.stream(**ASKED) as stream:  # puts the events together, and checks them
        whole = stream.get_final_response()
    assert whole.output_text == "I look." and whole.output[2].arguments == '{"city": "Oslo"}'


def test_a_model_answers_texts_and_in_a_given_form(client, port, engine):  # noqa: F811
    """With the same text as in the chat API; the form and the function are those of the request."""
    options = {"model": "tiny", "temperature": 0, "max_output_tokens": 12}
    found = client.responses.create(input="Hello", **options)
    chat = [{"role": "user", "content": "Hello"}]
    wanted = client.chat.completions.create(model="tiny", temperature=0, max_tokens=12, messages=chat)
    assert found.output_text == wanted.choices[0].message.content != "" and len(found.output) == 1
    assert found.usage.input_tokens == wanted.usage.prompt_tokens
    deltas = [e.delta for e in client.responses.create(input=chat, stream=True, **options) if e.type.endswith("delta")]
    assert "".join(deltas) == found.output_text
    form = {"format": {"type": "json_schema", "name": "place", "schema": SCHEMA}}
    options["max_output_tokens"] = 100
    placed = client.responses.create(input="Where?", text=form, **options)
    assert json.loads(placed.output_text)["city"] in CITY["enum"] and placed.text.format.name == "place"
    server, place = listen(engine, LIMITS.model_copy(update={"chat_template": "llama3"}))
    other = client.with_options(base_url=f"http://127.0.0.1:{place}/v1")
    chosen = {"type": "function", "name": "weather"}
    called = other.responses.create(input="?", tools=[TOOL], tool_choice=chosen, **options)
    server.should_exit = True
    assert [item.type for item in called.output] == ["function_call"]
    assert json.loads(called.output[0].arguments)["city"] in CITY["enum"]
    status, answer, _ = ask(port, "/v1/responses", {"input": "a", "previous_response_id": "resp_1"})
    assert status == 400 and "this server keeps no responses: send the earlier" in answer["error"]["message"]


def test_the_text_has_the_log_probabilities_of_the_chat_api(client):  # noqa: F811
    """Whole and as events, where each piece of text has those of its tokens."""
    options = {"model": "tiny", "temperature": 0, "top_logprobs": 2}
    asked = {"input": "Hello", "max_output_tokens": 12, "include": [LOG_PROBABILITIES], **options}
    found = client.responses.create(**asked)
    assert found.top_logprobs == 2
    chat = client.chat.completions.create(
        messages=[{"role": "user", "content": "Hello"}], max_tokens=12, logprobs=True, **options
    )
    scored = found.output[0].content[0].logprobs
    wanted = [entry.to_dict() for entry in chat.choices[0].logprobs.content]
    assert [entry.to_dict() for entry in scored] == wanted[: len(scored)] and len(scored) >= len(wanted) - 1 > 0
    events = list(client.responses.create(stream=True, **asked))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [e.to_dict() for d in deltas for e in d.logprobs] == wanted[: len(scored)] and len(deltas) > 1
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert [entry.to_dict() for entry in done.logprobs] == wanted[: len(scored)]
    assert events[-1].response.output[0].content[0].logprobs == scored
    plain = client.responses.create(input="Hello", max_output_tokens=12, model="tiny", temperature=0)
    assert plain.output_text == found.output_text and plain.output[0].content[0].logprobs == []


@pytest.mark.parametrize("size", [1, 3, 500])
def test_only_tokens_of_the_text_have_log_probabilities(tokenizer, size):  # noqa: F811
    """Not those of the reasoning, of what is around it, of a call, or a stop token, however many come at a time."""
    one = CALL.replace("weather", EXAMPLE.name).replace('{"city": "Oslo"}', json.dumps(EXAMPLE.arguments))
    form = derive_format(one, f"{one}\n{one}")
    stop = tokenizer.special_tokens["<|im_end|>"]
    details = TokenDetails(TokenTexts(tokenizer), chat=True, logprobs=0, prompt_logprobs=None, ids=False)
    for said, call in (("I look.", CALL), ("It is <b>5.", "")):
        request = Request([1], 500, stop_tokens=[stop])
        reasoning = FORMATS["kept"]
        assert form is not None and reasoning is not None
        readers = Readers(ToolReader(Tools([{"type": "function", "function": TOOL}]), form), ReasoningReader(reasoning))
        text = TextStream(tokenizer, marks=readers.marks(tokenizer.special_tokens))
        answer = TextAnswer(request, text, details, readers=readers)
        tokens = tokenizer.encode_marked([f"<think>\nhm\n</think>\n\n{said}{call}"])[0][0].tolist()
        request.scores = [TokenScore(-float(place), 1, ()) for place in range(len(tokens) + 1)]
        whole = Part("")
        for start in range(0, len(tokens), size):
            request.append(tokens[start : start + size])
            whole += answer.take() or Part("")
        request.stop_token = stop
        request.notify("stop")
        whole += answer.take() or Part("")
        assert (whole.text, whole.reasoning, len(whole.calls)) == (said, "hm", bool(call))
        entries = details.describe_text(whole)
        # The first characters of a call could be text, where its opening is no single token.
        assert "".join(entry["token"] for entry in entries).startswith(said)
        assert len(entries) < len(said) + len("<tool_call>")
        assert entries[0]["logprob"] == -len("<think>\nhm\n</think>\n\n")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_logprobs": 2}, r'top_logprobs \(2\) needs include: \["message.output_text.logprobs"\]'),
        ({"top_logprobs": 21, "include": [LOG_PROBABILITIES]}, "top_logprobs"),
        ({"background": True}, "background is not supported; this server keeps no responses"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"input": []}, "input"),
        ({"input": 5}, "must be a text or a list of items; found a value of type int"),
        ({"input": [{"role": "user"}]}, "content is required in an item of the type 'message'"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "only parts with a text"),
        ({"input": [{"type": "function_call_output", "output": "5"}]}, "call_id is required"),
    ],
)
def test_wrong_requests_are_told_why(fields, message):
    with pytest.raises(ConfigError, match=message):
        build_component(ResponsesRequest, {"input": "a", **fields}, "the request")


def test_items_of_one_answer_are_one_message():
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    items = [
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]},
        call,
        {**call, "call_id": "2"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "5"}]},
        {"role": "assistant", "content": "b"},
        {"type": "reasoning", "summary": [], "content": None},
        {"role": "assistant", "content": "c"},
    ]
    messages = build_component(ResponsesRequest, {"input": items}, "the request").messages
    assert [message["role"] for message in messages] == ["assistant", "tool", "assistant", "assistant"]
    first = messages[0]
    assert (first["reasoning_content"], first["content"]) == ("hm", "a") and len(first["tool_calls"]) == 2
    assert messages[1]["content"] == "5" and messages[2]["content"] == "b" and messages[-1]["content"] == "c"
