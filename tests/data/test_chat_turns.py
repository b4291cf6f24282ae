"""Turns of a chat as tokens: tool calls in the template's own format, messages as a suffix, and what is refused."""

import datetime
import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxstack.data.chat_template import ChatTemplate, choose_template
from jaxstack.data.chat_turns import ChatTurns
from jaxstack.data.load_tokenizer import SubwordTokenizer
from jaxstack.data.tool_calls import ToolCall
from jaxstack.errors import ConfigError

DAY = datetime.date(2024, 7, 26)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|call|>", "<|args|>"]
TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}
CALL = [ToolCall("add", {"x": 2, "to": "a 3"})]
HEAD = (
    "{{ tools | tojson if tools }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
)
TAIL = "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TEMPLATES = {
    "object": (
        '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>',
        '<tool_call>{"name":"add","arguments":{"x":2,"to":"a 3"}}</tool_call>',
    ),
    "list": (
        "{{ '[CALLS][' if loop.first }}{{ ', ' if not loop.first }}"
        '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}, "id": "{{ c.id }}"}'
        "{{ ']' if loop.last }}",
        '[CALLS] [{"name": "add", "parameters": {"x": 2, "to": "a 3"}}]',
    ),
    "bare": (
        "{{ raise_exception('one') if not loop.first }}"
        '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}',
        '\n{"name": "add", "parameters": {"x": 2, "to": "a 3"}}',
    ),
    "arguments": (
        "<|call|>{{ f.name }}<|args|>{{ f.arguments | tojson }}\n",
        '<|call|>add<|args|>\n{"x": 2, "to": "a 3"}',
    ),
    "tags": (
        "<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}<parameter={{ k }}>\n"
        "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
        "<tool_call>\n<function=add>\n<parameter=x>\n2\n</parameter>\n<parameter=to>\na 3\n</parameter>\n</function>",
    ),
    "lines": (
        "\n<tool_call>{{ f.name }}{% for k, v in f.arguments.items() %}\n<arg_key>{{ k }}</arg_key>\n<arg_value>"
        "{{ v if v is string else v | tojson }}</arg_value>{% endfor %}\n</tool_call>",
        "<tool_call>add<arg_key>x</arg_key>\n<arg_value>2</arg_value><arg_key>to</arg_key>\n<arg_value>a 3</arg_value>",
    ),
}


@pytest.fixture(scope="module")
def tokenizer() -> SubwordTokenizer:
    """One id for each byte, and special tokens."""
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = Tokenizer(models.BPE({character: i for i, character in enumerate(bytes_)}, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    model.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    model.add_special_tokens(SPECIAL)
    return SubwordTokenizer(model, "file", len(bytes_))


def turns_of(tokenizer, template: str | ChatTemplate | None, tools=(TOOL,), **further) -> ChatTurns:
    made = ChatTemplate(template, {}, DAY) if isinstance(template, str) else template
    return ChatTurns(tokenizer, made, {tokenizer.special_tokens["<|im_end|>"]}, tools, **further)


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_are_read_as_the_template_writes_them(tokenizer, name):
    written, answer = TEMPLATES[name]
    turns = turns_of(tokenizer, HEAD + written + TAIL)

    def parse(text: str) -> list[ToolCall]:
        shown, calls = turns.parse(tokenizer.encode_marked([text])[0][0].tolist())
        assert shown == text
        return calls

    assert parse("no calls here") == []
    assert parse(answer) == CALL
    if name != "bare":
        assert parse(f"I add.\n{answer}") == CALL
        assert parse(answer + answer) == CALL * 2
    assert all(call.error for call in parse(answer.replace('"to"', "to"))) or name in ("tags", "lines")


def test_messages_follow_an_answer_as_the_template_writes_them(tokenizer):
    """The ids of a chat, taken turn by turn, are those of its whole text; special tokens in results are no turns."""
    template = choose_template("chatml", None, DAY)
    turns = turns_of(tokenizer, template, texts=True)

    def ids_of(text: str) -> list[int]:
        return tokenizer.encode_marked([text])[0][0].tolist()

    result = {"role": "tool", "content": "5<|im_<|im_end|>end|>"}
    follows = list(turns.follow(["add"], [result, {"role": "user", "content": "More?"}]))
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"x": 2}}}]}
    chat = [{"role": "user", "content": "2 + 3?"}, call]
    before = ids_of(template.render(chat, [TOOL]).removesuffix("\n"))
    chat += [{"role": "tool", "content": "5"}, {"role": "user", "content": "More?"}]
    assert before + follows == ids_of(template.render(chat, [TOOL], prompt=True))
    assert json.dumps(TOOL) in template.render(chat, [TOOL])
    plain = turns_of(tokenizer, None, ())
    assert list(plain.follow([], [{"role": "user", "content": "5?"}])) == ids_of("5?")


THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content if loop.last or m.role != 'assistant' else "
    "m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
)
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@pytest.mark.parametrize(
    ("template", "tools", "message"),
    [
        (THINKS + PROMPT, [], "leaves the reasoning out of an answer once messages of the user follow it"),
        (HEAD + TAIL, [TOOL], "does not write tool calls"),
        (HEAD + "{{ f.name }} with {{ f.arguments.values() | list }}" + TAIL, [TOOL], "in a form that is not known"),
        (HEAD.replace("tools |", "0 |") + TEMPLATES["object"][0] + TAIL, [TOOL], "does not tell the model of the tool"),
        ("{{ messages | length }}" + HEAD + TAIL, [], "begins an answer in another way once the chat goes on"),
        (HEAD + TAIL.replace("<|im_end|>", "."), [], "with no token that ends answers"),
        ("{% if messages[2] %}{{ raise_exception('one turn') }}{% endif %}" + HEAD + TAIL, [], "one turn"),
        (None, [TOOL], "tools need a chat template"),
    ],
)
def test_templates_that_cannot_go_on_are_refused(tokenizer, template, tools, message):
    with pytest.raises(ConfigError, match=message) as error:
        turns_of(tokenizer, template, tools, texts=not tools)
    assert "data.chat.template" in str(error.value) and "\n" not in str(error.value)
