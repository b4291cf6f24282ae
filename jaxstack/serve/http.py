"""The HTTP server: OpenAI-compatible routes, health check, metrics and a chat page."""

import asyncio
import contextlib
import dataclasses
import ipaddress
import json
import re
import secrets
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxstack.data.tokenizer import Tokenizer
from jaxstack.decoding import requests as generation
from jaxstack.decoding.engine import Engine, EngineBusy, EngineClosed
from jaxstack.errors import ConfigError, JaxstackError
from jaxstack.models.adapter_stack import AdapterMatrices
from jaxstack.serve.adapters import AdapterLoader, LoadAdapterRequest, UnloadAdapterRequest
from jaxstack.serve.answers import (
    Answers,
    ChatFormatter,
    EventStream,
    Readers,
    Refused,
    TextAnswer,
    choose_best,
    collect,
    events,
    usage_of,
)
from jaxstack.serve.bodies import GONE, read_json, refuse_on_error
from jaxstack.serve.chat_request import ChatRequest
from jaxstack.serve.config import ServerConfig
from jaxstack.serve.engine import EngineGroup
from jaxstack.serve.grammar import GrammarConstraint, Grammars, Kind
from jaxstack.serve.metrics import Metrics
from jaxstack.serve.protocol import (
    CompletionRequest,
    EmbeddingRequest,
    Envelope,
    GenerationRequest,
    embedding_body,
    error_body,
)
from jaxstack.serve.responses import ResponseEnvelope
from jaxstack.serve.responses_request import ResponsesRequest
from jaxstack.serve.token_details import Part, TokenDetails, TokenTexts
from jaxstack.serve.tools import ToolReader

_COMPLETION_TOKENS = 16
"""Token limit of a completion without `max_tokens`, as OpenAI has it."""
_PAGE = Path(__file__).with_name("chat.html")

R = TypeVar("R", bound=GenerationRequest | EmbeddingRequest | ResponsesRequest)


class Server:
    """The HTTP application (`app`, ASGI) that answers requests with a serving engine.

    Args:
      engine: generates tokens.
      tokenizer: the model's tokenizer.
      name: name of the model in requests and answers.
      config: limits.
      loopback: True if only this machine can connect; then the header Host must name it.
      api_key: key that requests must send as `Authorization: Bearer KEY`; None: none is needed.
      read_adapter: reads the matrices of an adapter in a directory; None: requests can load none.
    """

    def __init__(
        self,
        engine: Engine | EngineGroup,
        tokenizer: Tokenizer,
        name: str,
        config: ServerConfig | None = None,
        *,
        api_key: str | None = None,
        loopback: bool = False,
        read_adapter: Callable[[Path], AdapterMatrices] | None = None,
    ):
        self.engine = engine
        self.tokenizer = tokenizer
        self.name = name
        self.config = config or ServerConfig()
        self._api_key = api_key
        self._created = int(time.time())
        self.metrics = Metrics(engine, name)
        self._loader = AdapterLoader(engine, read_adapter, self.config.adapter_folder)
        self._texts = TokenTexts(tokenizer)
        self._ending = asyncio.Event()
        self._answers = weakref.WeakSet[Answers]()
        seconds = min(_GRAMMAR_SECONDS, self.config.timeout / 2)
        self._grammars = Grammars(tokenizer, engine.stop_tokens or {tokenizer.document_start}, seconds)
        # A few separate threads, so that others are left for the requests of other clients.
        self._compilers = ThreadPoolExecutor(_MOST_COMPILING, thread_name_prefix="jaxstack grammars")
        self._chat: ChatFormatter | None = None
        with contextlib.suppress(ConfigError):
            self._chat = ChatFormatter(tokenizer, self.config.chat_template)
        if self._chat is None and self.config.chat_template != "auto":
            ChatFormatter(tokenizer, self.config.chat_template)  # raises the reason
        self.app = Starlette(
            routes=[
                Route("/", self._page),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                Route("/v1/models", self._require_key(self._models)),
                Route("/v1/models/{name:path}", self._require_key(self._model)),
                Route("/v1/completions", self._require_key(self._complete), methods=["POST"]),
                Route("/v1/chat/completions", self._require_key(self._complete_chat), methods=["POST"]),
                Route("/v1/responses", self._require_key(self._respond), methods=["POST"]),
                Route("/v1/load_lora_adapter", self._require_key(self._load_adapter), methods=["POST"]),
                Route("/v1/unload_lora_adapter", self._require_key(self._unload_adapter), methods=["POST"]),
                Route("/v1/embeddings", self._require_key(self._embed), methods=["POST"]),
            ],
            exception_handlers={Refused: _refusal, HTTPException: _http_error, Exception: _failure},
        )
        if loopback and "*" not in self.config.allowed_hosts:
            known = ["localhost", *self.config.allowed_hosts]
            self.app.add_middleware(_KnownHosts, known)

    def end(self) -> None:
        """Refuse all requests from now on, the running ones included (status 503); to be called in the event loop."""
        self._ending.set()
        self._compilers.shutdown(wait=False, cancel_futures=True)
        for answers in list(self._answers):
            answers.refuse(Refused(503, _SHUTS_DOWN))

    async def _unless_ending(self, response: Coroutine[Any, Any, Response]) -> Response:
        """Return the response to a request; cancel its computation when the server ends first.

        Raises:
          Refused: the server has ended.
        """
        work = asyncio.ensure_future(response)
        ending = asyncio.ensure_future(self._ending.wait())
        try:
            await asyncio.wait((work, ending), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            raise Refused(503, _SHUTS_DOWN)
        finally:
            work.cancel()
            ending.cancel()

    def _require_key(
        self, handler: Callable[[Request], Coroutine[Any, Any, Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Wrap a route's handler so that it first checks the request's API key."""

        async def authorized(request: Request) -> Response:
            kind, _, key = request.headers.get("authorization", "").partition(" ")
            wanted = self._api_key
            if wanted is not None and not (kind.lower() == "bearer" and _is_key(key, wanted)):
                raise Refused(401, "send the server's API key as `Authorization: Bearer KEY`.", "invalid_api_key")
            return await self._unless_ending(handler(request))

        return authorized

    async def _page(self, request: Request) -> Response:
        settings = {"model": self.name, "chat": self._chat is not None, "key": self._api_key is not None}
        page = _PAGE.read_text(encoding="utf-8").replace("{{settings}}", json.dumps(settings).replace("<", "\\u003c"))
        return HTMLResponse(page, headers={"Content-Security-Policy": _POLICY, "X-Frame-Options": "DENY"})

    async def _health(self, request: Request) -> Response:
        failure = self.engine.failure
        return JSONResponse({"status": failure or "ok"}, 200 if failure is None else 503)

    async def _metrics(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _models(self, request: Request) -> Response:
        served = [self.name, *self.engine.adapter_names]
        return JSONResponse({"object": "list", "data": [self._describe(name) for name in served]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._find_adapter(name)
        return JSONResponse(self._describe(name))

    def _describe(self, name: str) -> dict[str, Any]:
        about = {"id": name, "object": "model", "created": self._created, "owned_by": "jaxstack"}
        parent = None if name == self.name else self.name
        return about | {"max_model_len": self.engine.context, "parent": parent}

    def _find_adapter(self, name: str | None) -> str | None:
        """Return the name of the adapter that a request asks for as its model; None for the model without adapters.

        Raises:
          Refused: there is no such model.
        """
        if name is None or name == self.name:
            return None
        adapters = self.engine.adapter_names
        if name not in adapters:
            known = " and ".join(map(repr, (self.name, *adapters)))
            raise Refused(404, f"there is no model {name!r} here; this server has {known}.", "model_not_found")
        return name

    async def _load_adapter(self, request: Request) -> Response:
        body = await read_json(request, LoadAdapterRequest, self.config)
        if body.lora_name == self.name:
            raise Refused(400, f"{self.name!r} is the name of the model; choose another one.")
        try:
            await asyncio.to_thread(self._loader.load, body.lora_name, body.lora_path)
        except JaxstackError as error:
            raise Refused(400, str(error)) from None
        return JSONResponse({"status": "loaded", "lora_name": body.lora_name})

    async def _unload_adapter(self, request: Request) -> Response:
        body = await read_json(request, UnloadAdapterRequest, self.config)
        if self._find_adapter(body.lora_name) is None:
            raise Refused(400, f"{self.name!r} is the model, and no adapter.")
        refuse_on_error(lambda: self.engine.unload_adapter(body.lora_name))
        return JSONResponse({"status": "unloaded", "lora_name": body.lora_name})

    async def _complete(self, request: Request) -> Response:
        body = await self._parse(request, CompletionRequest)
        texts = body.prompts
        self._check_count(body.samples * len(texts))
        self._check_length(text for text in texts if isinstance(text, str))
        prompts = await asyncio.to_thread(lambda: [self._encode(prompt) for prompt in texts])
        longest = max(map(len, prompts), default=0)
        limit = max(1, min(_COMPLETION_TOKENS, self.engine.context - longest))
        limit = limit if body.max_tokens is None else body.max_tokens
        answers = await self._submit(body, prompts, limit, body.stops, frozenset(), texts if body.echo else None)
        return await self._answer(request, body, answers, Envelope(body.model or self.name, chat=False))

    async def _complete_chat(self, request: Request) -> Response:
        body = await self._parse(request, ChatRequest)
        return await self._answer(
            request, body, await self._submit_chat(body), Envelope(body.model or self.name, chat=True)
        )

    async def _respond(self, request: Request) -> Response:
        body = await self._parse(request, ResponsesRequest)
        answers = await self._submit_chat(refuse_on_error(lambda: body.as_chat_request))
        envelope = ResponseEnvelope(body.model or self.name, body)
        if body.stream:
            return EventStream(answers, envelope.events(answers))
        parts = await self._collect(request, answers)
        if parts is None:
            return Response(status_code=GONE)
        return JSONResponse(envelope.whole(answers, parts[0]))

    async def _submit_chat(self, body: ChatRequest) -> Answers:
        """Submit a chat to the engine, once for each requested sample.

        Raises:
          Refused: there is no chat template, or it refuses the chat; or as `_submit`.
        """
        chat = self._chat
        if chat is None:
            raise Refused(
                400,
                "the model's tokenizer has no chat template; use /v1/completions, or start the server with "
                "server.chat_template=chatml (or llama3, gemma, a file).",
            )
        self._check_count(body.samples)
        messages = refuse_on_error(lambda: [message.as_template_input for message in body.messages])
        tools = body.chosen_tools
        self._check_length(["".join(message["content"] for message in messages)])
        try:
            form = None
            if tools is not None and not tools.chosen:
                form = await asyncio.to_thread(chat.tool_format, tools, self.engine.stop_tokens)
            prompt = await asyncio.to_thread(chat.encode, messages, tools, body.variables)
        except JaxstackError as error:
            raise Refused(400, str(error)) from None
        room = max(1, min(self.engine.context - len(prompt), self.config.max_tokens))
        limit = body.max_completion_tokens or body.max_tokens or room
        stops = (*body.stops, *chat.stop)
        free = refuse_on_error(lambda: body.grammar) is None
        return await self._submit(
            body,
            [prompt],
            limit,
            stops,
            chat.stop_tokens,
            read=lambda: Readers(tools and ToolReader(tools, form), chat.reader(prompt) if free else None),
        )

    async def _embed(self, request: Request) -> Response:
        body = await self._parse(request, EmbeddingRequest)
        if self._find_adapter(body.model) is not None:
            raise Refused(400, f"embeddings are those of {self.name!r}, without an adapter; ask for that model.")
        texts = body.prompts
        self._check_count(len(texts))
        self._check_length(text for text in texts if isinstance(text, str))
        prompts = await asyncio.to_thread(lambda: [self._encode(prompt) for prompt in texts])
        submitted = self._start(partial(self.engine.embed, prompt, priority=body.priority or 0) for prompt in prompts)
        details = TokenDetails(self._texts, chat=False, logprobs=None, prompt_logprobs=None, ids=False)
        answers = Answers(
            [TextAnswer(one, self.tokenizer, details, echo_only=True) for one in submitted],
            self.metrics,
            self.config.timeout,
        )
        self._answers.add(answers)
        if await self._collect(request, answers) is None:
            return Response(status_code=GONE)
        vectors = []
        for one in submitted:
            assert one.pooled is not None
            vector = one.pooled[0 if self.config.pooling == "mean" else 1]
            vectors.append(vector / max(float(np.linalg.norm(vector)), 1e-12))
        size = len(vectors[0])
        if body.dimensions not in (None, size):
            raise Refused(400, f"dimensions must be {size}, the model's hidden size; found {body.dimensions}.")
        tokens = sum(map(len, prompts))
        written = embedding_body(self.name, vectors, tokens, base64=body.encoding_format == "base64")
        return JSONResponse(written)

    @cached_property
    def _most_characters(self) -> int | None:
        """Upper bound of the characters of a prompt that fits the context; None if the tokenizer does not tell it."""
        return self.engine.context * int(self.tokenizer.byte_lengths.max()) if self.tokenizer.writes_bytes else None

    def _check_length(self, texts: Iterable[str]) -> None:
        """Refuse texts that are too long without encoding them, which would take seconds for megabytes.

        Raises:
          Refused: a text has more characters than the longest tokens would write in the context.
        """
        for text in texts:
            if self._most_characters is not None and len(text) > self._most_characters:
                raise Refused(
                    400, f"a prompt of {len(text)} characters exceeds the context of {self.engine.context} tokens."
                )

    def _encode(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        opening = [self.tokenizer.document_start] if self.config.document_start else []
        return [*opening, *self.tokenizer.encode(prompt).tolist()]

    def _echo(self, prompt: str | list[int]) -> tuple[str, int]:
        """Return the text of a prompt and the number of tokens that `_encode` puts before it."""
        if not isinstance(prompt, str):
            return self.tokenizer.decode(prompt), 0
        return prompt, int(self.config.document_start)

    async def _parse(self, request: Request, kind: type[R]) -> R:
        """Read the JSON body of an HTTP request, and check that it asks for the model of this server.

        Raises:
          Refused: as `read_json`, or it asks for another model.
        """
        body = await read_json(request, kind, self.config)
        self._find_adapter(body.model)
        return body

    def _check_count(self, count: int) -> None:
        """Check the number of answers, before any prompt is encoded.

        Raises:
          Refused: the engine does not take so many.
        """
        most = self.engine.most_requests
        if not 1 <= count <= most:
            raise Refused(400, f"a request must ask for 1 to {most} answers; found {count}.")

    async def _submit(
        self,
        body: GenerationRequest,
        prompts: Sequence[list[int]],
        max_tokens: int,
        stop: Sequence[str],
        stop_tokens: frozenset[int],
        echo: Sequence[str | list[int]] | None = None,
        read: Callable[[], Readers] = Readers,
    ) -> Answers:
        """Submit every prompt of an HTTP request to the engine, once for each requested sample.

        Args:
          body: the request.
          prompts: ids of each prompt.
          max_tokens: token limit of each answer; 0: the prompt alone.
          stop, stop_tokens: texts and ids that end an answer.
          echo: texts or ids of the prompts, with which the answers begin.
          read: returns what tells the parts of an answer apart.

        Raises:
          Refused: a limit is exceeded, or the engine does not accept them.
        """
        if max_tokens > self.config.max_tokens:
            raise Refused(400, f"max_tokens must be at most {self.config.max_tokens}; found {max_tokens}.")
        known = self.tokenizer.vocab_size
        unknown = [token for token in body.stop_token_ids or () if token >= known]
        if unknown:
            raise Refused(400, f"stop_token_ids must be below {known}, the number of ids; found {unknown[0]}.")
        grammar = refuse_on_error(lambda: body.grammar)
        constraints = [await self._constrain(*grammar) if grammar else None for _ in range(len(prompts) * body.samples)]
        ends = frozenset() if body.ignore_eos else self.engine.stop_tokens | stop_tokens
        stops = ends | frozenset(body.stop_token_ids or ())
        scores = 0 if body.samples > (body.n or 1) and body.likeliest is None else body.likeliest
        scored = [count for count in (body.prompt_logprobs, body.likeliest if echo else None) if count is not None]
        told = {"logprobs": scores, "prompt_logprobs": max(scored, default=None)}
        sampling = dataclasses.replace(refuse_on_error(lambda: body.sampling), **told)
        adapter = self._find_adapter(body.model)
        submitted = self._start(
            partial(
                self.engine.submit,
                prompts[index // body.samples],
                max(1, max_tokens),
                sampling,
                seed=body.first_seed + index % body.samples,
                stop_tokens=stops,
                constraint=constraint,
                priority=body.priority or 0,
                adapter=adapter,
            )
            for index, constraint in enumerate(constraints)
        )
        texts = []
        for index, request in enumerate(submitted):
            details = TokenDetails(
                self._texts,
                chat=isinstance(body, ChatRequest),
                logprobs=body.likeliest,
                prompt_logprobs=body.prompt_logprobs,
                ids=bool(body.return_token_ids),
            )
            opening = None if echo is None else self._echo(echo[index // body.samples])
            only = max_tokens == 0
            answer = TextAnswer(request, self.tokenizer, details, stop, echo=opening, echo_only=only, readers=read())
            texts.append(answer)
        answers = Answers(texts, self.metrics, self.config.timeout)
        self._answers.add(answers)
        return answers

    def _start(self, submissions: Iterable[Callable[[], generation.Request]]) -> list[generation.Request]:
        """Submit requests to the engine, all or none.

        Raises:
          Refused: the engine does not accept one.
        """
        submitted: list[generation.Request] = []
        try:
            for submit in submissions:
                submitted.append(submit())
        except BaseException as error:
            for request in submitted:
                request.cancel()
            if isinstance(error, ConfigError):
                raise Refused(400, str(error)) from None
            if isinstance(error, EngineBusy):
                raise Refused(429, f"{error} Try again later.", "overloaded") from None
            if isinstance(error, EngineClosed):
                raise Refused(503, str(error)) from None
            raise
        return submitted

    async def _constrain(self, kind: Kind, value: object) -> GrammarConstraint:
        """Return a grammar as the constraint for one answer; compile it, unless it is known.

        Raises:
          Refused: the grammar is wrong, or many grammars have to be compiled before it.
        """
        limit = self.config.timeout
        try:
            known = await asyncio.to_thread(self._grammars.find, kind, value)
            if known is not None:
                return known
            compiled = asyncio.wrap_future(self._compilers.submit(self._grammars.compile, kind, value))
            return await asyncio.wait_for(compiled, limit)
        except ConfigError as error:
            raise Refused(400, str(error)) from None
        except TimeoutError:
            raise Refused(504, f"the request took longer than {limit:g} s (server.timeout).") from None

    async def _answer(
        self, request: Request, body: GenerationRequest, answers: Answers, envelope: Envelope
    ) -> Response:
        """Return the HTTP response, JSON or an event stream."""
        if body.stream:
            options = body.stream_options
            usage = options is not None and options.include_usage
            return EventStream(answers, events(answers, envelope, body.samples, usage=usage))
        parts = await self._collect(request, answers)
        if parts is None:
            return Response(status_code=GONE)
        best = choose_best(answers, body.samples, body.n or 1) if body.samples > (body.n or 1) else range(len(parts))
        choices = [(parts[number], answers.answers[number].details.describe(parts[number])) for number in best]
        prompts = [answers.answers[number].prompt_fields for number in best]
        return JSONResponse(envelope.whole(choices, prompts, usage_of(answers, body.samples)))

    async def _collect(self, request: Request, answers: Answers) -> list[Part] | None:
        """Return the whole of each answer; None if the client has gone away."""
        parts = [Part("")] * len(answers.answers)
        watch = asyncio.create_task(_until_gone(request))
        work = asyncio.create_task(collect(answers, parts))
        try:
            await asyncio.wait([watch, work], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return None
            work.result()
            return parts
        finally:
            watch.cancel()
            work.cancel()
            answers.cancel()


_MOST_COMPILING = 2
"""Number of grammars that are compiled at the same time."""
_GRAMMAR_SECONDS = 10.0
"""Time limit for compiling a grammar, which cannot be interrupted when its client goes away."""
_SHUTS_DOWN = "the server is shutting down."
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"


def _is_address(host: str) -> bool:
    """Return True if a host is an IP address: only names can be resolved to another machine than their owner's."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


class _KnownHosts:
    """ASGI middleware that refuses requests whose header Host names none of the known hosts.

    Starlette's `TrustedHostMiddleware` takes the text before the first colon for the host and so refuses IPv6
    addresses.
    """

    def __init__(self, app: ASGIApp, known: Sequence[str]):
        self._app = app
        self._known = {name.lower() for name in known}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = dict(scope.get("headers", ())).get(b"host", b"").decode("latin-1").lower()
        name = re.sub(r":\d*$", "", host)
        if not name or name in self._known or _is_address(name):
            return await self._app(scope, receive, send)
        message = f"requests for the host {name!r} are not served; add it to server.allowed_hosts."
        await JSONResponse(error_body(message, 403), 403)(scope, receive, send)


def _is_key(sent: str, wanted: str) -> bool:
    """Return True if a header, which is decoded as Latin-1, has the bytes of the key in UTF-8 or in Latin-1."""
    given = sent.strip(" \t").encode("latin-1")
    keys = [wanted.strip().encode("utf-8", "surrogateescape"), wanted.strip().encode("latin-1", "replace")]
    return any([secrets.compare_digest(given, key) for key in keys])


async def _until_gone(request: Request) -> None:
    """Wait until the HTTP client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}, 503: {"Retry-After": "5"}}
    body = error_body(str(error), error.status, error.code)
    return JSONResponse(body, error.status, headers.get(error.status))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = "/v1/completions, /v1/chat/completions, /v1/responses, /v1/embeddings, /v1/models, /v1/load_lora_adapter, "
    known += "/v1/unload_lora_adapter, /health, /metrics"
    messages = {404: f"there is nothing at {request.url.path}; known: {known}."}
    message = messages.get(error.status_code, f"{error.detail}: {request.method} {request.url.path}.")
    return JSONResponse(error_body(message, error.status_code), error.status_code, error.headers)


async def _failure(request: Request, error: Exception) -> Response:
    return JSONResponse(error_body(f"the server failed: {type(error).__name__}.", 500), 500)
