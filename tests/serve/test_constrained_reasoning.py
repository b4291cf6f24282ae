"""Structured output of models that reason first: free reasoning, then an answer of the given form."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxstack.data.load_tokenizer import SubwordTokenizer
from jaxstack.data.reasoning_format import ReasoningFormat
from jaxstack.decoding.engine import Engine
from jaxstack.serve.chat_format import AfterReasoning, ReasoningReader
from jaxstack.serve.config import ServerConfig
from jaxstack.serve.tools import ToolReader, Tools
from tests.serve.test_http import CITY, SCHEMA, TOOL, ask, listen
from tests.serve.test_reasoning import CHANNELS, SPECIAL, TEMPLATES
from tests.serve.tiny import CONFIG, open_tiny

pytest.importorskip("llguidance")

ENDS = {"kept": "</think>", "asked": "[/THINK]", "channels": "<|end|>"}
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}'


@pytest.fixture(scope="module")
def tokenizer() -> SubwordTokenizer:
    """One id for each byte, and special tokens, the tags of reasoning too."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    model.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tags = ["<think>", "</think>", "[THINK]", "[/THINK]", "<|constrain|>"]
    model.add_special_tokens(["<s>", *SPECIAL, *tags])
    return SubwordTokenizer(model, "file", len(alphabet))


@pytest.fixture(scope="module")
def engine(tokenizer):
    config = CONFIG.model_copy(update={"vocab_size": tokenizer.vocab_size, "max_position_embeddings": 512})
    stops = [tokenizer.special_tokens["<|return|>"], tokenizer.special_tokens["<|im_end|>"]]
    with Engine(open_tiny(config=config), vocab_size=tokenizer.vocab_size, stop_tokens=stops, warm_up=False) as engine:
        yield engine


@pytest.mark.longer
@pytest.mark.parametrize("name", ENDS)
def test_an_answer_of_a_given_form_comes_after_reasoning(tokenizer, engine, tmp_path, name):
    """Of a schema, or as a call that it must make. Without reasoning the whole answer has the form."""
    (tmp_path / "chat.jinja").write_text(TEMPLATES[name])
    server, port = listen(engine, ServerConfig(chat_template=str(tmp_path / "chat.jinja")), tokenizer=tokenizer)
    form = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    bias = {tokenizer.special_tokens[ENDS[name]]: 8}
    if name == "kept":
        bias[tokenizer.special_tokens["<think>"]] = 9
    asked = {"messages": [{"role": "user", "content": "Where?"}], "max_tokens": 300, "seed": 1}
    biased = {"logit_bias": {str(token): value for token, value in bias.items()}}
    seen = set()
    for seed in range(3):
        status, found, _ = ask(port, "/v1/chat/completions", asked | biased | {"response_format": form, "seed": seed})
        assert status == 200, found
        message = found["choices"][0]["message"]
        assert json.loads(message["content"])["city"] in CITY["enum"] and found["choices"][0]["finish_reason"] == "stop"
        reasoned = found["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert ENDS[name] not in message.get("reasoning_content", "")
        seen.add(reasoned > 0)
    assert True in seen
    chosen = asked | biased | {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    _, found, _ = ask(port, "/v1/chat/completions", chosen)
    (call,) = found["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "weather" and json.loads(call["function"]["arguments"])["city"] in CITY["enum"]
    server.should_exit = True


class Digits:
    """Allows the digits, and ends after two."""

    def __init__(self, tokenizer: SubwordTokenizer):
        self.ids = tokenizer.encode("0123456789").tolist()
        self.taken: list[int] = []

    def fill_mask(self, mask: np.ndarray) -> None:
        mask[:] = 0
        for token in self.ids:
            mask[token // 32] |= np.uint32(1 << token % 32).astype(np.int32)

    def accept(self, token: int) -> bool:
        assert token in self.ids
        self.taken.append(token)
        return len(self.taken) < 2


def allowed(constraint: AfterReasoning, tokenizer: SubwordTokenizer) -> set[int]:
    mask = np.zeros(-(-tokenizer.vocab_size // 32), np.int32)
    constraint.fill_mask(mask)
    return {token for token in range(tokenizer.vocab_size) if mask.view(np.uint32)[token // 32] >> token % 32 & 1}


def test_the_form_begins_where_the_reasoning_ends(tokenizer):
    """In each form of reasoning; what is around it comes as the template writes it, and no stop token before."""
    think = ReasoningFormat("<think>", "</think>")
    stop = tokenizer.special_tokens["<|return|>"]
    every = set(range(tokenizer.vocab_size))
    for form, begun, text in (
        (think, False, "<think>so</think>42"),
        (think, False, "42"),
        (think, True, "so</think>42"),
        (ReasoningFormat("(", "so it is:"), True, "well, so it is:42"),
        (CHANNELS, False, "<|channel|>analysis<|message|>1<|end|><|start|>assistant<|channel|>final<|message|>42"),
        (CHANNELS, False, "<|channel|>final<|message|>42"),
    ):
        digits = Digits(tokenizer)
        constraint = AfterReasoning(digits, form, tokenizer, [stop], begun=begun)
        goes_on = []
        for token in tokenizer.encode_marked([text])[0][0].tolist():
            found = allowed(constraint, tokenizer)
            assert token in found and stop not in found, text
            assert len(found) < 12 or found == every - {stop}
            goes_on.append(constraint.accept(token))
        assert tokenizer.decode(digits.taken) == "42" and goes_on == [True] * (len(goes_on) - 1) + [False]


def test_calls_of_gpt_oss_are_read_as_the_model_writes_them(tokenizer):
    """With the channel before the function, as the model does, or after it, as its template; piece by piece."""
    from jaxstack.data.tool_calls import EXAMPLE, derive_format

    written = "{} to=functions.%s<|channel|>commentary json<|message|>%s<|call|>".format("")
    form = derive_format(written % (EXAMPLE.name, json.dumps(EXAMPLE.arguments)), None)
    assert form is not None and form.openings == ("to=functions.", "<|channel|>commentary to=functions.")
    for call in (CALL, written % ("weather", '{"city": "Oslo"}'), CALL.replace(" <|constrain|>json", "")):
        for size in (1, 7, 500):
            reader = ToolReader(Tools([TOOL]), form)
            said = "".join(reader.push(call[at : at + size]) for at in range(0, len(call), size))
            rest, calls = reader.finish()
            assert (said + rest).strip() == "" and len(calls) == 1, call
            assert calls[0]["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    reader = ToolReader(Tools([TOOL]), form)
    plain = "It is <|channel|>commentary, and to=x"
    assert reader.push(plain) + reader.finish()[0] == plain
    start = "<|start|>assistant"
    whole = f"<|channel|>analysis<|message|>hm<|end|>{start}<|channel|>commentary<|message|>I look.<|end|>{start}{CALL}"
    for size in (1, 7, 500):
        reasons = ReasoningReader(CHANNELS)
        reader = ToolReader(Tools([TOOL]), form)
        parts = [*(reasons.push(whole[at : at + size]) for at in range(0, len(whole), size)), reasons.finish()]
        said = "".join(reader.push(text) for _, text in parts)
        assert ("".join(thought for thought, _ in parts), said) == ("hm", "I look.") and len(reader.finish()[1]) == 1
