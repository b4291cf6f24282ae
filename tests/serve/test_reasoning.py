"""Reasoning of answers, told from the answer by the form in which the chat template writes it."""

import datetime
import threading

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxstack.data.chat_template import ChatTemplate
from jaxstack.data.load_tokenizer import SubwordTokenizer
from jaxstack.data.reasoning_format import ReasoningFormat, derive_reasoning_format
from jaxstack.decoding.requests import Request
from jaxstack.serve.chat_format import ReasoningReader
from jaxstack.serve.config import ServerConfig
from tests.serve.test_http import Echo, listen

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"]
TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
ASSISTANT = "{% if add_generation_prompt %}<|im_start|>assistant\n"
TEMPLATES = {
    "kept": TURNS + "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}" + ASSISTANT + "{% if enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}",
    "asked": TURNS + "{% if m.role == 'assistant' %}[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}" + ASSISTANT + "[THINK]{% endif %}",
    "left out": TURNS + "{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}" + ASSISTANT + "{% endif %}",
    "channels": "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.thinking %}<|start|>assistant<|channel|>"
    "analysis<|message|>{{ m.thinking }}<|end|>{% endif %}<|start|>assistant<|channel|>final<|message|>"
    "{{ m.content }}<|return|>{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
    "none": TURNS + "{{ m.content }}<|im_end|>\n{% endfor %}" + ASSISTANT + "{% endif %}",
}
"""As of Qwen3, Magistral (the prompt opens the reasoning), DeepSeek-R1, gpt-oss, and of models without reasoning."""
CHANNELS = ReasoningFormat(
    "<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant", "<|channel|>final<|message|>"
)
FORMATS = {
    "kept": ReasoningFormat("<think>", "</think>"),
    "asked": ReasoningFormat("[THINK]", "[/THINK]"),
    "left out": ReasoningFormat("<think>", "</think>"),
    "channels": CHANNELS,
    "none": None,
}
THOUGHT = "2 < 3,\n\nso"
ANSWERS = {
    "kept": f"<think>\n{THOUGHT}\n</think>\n\nIt is <b>5.",
    "asked": f"{THOUGHT}[/THINK]It is <b>5.",
    "left out": f"<think>\n{THOUGHT}</think>\n\nIt is <b>5.",
    "channels": f"<|channel|>analysis<|message|>{THOUGHT}<|end|>"
    "<|start|>assistant<|channel|>final<|message|>It is <b>5.",
}


@pytest.fixture(scope="module")
def tokenizer() -> SubwordTokenizer:
    """One id for each byte, and special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    model.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    model.add_special_tokens(["<s>", *SPECIAL])
    return SubwordTokenizer(model, "file", len(alphabet))


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_form_is_read_from_the_template(name):
    template = ChatTemplate(TEMPLATES[name], {}, datetime.date(2024, 7, 26))
    found = derive_reasoning_format(template, SPECIAL)
    assert found == FORMATS[name]
    if found is not None:
        assert found.opens(template.render([{"role": "user", "content": "a"}], prompt=True)) == (name == "asked")


def split(form: ReasoningFormat, text: str, size: int, *, begun: bool = False) -> tuple[str, str]:
    """Push a text in pieces; return its reasoning and its answer."""
    reader = ReasoningReader(form, begun=begun)
    pieces = [reader.push(text[at : at + size]) for at in range(0, len(text), size)]
    reasoning, answer = zip(*pieces, reader.finish(), strict=True)
    return "".join(reasoning), "".join(answer)


@pytest.mark.parametrize("size", [1, 5, 500])
@pytest.mark.parametrize("name", ANSWERS)
def test_reasoning_is_told_from_the_answer_piece_by_piece(name, size):
    form = FORMATS[name]
    begun = name == "asked"
    whole = ANSWERS[name]
    assert split(form, whole, size, begun=begun) == (THOUGHT, "It is <b>5.")
    cut = whole[: whole.index("so") + 2]
    assert split(form, cut, size, begun=begun) == (THOUGHT, "")
    for text in ("It <thin", "x", "[1]"):
        assert split(form, text, size, begun=begun) == ((text, "") if begun else ("", text))
    assert split(CHANNELS, "<|channel|>final<|message|> 5", size) == ("", "5")
    again = f"<|channel|>analysis<|message|>a<|end|>{ANSWERS['channels']}"
    assert split(CHANNELS, again, size) == ("a" + THOUGHT, "It is <b>5.")


class Says(Echo):
    """Answers with a given text, without a model."""

    def __init__(self, tokenizer: SubwordTokenizer, text: str):
        super().__init__()
        self.tokenizer = tokenizer
        self.stop_tokens = frozenset({tokenizer.special_tokens["<|im_end|>"]})
        self.tokens = tokenizer.encode_marked([text])[0][0].tolist()
        self.prompts = list[list[int]]()

    def submit(self, prompt, max_tokens, sampling=None, **options) -> Request:
        request = Request(prompt, max_tokens, cancel=lambda request: request.notify("cancelled"))
        self.prompts.append(prompt)

        def answer():
            for token in self.tokens[:max_tokens]:
                request.append([token])
                request.notify()
            request.notify("stop" if max_tokens >= len(self.tokens) else "length")

        threading.Thread(target=answer).start()
        return request


@pytest.mark.parametrize("name", ANSWERS)
def test_a_chat_has_its_reasoning_apart(tokenizer, tmp_path, name):
    """Whole, streamed and cut off, by OpenAI's client; a later request gives it to the template."""
    openai = pytest.importorskip("openai")
    (tmp_path / "chat.jinja").write_text(TEMPLATES[name])
    engine = Says(tokenizer, ANSWERS[name])
    config = ServerConfig(chat_template=str(tmp_path / "chat.jinja"))
    server, port = listen(engine, config, tokenizer=tokenizer)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "2 + 3?"}]}
    whole = client.chat.completions.create(**asked)
    message = whole.choices[0].message
    assert message.content == "It is <b>5." and message.reasoning_content == THOUGHT
    before = ANSWERS[name][: ANSWERS[name].index("It") - len("<|start|>assistant<|channel|>final<|message|>")]
    count = whole.usage.completion_tokens_details.reasoning_tokens
    if name == "channels":
        assert count == len(tokenizer.encode_marked([before])[0][0])
    assert 0 < count < whole.usage.completion_tokens
    pieces = [piece.choices[0].delta for piece in client.chat.completions.create(stream=True, **asked)]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in pieces) == THOUGHT
    assert "".join(delta.content or "" for delta in pieces) == "It is <b>5."
    cut = client.chat.completions.create(max_tokens=14 if name == "channels" else 10, **asked).choices[0]
    assert cut.finish_reason == "length" and cut.message.content is None
    assert THOUGHT.startswith(cut.message.reasoning_content)
    back = [*asked["messages"], message, {"role": "user", "content": "Sure?"}]
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    client.chat.completions.create(model="tiny", messages=back, extra_body=off, reasoning_effort="low")
    written = tokenizer.decode_marked(engine.prompts[-1])
    assert (THOUGHT in written) == (name != "left out")
    assert written.endswith("</think>\n\n") == (name == "kept")
    with pytest.raises(openai.BadRequestError, match="chat_template_kwargs cannot set 'messages'"):
        client.chat.completions.create(extra_body={"chat_template_kwargs": {"messages": []}}, **asked)
    server.should_exit = True
