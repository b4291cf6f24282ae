"""The HTTP server, asked by OpenAI's client, by a bare socket, and by clients that go away."""

import concurrent.futures
import contextlib
import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, cast

import jax
import numpy as np
import pytest
from flax import nnx

import jaxstack
from jaxstack.data.tokenizer import ByteTokenizer
from jaxstack.decoding.adapter_places import AdapterPlaces
from jaxstack.decoding.engine import Engine
from jaxstack.decoding.requests import Request
from jaxstack.serve.config import EngineConfig, ServerConfig
from jaxstack.serve.metrics import add_up
from tests.serve.tiny import TOKENIZER, open_tiny

uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("llguidance")

LIMITS = ServerConfig(chat_template="chatml", max_body_bytes=4096, max_tokens=200, timeout=20)


CITY = {"enum": ["Oslo", "Rome"]}
SCHEMA = {"type": "object", "properties": {"city": CITY}, "required": ["city"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
CONTINUED = {"add_generation_prompt": False, "continue_final_message": True}
COMPLETE = "/v1/completions"
CHAT = "/v1/chat/completions"
WRONG = [
    (COMPLETE, b"{", 400, "not valid JSON"),
    (COMPLETE, b"\xff\xfe", 400, "not valid JSON"),
    (COMPLETE, b"[" * 2000, 400, "not valid JSON"),
    (COMPLETE, [], 400, "must be a JSON object; found list"),
    (COMPLETE, {}, 400, "prompt"),
    (COMPLETE, {"prompt": "a", "temprature": 1}, 400, "did you mean 'temperature'"),
    (COMPLETE, {"prompt": "a", "temperature": -1}, 400, "temperature"),
    (COMPLETE, b'{"prompt": "a", "temperature": NaN}', 400, "temperature"),
    (COMPLETE, {"prompt": "a", "max_tokens": 10**30}, 400, "max_tokens"),
    (COMPLETE, {"prompt": "a", "max_tokens": 201}, 400, "at most 200 (server.max_tokens); found 201"),
    (COMPLETE, {"prompt": "a" * 300, "max_tokens": 5}, 400, "exceeds the context of 256"),
    (COMPLETE, {"prompt": "a" * 5000}, 413, "4096 bytes"),
    (COMPLETE, {"prompt": [999]}, 400, "999 is outside of the model's vocabulary"),
    (COMPLETE, {"prompt": [-5]}, 400, "at least 0"),
    (COMPLETE, {"prompt": [[1, 2], [3, 257]]}, 400, "257 is outside of the model's vocabulary"),
    (COMPLETE, {"prompt": "a", "stop_token_ids": [3, 257]}, 400, "stop_token_ids must be below 257"),
    (COMPLETE, {"prompt": "a", "stop_token_ids": [-1]}, 400, "stop_token_ids"),
    (COMPLETE, {"prompt": "a", "allowed_token_ids": [3, 257]}, 400, "allowed_token_ids must be below 257"),
    (COMPLETE, {"prompt": "a", "allowed_token_ids": []}, 400, "allowed_token_ids"),
    (COMPLETE, {"prompt": "a", "allowed_token_ids": [3], "guided_regex": "a"}, 400, "several forms of the answer"),
    (COMPLETE, {"prompt": "a", "stop_token_ids": [2**70]}, 400, "stop_token_ids"),
    (COMPLETE, {"prompt": "a", "truncate_prompt_tokens": 0}, 400, "the number of tokens to keep, or -1"),
    (COMPLETE, {"prompt": "a" * 300, "truncate_prompt_tokens": 255, "max_tokens": 2}, 400, "exceeds the context of"),
    (COMPLETE, {"prompt": "a", "bad_words": [""]}, 400, "bad_words"),
    (COMPLETE, {"prompt": "a", "bad_words": "a"}, 400, "bad_words"),
    (COMPLETE, {"prompt": "a", "request_id": "ä"}, 400, "1 to 256 characters of ASCII and no spaces"),
    (COMPLETE, {"prompt": "a", "cache_salt": ""}, 400, "cache_salt"),
    (COMPLETE, {"prompt": [10**12], "echo": True}, 400, "1000000000000 is outside of the model's vocabulary"),
    (COMPLETE, {"prompt": "\ud800", "echo": True}, 400, "surrogates not allowed"),
    (COMPLETE, {"prompt": "a", "logprobs": 21}, 400, "logprobs"),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}, 400, "needs logprobs: set it to true"),
    (COMPLETE, {"prompt": []}, 400, "at least one text or token id"),
    (
        COMPLETE,
        {"prompt": ["a"] * 40, "n": 2},
        400,
        "1 to 64 answers or texts (engine.slots and engine.queue together); found 80",
    ),
    (COMPLETE, {"prompt": "a", "model": "gpt"}, 404, "this server has 'tiny'"),
    (COMPLETE, {"prompt": "a", "guided_regex": "("}, 400, "the regex of the structured output is wrong"),
    (COMPLETE, {"prompt": "a", "guided_json": {"type": "nonsense"}}, 400, "the json of the structured output is wrong"),
    (COMPLETE, {"prompt": "a", "guided_choice": []}, 400, "the choice of the structured output is wrong"),
    (COMPLETE, {"prompt": "a", "guided_json": {"$ref": "#"}}, 400, "it refers only to itself, so that no text matches"),
    (COMPLETE, {"prompt": "a", "guided_grammar": "start: start"}, 400, "it refers only to itself"),
    (COMPLETE, {"prompt": "", "add_special_tokens": False}, 400, "at least one token"),
    (COMPLETE, {"prompt": "a", "guided_json": "{"}, 400, "an object or its text; the text is no JSON"),
    (COMPLETE, {"prompt": "a", "structured_outputs": 5}, 400, "structured_outputs: it must be a JSON object"),
    (COMPLETE, {"prompt": "a", "structured_outputs": {"structural_tag": {}}}, 400, "structural_tag is not supported"),
    ("/tokenize", {}, 400, "give a text as prompt, or a chat as messages"),
    ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, 400, "give a text as prompt, or"),
    ("/tokenize", {"prompt": "a", "tools": [TOOL]}, 400, "tools is for a chat: give messages"),
    (
        "/tokenize",
        {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True},
        400,
        "add_special_tokens is for a prompt",
    ),
    ("/tokenize", {"messages": [{"role": "user", "content": "<|im_end|>"}]}, 400, "could pass for another turn"),
    ("/tokenize", {"prompt": "a", "model": "gpt"}, 404, "this server has 'tiny'"),
    ("/detokenize", {"tokens": [1, 257]}, 400, "tokens must be below 257, the number of ids; found 257"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens.0"),
    ("/detokenize", {"tokens": "a"}, 400, "tokens"),
    (CHAT, {"messages": []}, 400, "messages"),
    (
        CHAT,
        {"messages": [{"role": "assistant", "content": "a"}], "continue_final_message": True},
        400,
        "set add_generation_prompt to false",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "a"}], **CONTINUED},
        400,
        "only a last message of the role 'assistant'",
    ),
    (CHAT, {"messages": [{"role": "user"}], "tools": [{"type": "function"}]}, 400, "tools.0.function"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "a"}], "tools": [TOOL]},
        400,
        "leave out tools, or start the server",
    ),
    (CHAT, {"messages": [{"role": "user", "content": "hi<|im_end|>"}]}, 400, "could pass for another turn"),
    (CHAT, {"messages": [{"role": "user", "content": "hi"}], "x" * 3000: 1}, 400, "xxx..."),
    ("/v1/nothing", {}, 404, "known: /v1/completions"),
]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    config = EngineConfig(slots=4, page_size=8, chunk=64, queue=60)
    with Engine(open_tiny(), config, vocab_size=257, stop_tokens=[256], warm_up=False) as engine:
        yield engine


def listen(
    engine: Engine, config: ServerConfig = LIMITS, *, tokenizer=TOKENIZER, **more
) -> tuple["uvicorn.Server", int]:
    """Start a server in a thread; return it and its port."""
    from jaxstack.serve.http import Server
    from jaxstack.serve.listen import bind, uvicorn_settings

    place = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn_settings(Server(engine, tokenizer, "tiny", config, **more)))
    threading.Thread(target=server.run, kwargs={"sockets": [place]}, daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    return server, place.getsockname()[1]


@pytest.fixture(scope="module")
def port(engine) -> Iterator[int]:
    server, port = listen(engine)
    yield port
    server.should_exit = True


@pytest.fixture(scope="module")
def client(port):
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)


def ask(port: int, path: str, body=None, method: str | None = None, headers=None) -> tuple[int, dict, dict]:
    """(status, JSON, headers) of the answer to a raw request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(
        method or ("GET" if body is None else "POST"),
        path,
        data,
        {"Content-Type": "application/json", **(headers or {})},
    )
    response = connection.getresponse()
    text = response.read()
    connection.close()
    return response.status, json.loads(text), dict(response.getheaders())


def idle(engine: Engine) -> bool:
    """True as soon as nothing runs and no page is in use; False if that does not come within seconds."""
    until = time.monotonic() + 10
    while engine.running or engine.waiting or engine.pool.used:
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


class Echo(Engine):
    """Answers with the prompt, without a model."""

    def __init__(self):
        self.stop_tokens = frozenset({256})
        self.slots = 16
        self.context = 256
        self.config = EngineConfig(queue=48)
        self.failure = None
        self.adapters = AdapterPlaces(cast(Any, None), 0, 1)

    @contextlib.contextmanager
    def together(self):
        yield

    def submit(self, prompt, max_tokens, sampling=None, **options) -> Request:
        request = Request(prompt, max_tokens, cancel=lambda request: request.notify("cancelled"))

        def answer():
            for token in prompt[1:]:
                request.append([token])
                request.notify()
            request.notify("stop")

        threading.Thread(target=answer).start()
        return request


def test_the_routes_answer_requests():
    """In the forms of both routes, streamed and not, with errors, without a model."""
    server, port = listen(Echo())
    status, answer, _ = ask(port, COMPLETE, {"prompt": "hällo", "model": "tiny"})
    assert status == 200 and answer["object"] == "text_completion"
    ended = {"finish_reason": "stop", "stop_reason": None}
    assert answer["choices"] == [{"index": 0, "text": "hällo", "logprobs": None, **ended}]
    assert answer["usage"]["prompt_tokens"] == 7 and answer["usage"]["completion_tokens"] == 6
    connection = http.client.HTTPConnection("127.0.0.1", port)
    body = {"messages": [{"role": "user", "content": "hä"}], "stream": True}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, done = [line.removeprefix("data: ") for line in response.read().decode().split("\n\n") if line]
    deltas = [json.loads(event)["choices"][0] for event in events]
    text = "".join(delta["delta"].get("content", "") for delta in deltas)
    assert done == "[DONE]" and deltas[0]["delta"]["role"] == "assistant" and deltas[-1]["finish_reason"] == "stop"
    assert text == "|im_start|>user\nhä"  # up to the text that ends an answer, without the first token
    for path, body, status, message in WRONG[:6]:
        found, answer, _ = ask(port, path, body)
        assert found == status and message in answer["error"]["message"]
    server.should_exit = True


def test_a_streamed_answer_is_the_whole_answer_in_pieces(client):
    """By OpenAI's client, on both routes, with the numbers of tokens."""
    assert [model.id for model in client.models.list()] == ["tiny"]
    options = {"model": "tiny", "max_tokens": 20, "seed": 3, "temperature": 0.7}
    whole = client.completions.create(prompt="def ", **options)
    pieces = list(
        client.completions.create(prompt="def ", stream=True, stream_options={"include_usage": True}, **options)
    )
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == whole.choices[0].text != ""
    assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens <= 20
    counted = {"include_usage": True, "continuous_usage_stats": True}
    *pieces, last = client.completions.create(prompt="def ", stream=True, stream_options=counted, **options)
    counts = [piece.usage.completion_tokens for piece in pieces]
    assert 0 < counts[0] <= counts[-1] == whole.usage.completion_tokens and counts == sorted(counts)
    assert last.usage == pieces[-1].usage == whole.usage
    assert whole.usage.prompt_tokens == 5 and whole.choices[0].finish_reason in ("stop", "length")
    messages = [{"role": "user", "content": "Hello"}]
    chat = client.chat.completions.create(messages=messages, **options)
    deltas = list(client.chat.completions.create(messages=messages, stream=True, **options))
    assert "".join(d.choices[0].delta.content or "" for d in deltas) == chat.choices[0].message.content
    assert deltas[0].choices[0].delta.role == "assistant" and deltas[-1].choices[0].finish_reason is not None


def test_several_prompts_and_samples_are_numbered_in_order(client):
    options = {"model": "tiny", "max_tokens": 6, "seed": 5}
    alone = [client.completions.create(prompt=p, **options | {"seed": s}) for p in ("a", "bc") for s in (5, 6)]
    together = client.completions.create(prompt=["a", "bc"], n=2, echo=True, **options)
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    texts = [prompt + answer.choices[0].text for prompt, answer in zip(("a", "a", "bc", "bc"), alone, strict=True)]
    assert [choice.text for choice in together.choices] == texts
    assert together.usage.prompt_tokens == 5
    ids = client.completions.create(prompt=[256, 97], **options)
    assert ids.choices[0].text == alone[0].choices[0].text


def test_log_probabilities_of_a_completion_stand_beside_its_tokens(client):
    """With echo those of the prompt too; a token's place in the text is its offset, also in a stream."""
    options = {"model": "tiny", "max_tokens": 6, "seed": 2, "extra_body": {"return_token_ids": True}}
    whole = client.completions.create(prompt="dä", logprobs=2, echo=True, **options).choices[0]
    found = whole.logprobs
    assert found.tokens[:3] == ["d", "bytes:\\xc3", "bytes:\\xa4"] and found.text_offset[:4] == [0, 1, 1, 2]
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == 3 + len(whole.token_ids)
    for token, score, best in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert best[token] == score < 0 and 2 <= len(best) <= 3 and max(best.values()) >= score
    assert whole.prompt_token_ids == [256, *"dä".encode()]
    by_id = {"extra_body": {"return_tokens_as_token_ids": True}}
    named = client.completions.create(prompt="dä", logprobs=2, echo=True, **options | by_id).choices[0].logprobs
    wanted = [f"token_id:{token}" for token in (*"dä".encode(), *whole.token_ids)]
    assert named.tokens == wanted and named.text_offset == found.text_offset
    assert all(token in best for token, best in zip(wanted, named.top_logprobs, strict=True))
    stream = client.completions.create(prompt="dä", logprobs=2, echo=True, stream=True, **options)
    pieces = [piece.choices[0] for piece in stream]
    for name in ("tokens", "text_offset"):
        assert [x for piece in pieces for x in getattr(piece.logprobs, name)] == getattr(found, name)
    scores = [score for piece in pieces for score in piece.logprobs.token_logprobs]
    np.testing.assert_allclose(scores, found.token_logprobs, atol=1e-5)
    assert [i for p in pieces for i in p.token_ids] == whole.token_ids and pieces[0].prompt_token_ids[0] == 256
    only = client.completions.create(model="tiny", prompt=[97, 98, 99], max_tokens=0, echo=True, logprobs=0)
    assert only.choices[0].text == "abc" and only.usage.completion_tokens == 0
    assert only.choices[0].logprobs.token_logprobs[0] is None and only.choices[0].logprobs.tokens == ["a", "b", "c"]


def test_log_probabilities_of_a_chat_have_the_form_of_openai(client):
    options = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0}
    more = {"return_token_ids": True, "prompt_logprobs": 1}
    whole = client.chat.completions.create(logprobs=True, top_logprobs=3, extra_body=more, **options)
    choice = whole.choices[0]
    assert [len(entry.top_logprobs) for entry in choice.logprobs.content] == [3] * len(choice.token_ids)
    for entry, token in zip(choice.logprobs.content, choice.token_ids, strict=True):
        assert entry.top_logprobs[0].token == entry.token and entry.top_logprobs[0].logprob == entry.logprob
        assert entry.bytes == ([token] if token < 256 else [])
    assert whole.prompt_logprobs[0] is None and len(whole.prompt_logprobs) == whole.usage.prompt_tokens
    for token, entries in zip(whole.prompt_token_ids[1:], whole.prompt_logprobs[1:], strict=True):
        assert entries[str(token)]["rank"] >= 1 and any(entry["rank"] == 1 for entry in entries.values())
    pieces = list(client.chat.completions.create(logprobs=True, stream=True, **options))
    kept = [piece.choices[0].logprobs for piece in pieces if piece.choices[0].logprobs]
    entries = [entry for found in kept for entry in found.content]
    assert [entry.token for entry in entries] == [entry.token for entry in choice.logprobs.content]
    assert all(entry.top_logprobs == [] for entry in entries)
    assert client.chat.completions.create(**options).choices[0].logprobs is None


def test_embeddings_are_final_hidden_states_of_length_one(client, engine):
    """Of texts of one chunk and of several, also when their beginning is cached; the last one, and their mean."""
    texts = ["abc", "a text " * 14, "a text " * 14 + "!"]
    server, port = listen(engine, LIMITS.model_copy(update={"pooling": "mean"}))
    last = client.embeddings.create(model="tiny", input=texts)
    status, mean, _ = ask(port, "/v1/embeddings", {"input": texts, "dimensions": 32, "encoding_format": "float"})
    assert status == 200 and last.usage.prompt_tokens == mean["usage"]["total_tokens"] == sum(map(len, texts)) + 3
    model = engine.model.module.merge(engine.model.params, engine.model.non_params)
    for number, text in enumerate(texts):
        ids = np.zeros((1, 128), np.int32)
        ids[0, : len(text) + 1] = [256, *text.encode()]
        with jax.set_mesh(engine.model.rules.mesh):
            states = np.asarray(nnx.jit(lambda model, ids: model.hidden(ids))(model, ids))[0, : len(text) + 1]
        for found, wanted in (
            (last.data[number].embedding, states[-1]),
            (mean["data"][number]["embedding"], states.mean(0)),
        ):
            np.testing.assert_allclose(found, wanted / np.linalg.norm(wanted), atol=1e-5)
    status, answer, _ = ask(port, "/v1/embeddings", {"input": "a", "dimensions": 16})
    assert status == 400 and "dimensions must be 32" in answer["error"]["message"] and idle(engine)
    server.should_exit = True


def test_a_stop_text_ends_the_answer_and_frees_the_pages(client, engine):
    options = {"model": "tiny", "prompt": "x", "max_tokens": 100, "seed": 1}
    whole = client.completions.create(**options).choices[0].text
    stop = whole[4:6]
    to_the_end = client.completions.create(extra_body={"ignore_eos": True}, **options).choices[0]
    assert to_the_end.finish_reason == "length"
    choice = client.completions.create(stop=["never there", stop], **options)
    assert choice.choices[0].text == whole[: whole.index(stop)] and choice.choices[0].finish_reason == "stop"
    assert choice.usage.completion_tokens < 100 and idle(engine)
    assert to_the_end.stop_reason is None and choice.choices[0].stop_reason == stop
    kept = {"include_stop_str_in_output": True}
    with_stop = client.completions.create(stop=["never there", stop], extra_body=kept, **options).choices[0]
    assert with_stop.text == choice.choices[0].text + stop and with_stop.stop_reason == stop
    *_, streamed = client.completions.create(stop=["never there", stop], stream=True, **options)
    assert streamed.choices[0].stop_reason == stop
    fields = {"logit_bias": {"65": 100}, "stop_token_ids": [65]}
    by_token = client.completions.create(model="tiny", prompt="x", max_tokens=9, temperature=0, extra_body=fields)
    assert (by_token.choices[0].finish_reason, by_token.choices[0].stop_reason) == ("stop", 65)
    of_model = client.completions.create(model="tiny", prompt="x", temperature=0, logit_bias={"256": 100})
    assert (of_model.choices[0].finish_reason, of_model.choices[0].stop_reason) == ("stop", None)
    assert (by_token.usage.completion_tokens, of_model.usage.completion_tokens) == (1, 1), "the stop tokens, as in vLLM"
    alone = client.completions.create(
        model="tiny", prompt="x", max_tokens=0, echo=True, temperature=0, extra_body=fields
    )
    assert (alone.choices[0].finish_reason, alone.choices[0].stop_reason) == ("length", None) and idle(engine)


def test_an_answer_has_no_other_tokens_than_those_allowed(client):
    options = {"model": "tiny", "prompt": "x", "max_tokens": 40, "n": 2}
    texts = [
        one.text for one in client.completions.create(extra_body={"allowed_token_ids": [97, 66]}, **options).choices
    ]
    assert all(set(text) == {"a", "B"} and len(text) == 40 for text in texts) and texts[0] != texts[1]
    wide = client.completions.create(extra_body={"allowed_token_ids": [*range(33)] * 2}, **options).choices[0]
    assert set(wide.text.encode()) <= {*range(33)} and len(set(wide.text)) > 10


def test_a_prompt_that_is_too_long_is_cut_if_it_is_asked_for(client):
    """The document start stays at its beginning; of a chat the end is kept, of a text to embed the beginning."""
    text = "".join(map(chr, range(33, 127))) * 5
    options = {"model": "tiny", "max_tokens": 6, "temperature": 0}

    def complete(prompt, **fields):
        return client.completions.create(prompt=prompt, extra_body={"return_token_ids": True, **fields}, **options)

    for asked, kept in (
        ({"truncate_prompt_tokens": 9}, [256, *text[-8:].encode()]),
        ({"truncate_prompt_tokens": -1}, [256, *text[-249:].encode()]),
        ({"truncate_prompt_tokens": 9, "truncation_side": "right"}, [256, *text[:8].encode()]),
    ):
        answer = complete(text, **asked)
        assert answer.choices[0].prompt_token_ids == kept and answer.usage.prompt_tokens == len(kept)
        assert answer.choices[0].text == complete(kept).choices[0].text
    assert complete([*text.encode()], truncate_prompt_tokens=3).choices[0].prompt_token_ids == [*text[-3:].encode()]
    assert complete("ab", truncate_prompt_tokens=9).choices[0].prompt_token_ids == [256, 97, 98]
    echoed = client.completions.create(prompt=text, echo=True, extra_body={"truncate_prompt_tokens": 4}, **options)
    assert echoed.choices[0].text.startswith(text[-3:]) and not echoed.choices[0].text.startswith(text[:3])
    chat = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 3}
    body = {"return_token_ids": True, "truncate_prompt_tokens": 40}
    found = client.chat.completions.create(extra_body=body, **chat)
    assert bytes(found.prompt_token_ids).endswith(b"assistant\n") and found.usage.prompt_tokens == 40
    reply = client.responses.create(model="tiny", input=text, truncation="auto", max_output_tokens=3)
    assert reply.usage.input_tokens == 253 and reply.truncation == "auto"

    def embed(text, **fields):
        return client.embeddings.create(model="tiny", input=text, extra_body=fields).data[0].embedding

    assert embed(text, truncate_prompt_tokens=9) == embed(text[:8]) != embed(text[:9])
    assert embed(text, truncate_prompt_tokens=-1) == embed(text[:254])


def test_no_bad_word_is_in_an_answer(client):
    """Whether sampled or likeliest, of one token or several; where nothing is left the answer ends with an error."""
    options = {"model": "tiny", "prompt": "x", "max_tokens": 40, "seed": 1}

    def complete(temperature, **fields):
        return client.completions.create(temperature=temperature, extra_body=fields, **options).choices[0].text

    for temperature in (0, 1):
        plain = complete(temperature, allowed_token_ids=[97, 98])
        assert "ab" in plain and "aa" in plain if temperature else plain
        words = [plain[:2], plain[5:9]]
        text = complete(temperature, allowed_token_ids=[97, 98], bad_words=words)
        assert not any(word in text for word in words) and len(text) == 40 and text[0] == plain[0]
    assert set(complete(1, allowed_token_ids=[97, 98], bad_words=["b", " "])) == {"a"}
    free = complete(0, bad_words=["never written"])
    assert free == complete(0) and "l" in free and "l" not in complete(0, bad_words=["l"])
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "temperature": 0}
    form = {"structured_outputs": {"choice": ["red", "rot"]}, "bad_words": ["re"]}
    assert client.chat.completions.create(extra_body=form, **chat).choices[0].message.content == "rot"
    openai = pytest.importorskip("openai")
    with pytest.raises(openai.BadRequestError, match="bad_words forbid all tokens with which an answer of this form"):
        client.chat.completions.create(extra_body={**form, "bad_words": ["r"]}, **chat)


def test_an_answer_of_a_form_has_its_least_length_where_the_form_allows_it(client):
    options = {"model": "tiny", "prompt": "x", "max_tokens": 30, "temperature": 0, "logit_bias": {"256": 100}}

    def complete(**fields):
        return client.completions.create(extra_body=fields, **options).choices[0]

    for form in ({"allowed_token_ids": [97, 256]}, {"structured_outputs": {"regex": "a*"}}):
        for least in (0, 7):
            answer = complete(min_tokens=least, **form)
            assert (answer.text, answer.finish_reason) == ("a" * least, "stop")
    short = complete(min_tokens=7, structured_outputs={"choice": ["abc"]})
    assert (short.text, short.finish_reason) == ("abc", "stop")
    assert complete(min_tokens=7, allowed_token_ids=[256]).text == ""
    assert complete(min_tokens=7, allowed_token_ids=[97, 98, 256], bad_words=["a", "bb"]).text == "b"


def test_the_id_of_a_request_is_that_of_its_answer(client, port):
    """That of the header goes before that of the body, and both come back in a header, with errors too."""
    options = {"model": "tiny", "prompt": "x", "max_tokens": 2}
    own = client.completions.create(extra_body={"request_id": "own-1"}, **options)
    assert own.id == "cmpl-own-1" and own._request_id == "own-1"
    headers = {"X-Request-Id": "proxy 7"}
    sent = client.completions.create(extra_body={"request_id": "own-2"}, extra_headers=headers, **options)
    assert sent.id == "cmpl-proxy 7" and sent._request_id == "proxy 7"
    messages = [{"role": "user", "content": "x"}]
    pieces = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=3, stream=True, extra_headers=headers
    )
    assert {piece.id for piece in pieces} == {"chatcmpl-proxy 7"}
    response = client.responses.create(model="tiny", input="x", max_output_tokens=2, extra_body={"request_id": "r"})
    assert response.id == "resp_r"
    first, second = (client.embeddings.create(model="tiny", input="x")._request_id for _ in range(2))
    assert first != second and len(first) == 32
    for path, body, status in ((COMPLETE, b"{", 400), ("/v1/nothing", {}, 404)):
        assert ask(port, path, body, headers=headers)[::2] == (status, ask(port, path, body, headers=headers)[2])
        assert ask(port, path, body, headers=headers)[2]["x-request-id"] == "proxy 7"
    status, answer, found = ask(port, COMPLETE, {"prompt": "a", "request_id": "a\nb"})
    assert status == 400 and "request_id" in answer["error"]["message"] and "\n" not in found["x-request-id"]


def test_prompts_of_other_salts_share_no_cached_prefix(client):
    def cached(**fields):
        answer = client.completions.create(
            model="tiny", prompt="s" * 64, max_tokens=2, temperature=0, extra_body=fields
        )
        return answer.usage.prompt_tokens_details.cached_tokens, answer.choices[0].text

    found = [cached(cache_salt=salt) for salt in ("one", "one", "two", None, "two", None)]
    assert [hits for hits, _ in found] == [0, 64, 0, 0, 64, 64] and len({text for _, text in found}) == 1


def test_special_tokens_are_named_if_it_is_asked_for(client, monkeypatch):
    """Here the tokenizer calls the byte "B" special."""
    monkeypatch.setattr(ByteTokenizer, "special_tokens", {"<|mark|>": 66})
    options = {"model": "tiny", "prompt": "x", "max_tokens": 3, "temperature": 0}
    asked = [{"skip_special_tokens": skip, "allowed_token_ids": [66]} for skip in (False, True, None)]
    texts = [client.completions.create(extra_body=fields, **options).choices[0].text for fields in asked]
    assert texts[0] == "<|mark|>" * 3 and texts[1] == texts[2] == "BBB"


def test_texts_and_chats_are_tokenized_as_prompts_are(client, port):
    """The ids are those of a prompt of the same text or chat, and are turned back into it."""
    ids = {"return_token_ids": True}
    prompt = client.completions.create(model="tiny", prompt="Tromsø", max_tokens=1, extra_body=ids)
    status, found, _ = ask(port, "/tokenize", {"model": "tiny", "prompt": "Tromsø", "return_token_strs": True})
    assert status == 200 and found["tokens"] == prompt.choices[0].prompt_token_ids == [256, *"Tromsø".encode()]
    assert found["count"] == 8 and found["max_model_len"] == 256
    assert found["token_strs"] == ["", *"Troms", "bytes:\\xc3", "bytes:\\xb8"]
    options = {"prompt": "Tromsø", "max_tokens": 1, "echo": True}
    closed = client.completions.create(model="tiny", extra_body=ids | {"add_special_tokens": False}, **options)
    assert closed.choices[0].prompt_token_ids == [*"Tromsø".encode()] and closed.choices[0].text.startswith("Tromsø")
    bare = ask(port, "/tokenize", {"prompt": "Tromsø", "add_special_tokens": False})[1]
    assert bare["tokens"] == found["tokens"][1:] and bare["token_strs"] is None
    assert ask(port, "/detokenize", {"tokens": found["tokens"]})[1] == {"prompt": "Tromsø"}
    chat = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}
    answer = client.chat.completions.create(model="tiny", max_tokens=1, extra_body=ids, **chat)
    found = ask(port, "/tokenize", {**chat, "add_generation_prompt": True})[1]
    assert found["tokens"] == answer.prompt_token_ids
    text = ask(port, "/detokenize", {"tokens": found["tokens"]})[1]["prompt"]
    assert "<|im_start|>user\nhi<|im_end|>" in text
    chat["messages"] += [{"role": "assistant", "content": "Oh"}]
    answer = client.chat.completions.create(model="tiny", max_tokens=1, extra_body=ids | CONTINUED, **chat)
    assert answer.prompt_token_ids == ask(port, "/tokenize", chat | CONTINUED)[1]["tokens"]
    assert ask(port, "/detokenize", {"tokens": answer.prompt_token_ids})[1]["prompt"].endswith("assistant\nOh")
    assert ask(port, "/version")[1] == {"version": jaxstack.__version__}


def test_structured_output_matches_its_schema_or_pattern(client):
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["Ada", "Alan"]}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    for seed in range(3):
        answer = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Who?"}],
            max_tokens=100,
            seed=seed,
            response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema}},
        )
        found = json.loads(answer.choices[0].message.content)
        assert found["name"] in ("Ada", "Alan") and 1 <= found["age"] <= 99 and len(found) == 2
        options = {"model": "tiny", "prompt": "a", "max_tokens": 50, "seed": seed}
        text = client.completions.create(extra_body={"guided_regex": "[a-c]{3}-[0-9]{2}"}, **options).choices[0].text
        assert re.fullmatch("[a-c]{3}-[0-9]{2}", text)
        choice = client.completions.create(
            extra_body={"structured_outputs": {"choice": ["red", "green"]}}, **options
        ).choices[0]
        assert choice.text in ("red", "green") and choice.finish_reason == "stop"


def test_a_chosen_tool_is_called_and_its_result_sent_back(engine):
    """With a template that does not write tools itself."""
    openai = pytest.importorskip("openai")
    server, port = listen(engine, LIMITS.model_copy(update={"chat_template": "llama3"}))
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)
    messages = [{"role": "user", "content": "Hi"}]
    options = {"model": "tiny", "tools": [TOOL], "parallel_tool_calls": False, "max_tokens": 120, "seed": 4}
    chosen = {"type": "function", "function": {"name": "weather"}}
    for choice in (chosen, "required"):
        answer = client.chat.completions.create(messages=messages, tool_choice=choice, **options).choices[0]
        call = answer.message.tool_calls[0]
        assert answer.finish_reason == "tool_calls" and answer.message.content is None
        assert call.function.name == "weather" and json.loads(call.function.arguments)["city"] in CITY["enum"]
        stream = client.chat.completions.create(messages=messages, tool_choice=choice, stream=True, **options)
        *_, last = [piece.choices[0] for piece in stream]
        assert last.delta.tool_calls[0].function.arguments == call.function.arguments
        assert last.finish_reason == "tool_calls" and not last.delta.content
    reply = {"role": "tool", "tool_call_id": call.id, "content": "cold"}
    more = client.chat.completions.create(messages=[*messages, answer.message, reply], model="tiny", max_tokens=3)
    assert more.choices[0].message.tool_calls is None and more.usage.completion_tokens <= 3
    server.should_exit = True


def test_penalties_biases_and_the_best_of_several_answers(client):
    """A bias of 100 leaves one token, until a penalty of its frequency lets another pass."""
    options = {"model": "tiny", "prompt": "a", "max_tokens": 6, "temperature": 0}
    biased = client.completions.create(logit_bias={"98": 100}, **options).choices[0]
    assert biased.text == "bbbbbb"
    banned = client.completions.create(logit_bias={"98": 100, "99": 99}, frequency_penalty=2, **options).choices[0]
    assert {*banned.text} == {"b", "c"}
    more = {"min_tokens": 6, "priority": -3, "repetition_penalty": 1.1}
    stopped = client.completions.create(logit_bias={"256": 100}, extra_body=more, **options).choices[0]
    assert stopped.finish_reason == "length"
    options |= {"temperature": 1.0, "seed": 3}
    several = client.completions.create(n=4, logprobs=0, **options)
    means = [np.mean(choice.logprobs.token_logprobs) for choice in several.choices]
    best = client.completions.create(n=2, best_of=4, **options)
    wanted = [several.choices[number].text for number in np.argsort(means)[::-1][:2]]
    assert [choice.text for choice in best.choices] == wanted and [choice.index for choice in best.choices] == [0, 1]
    assert best.usage.completion_tokens == several.usage.completion_tokens


@pytest.mark.parametrize(("path", "body", "status", "message"), WRONG)
def test_a_wrong_request_gets_an_error_that_says_why(port, path, body, status, message):
    found, answer, _ = ask(port, path, body)
    assert found == status and message in answer["error"]["message"]
    assert answer["error"]["type"] == ("not_found_error" if status == 404 else "invalid_request_error")


def test_settings_outside_of_any_range_harm_nobody(port, engine):
    for body in ({"top_k": 2**40}, {"temperature": 1e300}, {"temperature": 1e-300}, {"seed": -(2**80)}):
        status, answer, _ = ask(port, COMPLETE, {"prompt": "a", "max_tokens": 2, **body})
        assert status == 200 and answer["choices"][0]["finish_reason"] in ("length", "stop"), body
    assert engine.failure is None and idle(engine)


def test_a_body_that_is_too_long_or_never_ends_is_refused(engine):
    server, port = listen(engine, LIMITS.model_copy(update={"receive_timeout": 0.2}))
    for declared, status in ((99_999_999_999, 413), (40, 408)):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.putrequest("POST", COMPLETE)
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", str(declared))
        connection.endheaders(b'{"prompt":')
        assert connection.getresponse().status == status
        connection.close()
    server.should_exit = True


@pytest.mark.longer
def test_heads_that_do_not_arrive_in_time_free_their_connections():
    """Also those that come a byte at a time, and those after a complete request on the same connection."""
    server, port = listen(Echo(), LIMITS.model_copy(update={"receive_timeout": 0.5}))
    openings = [b"", b"GET /health HTTP/1.1\r\n", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Le"]
    connections = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(60)]
    began = time.monotonic()
    for index, connection in enumerate(connections):
        connection.sendall(openings[index % 3])
    slow = socket.create_connection(("127.0.0.1", port), timeout=10)
    with contextlib.suppress(OSError):  # the connection is closed
        for byte in b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long-Header: " + b"a" * 100:
            slow.sendall(bytes([byte]))
            time.sleep(0.02)
    assert len(slow.recv(1000)) and time.monotonic() - began < 5
    for index, connection in enumerate(connections):
        answer = connection.makefile("rb").read()
        assert answer.startswith(b"HTTP/1.1 408") == (index % 3 != 0), answer
    again = socket.create_connection(("127.0.0.1", port), timeout=10)
    again.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /he")
    answers = again.makefile("rb").read()
    assert answers.startswith(b"HTTP/1.1 200") and b"HTTP/1.1 408" in answers and b"receive_timeout" in answers
    assert time.monotonic() - began < 10 and not server.server_state.connections
    server.should_exit = True


def test_a_body_that_is_no_http_ends_its_connection_without_a_traceback(caplog):
    """Before the request has an answer, and after: one of another type gets it before its body."""
    server, port = listen(Echo())
    for kind, begun, status in (("json", False, b"400"), ("json", True, b"400"), ("csv", True, b"415")):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            head = f"POST {COMPLETE} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/{kind}\r\n"
            connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + b"2\r\n{}\r\n" * begun)
            answer = connection.recv(12) if status == b"415" else b""
            connection.sendall(b"no length\r\n")
            assert (answer + connection.makefile("rb").read()).startswith(b"HTTP/1.1 " + status)
    server.should_exit = True
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.longer
def test_a_client_that_reads_nothing_is_let_go():
    """The text of the prompts fills what the sockets hold, and the client reads none of it."""
    engine = Silent()
    engine.context = 10**6
    server, port = listen(engine, LIMITS.model_copy(update={"max_body_bytes": 10**6, "timeout": 0.5}))
    body = json.dumps({"prompt": "a" * 300_000, "n": 40, "echo": True, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(f"{head}{len(body)}\r\n\r\n".encode() + body)
        assert connection.recv(12) == b"HTTP/1.1 200"
        until = time.monotonic() + 10
        while server.server_state.connections and time.monotonic() < until:
            time.sleep(0.05)
        assert not server.server_state.connections
    server.should_exit = True


def test_prompts_far_beyond_the_context_are_not_encoded(monkeypatch):
    monkeypatch.setattr(type(TOKENIZER), "encode", lambda *_: pytest.fail("encoded"))
    server, port = listen(Echo(), LIMITS.model_copy(update={"max_body_bytes": 10**7}))
    for path, field in (
        (COMPLETE, {"prompt": ["a", "b" * 10**6]}),
        (CHAT, {"messages": [{"role": "user", "content": "c" * 10**6}]}),
    ):
        status, answer, _ = ask(port, path, field)
        assert status == 400 and "1000000 characters exceeds the context of 256 tokens" in answer["error"]["message"]
    server.should_exit = True


def test_an_answer_may_take_longer_than_its_request():
    server, port = listen(Silent(), LIMITS.model_copy(update={"receive_timeout": 0.1, "timeout": 0.6}))
    assert ask(port, COMPLETE, {"prompt": "a"})[0] == 504
    server.should_exit = True


@pytest.mark.longer
def test_a_grammar_that_compiles_for_long_is_refused_and_others_are_served():
    """In the processes that compile on trial, as many as allowed; the third waits until the request's own limit."""
    server, port = listen(Echo(), LIMITS.model_copy(update={"max_body_bytes": 10**7, "timeout": 4}))
    # Each alone compiles for more than a minute.
    slow = [{"prompt": "a", "guided_regex": "a?" * (50_000 + extra) + "a" * 50_000} for extra in range(3)]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        refused = [pool.submit(ask, port, COMPLETE, body) for body in slow]
        longest = 0.0
        while not all(answer.done() for answer in refused):
            began = time.monotonic()
            assert ask(port, "/health")[0] == 200 and ask(port, COMPLETE, {"prompt": "hä"})[0] == 200
            longest = max(longest, time.monotonic() - began)
        answers = [answer.result() for answer in refused]
    assert sorted(status for status, *_ in answers) == [400, 400, 504] and longest < 1
    for status, answer, _ in answers:
        assert ("not compile within 2 s" if status == 400 else "longer than 4 s") in answer["error"]["message"]
    server.should_exit = True


def test_other_methods_and_types_are_refused(port, engine):
    assert ask(port, COMPLETE, method="GET")[0] == 405
    assert ask(port, COMPLETE, {"prompt": "a"}, headers={"Content-Type": "text/plain"})[0] == 415
    assert ask(port, "/health")[:2] == (200, {"status": "ok"}) and idle(engine)


def test_without_the_key_nothing_is_answered(engine):
    server, port = listen(engine, api_key="secret")
    body = {"prompt": "a", "max_tokens": 1}
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}):
        status, answer, _ = ask(port, COMPLETE, body, headers=headers)
        assert status == 401 and "API key" in answer["error"]["message"]
    assert ask(port, COMPLETE, body, headers={"Authorization": "Bearer secret"})[0] == 200
    assert ask(port, "/health")[0] == 200 and ask(port, "/v1/models")[0] == 401
    server.should_exit = True


def test_too_much_work_is_refused_and_a_slow_answer_ended(engine):
    server, port = listen(engine, LIMITS.model_copy(update={"timeout": 0.05}))
    status, answer, _ = ask(port, COMPLETE, {"prompt": ["a"] * 60, "max_tokens": 200})
    assert status == 504 and "longer than 0.05 s" in answer["error"]["message"] and idle(engine)
    waiting = [engine.submit([1], 200) for _ in range(64)]
    status, answer, headers = ask(port, COMPLETE, {"prompt": ["a"] * 30, "max_tokens": 5})
    assert status == 429 and "engine.queue" in answer["error"]["message"] and headers["retry-after"] == "1"
    for handle in waiting:
        handle.cancel()
    assert idle(engine)
    server.should_exit = True


def test_fifty_clients_at_once_of_which_half_go_away_leak_nothing(client, port, engine):
    wanted = client.completions.create(model="tiny", prompt="shared", max_tokens=30, seed=7).choices[0].text

    def stay(_: int) -> str:
        pieces = client.completions.create(model="tiny", prompt="shared", max_tokens=30, seed=7, stream=True)
        return "".join(piece.choices[0].text for piece in pieces)

    def leave(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        body = {"prompt": f"client {number}", "max_tokens": 200, "stream": number % 2 == 0}
        connection.request("POST", COMPLETE, json.dumps(body), {"Content-Type": "application/json"})
        if number % 2 == 0:
            connection.getresponse().read(number)
        connection.close()

    with concurrent.futures.ThreadPoolExecutor(50) as pool:
        gone = [pool.submit(leave, number) for number in range(25)]
        assert set(pool.map(stay, range(25))) == {wanted}
        assert all(future.exception() is None for future in gone)
    assert idle(engine)


LONGEST: dict[str, Any] = {"model": "tiny", "prompt": ["a", "b"], "n": 2, "max_tokens": 7}
LONGEST["extra_body"] = {"ignore_eos": True}
"""A request whose longest answer has seven tokens."""


def metrics(port: int) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/metrics")
    return connection.getresponse().read().decode()


def test_the_metrics_have_the_names_of_vllm(client, port, engine):
    client.completions.create(model="tiny", prompt="count me", max_tokens=5)
    before, text = (metrics(port) for _ in range(2) if client.completions.create(**LONGEST))
    for name in (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total",
        "generation_tokens_total", "num_preemptions_total", "prefix_cache_queries_total", "prefix_cache_hits_total",
        "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket",
        "e2e_request_latency_seconds_bucket", "request_queue_time_seconds_bucket", "request_success_total",
        "request_prefill_time_seconds_bucket", "request_decode_time_seconds_bucket",
        "request_inference_time_seconds_bucket", "request_time_per_output_token_seconds_bucket",
        "request_prompt_tokens_bucket", "request_generation_tokens_bucket", "request_params_max_tokens_bucket",
        "request_max_num_generation_tokens_sum", "iteration_tokens_total_bucket",
    ):  # fmt: skip
        assert f"vllm:{name}{{" in text and 'model_name="tiny"' in text
    steps = re.search(r'jaxstack:engine_steps_total\{model_name="tiny"\} (\S+)', text)
    assert steps is not None and float(steps[1]) > 0 and "jaxstack:engine_steps_with_drafts_total{" in text
    found = re.search(r'vllm:generation_tokens_total\{model_name="tiny"\} (\S+)', text)
    assert found is not None and float(found[1]) == engine.stats.generated_tokens > 0
    counts = {
        name: float(re.findall(rf'vllm:{name}_count{{model_name="tiny"}} (\S+)', text)[0])
        for name in ("e2e_request_latency_seconds", "request_prompt_tokens", "request_decode_time_seconds")
    }
    assert counts["e2e_request_latency_seconds"] == counts["request_prompt_tokens"] > 0
    sums = [float(re.findall(r"vllm:request_max_num_generation_tokens_sum\S+ (\S+)", one)[0]) for one in (before, text)]
    assert sums[1] - sums[0] == 7
    computed = [float(re.findall(r"vllm:iteration_tokens_total_sum\S+ (\S+)", one)[0]) for one in (before, text)]
    assert computed[1] - computed[0] == 4 * (len([256, *b"a"]) + 7), "of four prompts and answers"
    assert re.search(r'vllm:iteration_tokens_total_bucket\{le="\+Inf",model_name="tiny"\} (\S+)', text)
    summed = re.findall(r"vllm:iteration_tokens_total_sum\S+ (\S+)", add_up([before, text], []))
    assert float(summed[0]) == sum(computed)
    assert 0 < counts["request_decode_time_seconds"] <= counts["request_prompt_tokens"]


def test_a_key_may_have_any_characters():
    server, port = listen(Echo(), api_key="schlüssel")
    for key in ("schlüssel".encode(), "schlüssel".encode("latin-1")):
        assert ask(port, "/v1/models", headers={"Authorization": b"Bearer " + key})[0] == 200
    assert ask(port, "/v1/models", headers={"Authorization": "Bearer schlussel"})[0] == 401
    server.should_exit = True


def test_a_body_that_is_too_large_and_sent_in_one_piece_gets_its_error():
    server, port = listen(Echo(), LIMITS.model_copy(update={"max_body_bytes": 2**20}))
    assert ask(port, COMPLETE, {"prompt": "a" * 6 * 2**20})[0] == 413
    server.should_exit = True


def test_a_port_is_taken_from_the_start():
    from jaxstack.errors import ConfigError
    from jaxstack.serve.listen import bind

    with bind("127.0.0.1", 0) as first, pytest.raises(ConfigError, match="cannot listen"):
        bind("127.0.0.1", first.getsockname()[1])


class Silent(Echo):
    """Never answers."""

    def submit(self, prompt, max_tokens, sampling=None, **options) -> Request:
        return Request(prompt, max_tokens, cancel=lambda request: request.notify("cancelled"))


def test_requests_that_outlast_the_shutdown_get_an_error():
    """Both a whole answer and a stream; `Server.end` is what SIGTERM calls after `server.drain` seconds."""
    from jaxstack.serve.http import Server
    from jaxstack.serve.listen import bind

    place = bind("127.0.0.1", 0)
    application = Server(Silent(), TOKENIZER, "tiny", LIMITS)

    class Ending(uvicorn.Server):
        async def shutdown(self, sockets=None) -> None:
            application.end()
            await super().shutdown(sockets)

    server = Ending(uvicorn.Config(application.app, log_level="warning", lifespan="off"))
    threading.Thread(target=server.run, kwargs={"sockets": [place]}, daemon=True).start()
    port = place.getsockname()[1]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        whole = pool.submit(ask, port, COMPLETE, {"prompt": "a"})
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        body = json.dumps({"prompt": "a", "stream": True})
        connection.request("POST", COMPLETE, body, {"Content-Type": "application/json"})
        stream = connection.getresponse()
        time.sleep(0.3)
        server.should_exit = True
        status, answer, _ = whole.result()
        assert status == 503 and "shutting down" in answer["error"]["message"]
        assert "shutting down" in stream.read().decode()


def test_on_this_machine_only_its_own_names_are_served():
    server, port = listen(Echo(), LIMITS.model_copy(update={"allowed_hosts": ("proxy.example",)}), loopback=True)
    for host, status in (("evil.com", 403), (f"evil.com:{port}", 403), ("localhost", 200), ("proxy.example:80", 200)):
        assert ask(port, "/health", headers={"Host": host})[0] == status
    server.should_exit = True
