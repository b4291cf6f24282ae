"""Requests in OpenAI's form: what is read from them, and what a wrong one is told."""

import json
import time

import pytest

from jaxstack.config.loader import build_component
from jaxstack.decoding.sampling import Sampling
from jaxstack.errors import ConfigError
from jaxstack.serve.chat_request import ChatRequest
from jaxstack.serve.pooling import EmbeddingRequest
from jaxstack.serve.protocol import CompletionRequest, Envelope
from jaxstack.serve.token_details import Part


def completion(**fields) -> CompletionRequest:
    return build_component(CompletionRequest, {"prompt": "a", **fields}, "the request")


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_a_prompt_is_a_text_or_ids_or_several_of_them(prompt, prompts):
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize(
    ("fields", "sampling"),
    [
        ({}, Sampling(1.0)),
        ({"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0}, Sampling(0.0)),
        ({"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1}, Sampling(0.5, 7, 0.9, 0.1)),
        ({"temperature": None, "top_p": None}, Sampling(1.0)),
    ],
)
def test_the_sampling_has_the_defaults_of_openai(fields, sampling):
    assert completion(**fields).sampling == sampling


def test_fields_that_ask_for_nothing_are_accepted():
    body = completion(
        presence_penalty=0, frequency_penalty=0.0, logit_bias={}, best_of=1, user="me", logprobs=None, min_tokens=0
    )
    assert completion(prediction=None, truncate_prompt_tokens=None, documents=[], model=None) == completion()
    asked = {"role": "user", "content": "a"}
    chat = {"messages": [{**asked, "prefix": None}], "echo": False, "continue_final_message": False, "audio": None}
    read = build_component(ChatRequest, {**chat, "function_call": "none"}, "the request")
    assert read == build_component(ChatRequest, {"messages": [asked]}, "the request")
    embedding = {"input": "a", "user": "me", "truncate_prompt_tokens": None}
    assert build_component(EmbeddingRequest, embedding, "the request").prompts == ["a"]
    assert body.stops == () and completion(stop="x").stops == ("x",) and completion(stop=["x", "y"]).stops == ("x", "y")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"temprature": 1}, "did you mean 'temperature'"),
        ({"presence_penalty": 2.5}, "presence_penalty: .*2; found 2.5"),
        ({"logit_bias": {"a": 1}}, "token ids to numbers from -100 to 100; found 'a': 1"),
        ({"logit_bias": {"5": 101}}, "from -100 to 100; found '5': 101"),
        ({"n": 3, "best_of": 2}, r"best_of must be at least n \(3\); found 2"),
        ({"best_of": 2, "stream": True}, r"best_of \(2\) above n \(1\) cannot be streamed; leave out stream"),
        ({"logprobs": 21}, "logprobs: .*20; found 21"),
        ({"prompt_logprobs": -1}, "prompt_logprobs: .*0; found -1"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs come with a whole answer only; leave out stream"),
        ({"max_tokens": 0}, "max_tokens must be at least 1 without echo; found 0"),
        ({"stop": ""}, "at least one character"),
        ({"stop": ["a", ""]}, "at least one character"),
        ({"n": 0}, "n"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": None}, "prompt is required"),
        ({"continue_final_message": True}, "continue_final_message is not supported; leave it out"),
        ({"response_format": {"type": "json_schema"}}, "json_schema must be given"),
    ],
)
def test_a_wrong_request_is_told_why(fields, message):
    with pytest.raises(ConfigError, match=message):
        completion(**fields)


def test_one_form_of_the_answer_can_be_chosen():
    schema = {"type": "object"}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert completion().grammar is None and completion(response_format={"type": "text"}).grammar is None
    assert completion(response_format={"type": "json_object"}).grammar == ("json", {"type": "object"})
    assert completion(response_format=wanted).grammar == ("json", schema)
    assert completion(guided_regex="a+").grammar == completion(structured_outputs={"regex": "a+"}).grammar
    assert completion(structured_outputs={"choice": ["a", "b"]}).grammar == ("choice", ["a", "b"])
    texts = [{"guided_json": json.dumps(schema)}, {"structured_outputs": {"json": json.dumps(schema)}}]
    objects = [{"structured_outputs": {"json_object": True, "whitespace_pattern": None, "disable_fallback": False}}]
    assert [completion(**fields).grammar for fields in texts + objects] == [("json", schema)] * 3
    assert completion(structured_outputs={"json_object": False}).grammar is None
    lark = 'start: "a"'
    assert completion(guided_grammar=lark).grammar == completion(structured_outputs={"grammar": lark}).grammar
    with pytest.raises(ValueError, match="several forms"):
        _ = completion(guided_regex="a+", guided_json=schema).grammar


def test_messages_may_have_parts_of_text_and_nothing_else():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = build_component(
        ChatRequest, {"messages": [{"role": "developer", "content": parts}, {"role": "user", "content": "c"}]}, "it"
    )
    assert [message.as_template_input for message in body.messages] == [
        {"role": "system", "content": "ab"},
        {"role": "user", "content": "c"},
    ]
    picture = [{"type": "image_url", "image_url": {"url": "x"}}]
    for content, reason in ((picture, r"part 0 \(type 'image_url'\) is none"), (5, "a text or a list of parts")):
        with pytest.raises(ConfigError, match=rf"^it: messages.0.content: .*{reason}"):
            build_component(ChatRequest, {"messages": [{"role": "user", "content": content}]}, "it")
    with pytest.raises(ConfigError, match="must be a list; found text 'hello'.$"):
        build_component(ChatRequest, {"messages": "hello"}, "it")
    for wrong in ([], [{"role": "user", "content": picture}], [{"role": "me", "content": "a"}], "hello"):
        with pytest.raises(ConfigError, match="messages"):
            build_component(ChatRequest, {"messages": wrong}, "the request")


def test_a_message_of_an_answer_can_be_sent_back():
    """As `messages.append(response.choices[0].message)` does with OpenAI's client."""
    part = Part("b", finish_reason="stop")
    answer = Envelope("m", "1", chat=True).whole([(part, {})], [{}], {})["choices"][0]["message"]
    question = {"role": "user", "content": "a"}
    body = build_component(ChatRequest, {"messages": [question, {**answer, "tool_calls": None}, question]}, "it")
    assert body.messages[1].as_template_input == {"role": "assistant", "content": "b"}
    calls = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    for wrong, message in ((calls, "tool_calls.0.function"), ({"role": "user"}, "content is required")):
        with pytest.raises(ConfigError, match=message):
            build_component(ChatRequest, {"messages": [question, wrong]}, "it")


def test_an_answer_has_one_id_in_all_of_its_pieces():
    envelope = Envelope("m", "1", chat=True)
    first = envelope.first(0)
    piece = envelope.piece(0, Part("text"), {})
    assert first is not None and first["id"] == piece["id"] == "chatcmpl-1"
    assert piece["choices"][0]["delta"] == {"content": "text"}
    end = envelope.piece(0, Part("", finish_reason="stop"), {"token_ids": [1]})["choices"][0]
    assert end == {"index": 0, "delta": {}, "finish_reason": "stop", "token_ids": [1]}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": [1.5] * 100_000}, "prompt: .* item 0 does not fit"),
        ({"prompt": [1] * 100_000 + ["a"]}, "item 100000 does not fit"),
        ({"prompt": [[1], [1.5]]}, "item 1 does not fit"),
        ({"prompt": [True]}, "item 0 does not fit"),
        ({"stop": ["x"] * 30_000}, "at most 64 texts can end an answer; found 30000"),
        ({"stop": [1]}, "item 0 is no text"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
        ({"stop_token_ids": [1.5] * 100_000}, "stop_token_ids.0"),
        ({"guided_choice": ["a"] * 200_000}, "guided_choice"),
        ({"guided_choice": [1] * 9_000}, "guided_choice.0 must be text"),
        ({f"key {i}": 0 for i in range(1000)}, "10 problems"),
    ],
)
def test_long_wrong_lists_get_a_short_answer_soon(fields, message):
    started = time.perf_counter()
    with pytest.raises(ConfigError, match=message) as told:
        completion(**fields)
    assert time.perf_counter() - started < 1 and len(str(told.value)) < 6000 and "list[" not in str(told.value)


def test_the_role_tool_needs_the_id_of_its_call():
    answer = {"role": "tool", "content": "3", "tool_call_id": "call_1"}
    body = build_component(ChatRequest, {"messages": [answer]}, "it")
    assert body.messages[0].as_template_input == {"role": "tool", "content": "3", "tool_call_id": "call_1"}
    for wrong in ({**answer, "tool_call_id": None}, {**answer, "role": "user"}):
        with pytest.raises(ConfigError, match="tool_call_id must be given"):
            build_component(ChatRequest, {"messages": [wrong]}, "it")
