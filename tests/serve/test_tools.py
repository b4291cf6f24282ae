"""Tool calls of answers, in the formats of Qwen (Hermes), Llama 3 and Mistral, whole and piece by piece."""

import json

import numpy as np
import pytest

from jaxstack.config.loader import build_component
from jaxstack.data.tokenizer import ByteTokenizer
from jaxstack.data.tool_calls import EXAMPLE, derive_format
from jaxstack.errors import ConfigError
from jaxstack.serve.chat_request import ChatRequest
from jaxstack.serve.grammar import Grammars
from jaxstack.serve.schema_ids import with_own_ids
from jaxstack.serve.tools import ToolReader, Tools

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": SCHEMA}}
QUESTION = {"role": "user", "content": "How is it in Oslo?"}
FORMS = {
    "qwen": ('<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>', "\n"),
    "llama3": ('{"name": "%s", "parameters": %s}', None),
    "mistral": ('[TOOL_CALLS][{"name": "%s", "arguments": %s, "id": "call00000"}]', None),
}


def reader(name: str, tools: Tools | None = None) -> ToolReader:
    text, join = FORMS[name]
    one = text % (EXAMPLE.name, json.dumps(EXAMPLE.arguments))
    form = derive_format(one, None if join is None else join.join([one, one]))
    assert form is not None
    return ToolReader(tools or Tools([TOOL]), form)


def split(found: ToolReader, text: str, size: int) -> tuple[str, list[dict]]:
    """Push a text in pieces; nothing of a call comes before the end."""
    said = "".join(found.push(text[at : at + size]) for at in range(0, len(text), size))
    rest, calls = found.finish()
    return said + rest, calls


@pytest.mark.parametrize("size", [1, 7, 500])
@pytest.mark.parametrize("name", FORMS)
def test_calls_are_told_from_text(name, size):
    call = FORMS[name][0] % ("weather", '{"city": "Tromsø"}')
    said = "" if name == "llama3" else "I look <b>it</b> up [now]."
    text, (entry,) = split(reader(name), f"{said}\n\n{call}", size)
    assert text == said and entry["type"] == "function" and entry["id"].startswith("call_")
    assert entry["function"] == {"name": "weather", "arguments": '{"city": "Tromsø"}'}
    for other in ("It is cold [there] <tool", "", " \n", "x{}"):
        assert split(reader(name), other, size) == (other, [])
    broken = call[: call.index("Tromsø")]
    assert split(reader(name), broken, size) == (broken, [])


def chat(**fields) -> ChatRequest:
    return build_component(ChatRequest, {"messages": [QUESTION], **fields}, "the request")


def test_a_chosen_tool_is_a_form_of_the_answer():
    other = {"type": "function", "function": {"name": "now"}}
    free = chat(tools=[TOOL, other])
    assert free.grammar is None and free.chosen_tools is not None and [*free.chosen_tools.described] == [TOOL, other]
    assert chat(tools=[TOOL], tool_choice="none").chosen_tools is None
    named = chat(tools=[other, TOOL], tool_choice={"type": "function", "function": {"name": "weather"}})
    assert named.grammar == ("json", SCHEMA) and named.chosen_tools is not None
    text, (entry,) = split(ToolReader(named.chosen_tools, None), '{"city": "Oslo"}', 3)
    assert text == "" and entry["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    required = chat(tools=[TOOL, other], tool_choice="required").chosen_tools
    assert required is not None and required.schema is not None and required.schema["minItems"] == 1
    calls = [{"name": "now", "parameters": {}}, {"name": "weather", "parameters": {"city": "Oslo"}}]
    text, entries = split(ToolReader(required, None), json.dumps(calls), 9)
    assert [entry["function"]["name"] for entry in entries] == ["now", "weather"] and text == ""
    assert split(ToolReader(required, None), '[{"name": "no', 9) == ('[{"name": "no', [])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        (
            {"tools": [{"type": "function", "function": {"name": "x", "parameters": {"type": "array"}}}]},
            "parameters must be a JSON schema of type object, by name; found type 'array'",
        ),
        ({"tool_choice": "required"}, "tool_choice needs tools to choose from; add tools"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            r"tool_choice names 'x', which is none of the tools; choose one of \['weather'\]",
        ),
        ({"messages": [{**QUESTION, "tool_calls": [{"id": "1", "function": {"name": "x"}}]}]}, "'assistant' only"),
    ],
)
def test_wrong_tools_are_told_why(fields, message):
    with pytest.raises(ConfigError, match=message):
        chat(**fields)


def test_calls_in_messages_reach_the_template_as_mappings():
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    body = chat(messages=[QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}])
    (found,) = body.messages[1].as_template_input["tool_calls"]
    assert found["function"] == {"name": "weather", "arguments": {"city": "Oslo"}}
    call["function"]["arguments"] = "[1]"
    body = chat(messages=[QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}])
    with pytest.raises(ValueError, match="must be the text of a JSON object; those of '1' are not"):
        _ = body.messages[1].as_template_input
    with pytest.raises(ValueError, match="tool_choice asks for a call, response_format or the like"):
        _ = chat(tools=[TOOL], tool_choice="required", response_format={"type": "json_object"}).grammar


PLACE = "https://example.com/place"


@pytest.mark.parametrize(
    ("reference", "root", "place"),
    [
        ("#/$defs/Place", None, None),
        ("#/$defs/Place", "https://example.com/arguments", None),
        ("https://example.com/arguments#/$defs/Place", "https://example.com/arguments", None),
        ("place", "https://example.com/arguments", "place"),
        (PLACE, None, PLACE),
        ("arguments#/$defs/Place", "arguments", None),
    ],
)
def test_schemas_of_chosen_tools_may_refer_to_their_own_definitions(reference, root, place):
    """As those that pydantic writes do: of one tool and of a list of calls, two of which have the same names."""
    pytest.importorskip("llguidance")

    def tool(name: str, kind: str) -> dict:
        inner = {"type": "object", "properties": {"inner": {"$ref": reference}}, "required": ["inner"]}
        defined = {"type": kind} | ({} if place is None else {"$id": place})
        named = {} if root is None else {"$id": root}
        return {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {**named, **inner, "additionalProperties": False, "$defs": {"Place": defined}},
            },
        }

    tools = [tool("first", "boolean"), tool("second", "integer")]
    grammars = Grammars(ByteTokenizer(), [256])

    def fits(text: str, **fields) -> bool:
        found = chat(tools=tools, **fields).grammar
        assert found is not None
        constraint = grammars.compile(*found)
        mask = np.zeros(9, np.int32)
        for token in text.encode():
            constraint.fill_mask(mask)
            if not mask.view(np.uint32)[token // 32] >> token % 32 & 1:
                return False
            constraint.accept(token)
        return True

    for name, value, other in (("first", "true", "3"), ("second", "3", "true")):
        chosen = {"type": "function", "function": {"name": name}}
        written = '{"inner": %s}'
        assert fits(written % value, tool_choice=chosen) and not fits(written % other, tool_choice=chosen)
        written = f'[{{"name": "{name}", "parameters": {written}}}]'
        assert fits(written % value, tool_choice="required") and not fits(written % other, tool_choice="required")


def test_what_looks_like_a_name_in_the_values_of_a_schema_stays():
    schema = {
        "properties": {"$id": {"const": {"$ref": "urn:a", "$id": "urn:b"}}, "$ref": {"enum": [{"$id": "urn:b"}]}},
        "$defs": {"b": {"$id": "urn:b", "items": {"$ref": "#"}, "anyOf": [{"$ref": "urn:other"}]}},
    }
    found = with_own_ids(schema, "urn:a")
    assert found["properties"] == schema["properties"] and found["$id"] == "urn:a"
    assert found["$defs"]["b"] == {**schema["$defs"]["b"], "$id": "urn:a:urn%3Ab"}


@pytest.mark.parametrize("name", ["default", "enum", "$defs", "properties"])
def test_what_a_schema_has_by_the_names_of_keywords_is_renamed(name):
    schema = {"$id": PLACE, "properties": {name: {"$ref": f"{PLACE}#/$defs/{name}"}}, "$defs": {name: {"$id": "b"}}}
    found = with_own_ids(schema, "urn:a")
    assert found["properties"] == {name: {"$ref": f"urn:a#/$defs/{name}"}}
    assert found["$defs"] == {name: {"$id": "urn:a:https%3A%2F%2Fexample.com%2Fb"}}


@pytest.mark.parametrize("keyword", ["$id", "$ref"])
def test_names_of_schemas_that_are_no_uris_are_told(keyword):
    with pytest.raises(ValueError, match=r"must be URIs; 'http://\[x' is none"):
        with_own_ids({"properties": {"a": {keyword: "http://[x"}}}, "urn:a")
