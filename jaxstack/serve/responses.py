"""JSON and stream events of OpenAI's responses API."""

import dataclasses
import json
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from jaxstack.serve.answers import Answers, Refused, usage_of
from jaxstack.serve.responses_request import ResponsesRequest, tools_of
from jaxstack.serve.token_details import Part, TokenDetails


class ResponseEnvelope:
    """Builds the JSON response and the stream events for one request to /v1/responses."""

    def __init__(self, model: str, request: ResponsesRequest):
        self._head = {
            "id": f"resp_{secrets.token_hex(16)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
        }
        form = {"type": "text"}
        if request.text is not None and request.text.format is not None:
            form = request.text.format.model_dump(by_alias=True, exclude_none=True)
        effort = None if request.reasoning is None else request.reasoning.effort
        choice = "auto" if request.tool_choice is None else request.tool_choice
        self._settings = {
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "tools": tools_of(request),
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "text": {"format": form},
            "reasoning": {"effort": effort, "summary": None},
            "top_logprobs": request.top_logprobs or 0,
            "truncation": "disabled",
            "previous_response_id": None,
            "store": False,
            "metadata": {},
        }

    def whole(self, answers: Answers, part: Part) -> dict[str, Any]:
        """Return the response, given the whole answer."""
        writer = EventWriter(answers.answers[0].details)
        for _ in (*writer.add(part), *writer.finish(part)):
            pass
        return self.response(writer.items, part.finish_reason, usage_of(answers, 1))

    def response(
        self, items: list[dict[str, Any]], reason: str | None, usage: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the response with the items of its output, before its end (reason None) or after it."""
        status = {None: "in_progress", "length": "incomplete"}.get(reason, "completed")
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": items,
            "usage": None if usage is None else _usage(usage),
            **self._settings,
        }

    async def events(self, answers: Answers) -> AsyncIterator[str]:
        """Yield the answer to a request as server-sent events, in OpenAI's order."""
        writer = EventWriter(answers.answers[0].details)
        for kind in ("response.created", "response.in_progress"):
            yield writer.write({"type": kind, "response": self.response([], None)})
        last = Part("")
        try:
            async for _, part in answers.stream():
                for event in writer.add(part):
                    yield writer.write(event)
                last = part
        except Refused as error:
            failed = {**self.response(writer.items, None), "status": "failed"}
            failed["error"] = {"code": "server_error", "message": str(error)}
            yield writer.write({"type": "response.failed", "response": failed})
            return
        for event in writer.finish(last):
            yield writer.write(event)
        ended = self.response(writer.items, last.finish_reason, usage_of(answers, 1))
        yield writer.write({"type": f"response.{ended['status']}", "response": ended})


@dataclasses.dataclass
class EventWriter:
    """Makes the events of an answer from its parts, and the items of its output.

    Attributes:
      details: describes the tokens of the text.
      items: items of the output so far, the last one with the text of the events so far.
    """

    details: TokenDetails
    items: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    _count: int = 0

    def write(self, event: Mapping[str, Any]) -> str:
        """Return an event as text, numbered in order."""
        numbered = {**event, "sequence_number": self._count}
        self._count += 1
        return f"event: {event['type']}\ndata: {json.dumps(numbered, ensure_ascii=False)}\n\n"

    def add(self, part: Part) -> Iterator[dict[str, Any]]:
        """Add a part of the answer; yield its events."""
        if part.reasoning:
            yield from self._extend("reasoning", part.reasoning, {})
        if part.text:
            yield from self._extend("message", part.text, {"logprobs": self.details.describe_text(part)})

    def finish(self, last: Part) -> Iterator[dict[str, Any]]:
        """End the answer; yield the last events. A call comes as one item, in the last part."""
        status = "incomplete" if last.finish_reason == "length" else "completed"
        if not self.items and not last.calls:
            yield from self._open("message")
        yield from self._close(status)
        for call in last.calls:
            yield from self._call(call)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _extend(self, kind: str, text: str, more: Mapping[str, list[Any]]) -> Iterator[dict[str, Any]]:
        if not self.items or self.items[-1]["type"] != kind:
            yield from self._close("completed")
            yield from self._open(kind)
        content = self.items[-1]["content"][0]
        content["text"] += text
        for name, entries in more.items():
            content[name] += entries
        yield {"type": f"response.{_NAMES[kind]}.delta", **self._place, "content_index": 0, "delta": text, **more}

    def _open(self, kind: str) -> Iterator[dict[str, Any]]:
        item: dict[str, Any] = {"id": f"{_PREFIXES[kind]}_{secrets.token_hex(16)}", "type": kind}
        item |= {"status": "in_progress", "content": []}
        item |= {"role": "assistant"} if kind == "message" else {"summary": [], "encrypted_content": None}
        self.items.append(item)
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": {**item}}
        part = {"type": _NAMES[kind], "text": ""}
        part |= {"annotations": [], "logprobs": []} if kind == "message" else {}
        item["content"] = [{**part, "logprobs": []} if kind == "message" else {**part}]
        yield {"type": "response.content_part.added", **self._place, "content_index": 0, "part": part}

    def _close(self, status: str) -> Iterator[dict[str, Any]]:
        """End the newest item of text, if there is one."""
        if not self.items:
            return
        item = self.items[-1]
        item["status"] = status
        kind = item["type"]
        part = item["content"][0]
        ended = {"type": f"response.{_NAMES[kind]}.done", **self._place, "content_index": 0, "text": part["text"]}
        yield ended | ({"logprobs": part["logprobs"]} if kind == "message" else {})
        yield {"type": "response.content_part.done", **self._place, "content_index": 0, "part": part}
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def _call(self, call: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        item = {"id": f"fc_{secrets.token_hex(16)}", "type": "function_call", "call_id": call["id"], "name": name}
        self.items.append({**item, "arguments": arguments, "status": "completed"})
        number = len(self.items) - 1
        opened = {**item, "arguments": "", "status": "in_progress"}
        yield {"type": "response.output_item.added", "output_index": number, "item": opened}
        yield {"type": "response.function_call_arguments.delta", **self._place, "delta": arguments}
        ended = {"name": name, "arguments": arguments}
        yield {"type": "response.function_call_arguments.done", **self._place, **ended}
        yield {"type": "response.output_item.done", "output_index": number, "item": self.items[-1]}


_PREFIXES = {"reasoning": "rs", "message": "msg"}
_NAMES = {"reasoning": "reasoning_text", "message": "output_text"}
"""Types of the part of an item of text, by the type of the item."""


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }
