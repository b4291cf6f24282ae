"""The HTTP server: OpenAI-compatible routes, health check, metrics and a chat page."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from jaxstack.data.tokenizer import Tokenizer
from jaxstack.decoding.engine import Engine
from jaxstack.errors import JaxstackError
from jaxstack.models.adapter_stack import AdapterMatrices
from jaxstack.serve.access import KnownHosts, check_key
from jaxstack.serve.adapters import AdapterLoader, LoadAdapterRequest, UnloadAdapterRequest
from jaxstack.serve.answers import (
    Answers,
    EventStream,
    Refused,
    choose_best,
    events,
    usage_of,
)
from jaxstack.serve.bodies import GONE, read_json, refuse_on_error
from jaxstack.serve.chat_request import ChatRequest
from jaxstack.serve.config import ServerConfig
from jaxstack.serve.engine import EngineGroup
from jaxstack.serve.messages import CountRequest, MessageEnvelope, MessagesRequest, messages_error
from jaxstack.serve.metrics import Metrics
from jaxstack.serve.pair_scores import (
    Classifier,
    RerankRequest,
    ScoreRequest,
    classify,
    cosines,
    rerank_body,
    score_body,
)
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
from jaxstack.serve.submission import SHUTS_DOWN, Submissions
from jaxstack.serve.unless import Ended, unless

_COMPLETION_TOKENS = 16
"""Token limit of a completion without `max_tokens`, as OpenAI has it."""
_PAGE = Path(__file__).with_name("chat.html")

R = TypeVar(
    "R", bound=GenerationRequest | EmbeddingRequest | ResponsesRequest | CountRequest | ScoreRequest | RerankRequest
)


class Server:
    """The HTTP application (`app`, ASGI) that answers requests with a serving engine.

    Args:
      engine: generates tokens.
      tokenizer: the model's tokenizer.
      name: name of the model in requests and answers.
      config: limits.
      loopback: True if only this machine can connect; then the header Host must name it.
      api_key: key that requests must send as `Authorization: Bearer KEY`, or as Anthropic's clients in the header
        x-api-key; None: none is needed.
      read_adapter: reads the matrices of an adapter in a directory; None: requests can load none.
      classifier: the head of the model, if it is a sequence classifier.
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
        classifier: Classifier | None = None,
    ):
        self.engine = engine
        self.tokenizer = tokenizer
        self.name = name
        self.config = config or ServerConfig()
        self._api_key = api_key
        self._classifier = classifier
        self._created = int(time.time())
        self.metrics = Metrics(engine, name)
        self._loader = AdapterLoader(engine, read_adapter, self.config.adapter_folder)
        self._ending = asyncio.Event()
        self._submissions = Submissions(engine, tokenizer, name, self.config, self.metrics)
        posted = {
            "/v1/completions": self._complete,
            "/v1/chat/completions": self._complete_chat,
            "/v1/responses": self._respond,
            "/v1/messages": self._message,
            "/v1/messages/count_tokens": self._count_tokens,
            "/v1/embeddings": self._embed,
            **dict.fromkeys(("/v1/score", "/score"), self._score),
            **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), self._rerank),
            "/v1/load_lora_adapter": self._load_adapter,
            "/v1/unload_lora_adapter": self._unload_adapter,
        }
        self.app = Starlette(
            routes=[
                *(Route(path, self._require_key(handler), methods=["POST"]) for path, handler in posted.items()),
                Route("/v1/models", self._require_key(self._models)),
                Route("/v1/models/{name:path}", self._require_key(self._model)),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                Route("/", self._page),
            ],
            exception_handlers={Refused: refusal, HTTPException: http_error, Exception: failure},
        )
        self.app.router.redirect_slashes = False  # behind a router a redirection would name this process's address
        if loopback and "*" not in self.config.allowed_hosts:
            known = ["localhost", *self.config.allowed_hosts]
            self.app.add_middleware(KnownHosts, known)

    def end(self) -> None:
        """Refuse all requests from now on, the running ones included (status 503); to be called in the event loop."""
        self._ending.set()
        self._submissions.end()

    async def _unless_ending(self, response: Coroutine[Any, Any, Response]) -> Response:
        """Return the response to a request; cancel its computation when the server ends first.

        Raises:
          Refused: the server has ended.
        """
        try:
            return await unless(response, self._ending.wait())
        except Ended:
            raise Refused(503, SHUTS_DOWN) from None

    def _require_key(
        self, handler: Callable[[Request], Coroutine[Any, Any, Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Wrap a route's handler so that it first checks the request's API key."""

        async def authorized(request: Request) -> Response:
            check_key(request, self._api_key)
            return await self._unless_ending(handler(request))

        return authorized

    async def _page(self, request: Request) -> Response:
        settings = {"model": self.name, "chat": self._submissions.chat is not None, "key": self._api_key is not None}
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
        self._submissions.find_adapter(name)
        return JSONResponse(self._describe(name))

    def _describe(self, name: str) -> dict[str, Any]:
        about = {"id": name, "object": "model", "created": self._created, "owned_by": "jaxstack"}
        parent = None if name == self.name else self.name
        return about | {"max_model_len": self.engine.context, "parent": parent}

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
        if self._submissions.find_adapter(body.lora_name) is None:
            raise Refused(400, f"{self.name!r} is the model, and no adapter.")
        refuse_on_error(lambda: self.engine.unload_adapter(body.lora_name))
        return JSONResponse({"status": "unloaded", "lora_name": body.lora_name})

    async def _complete(self, request: Request) -> Response:
        body = await self._parse(request, CompletionRequest)
        texts = body.prompts
        self._submissions.check_count(body.samples * len(texts))
        prompts = await self._submissions.encode(texts)
        longest = max(map(len, prompts), default=0)
        limit = max(1, min(_COMPLETION_TOKENS, self.engine.context - longest))
        limit = limit if body.max_tokens is None else body.max_tokens
        answers = await self._submissions.submit(
            body, prompts, limit, body.stops, frozenset(), texts if body.echo else None
        )
        return await self._answer(request, body, answers, Envelope(body.model or self.name, chat=False))

    async def _complete_chat(self, request: Request) -> Response:
        body = await self._parse(request, ChatRequest)
        return await self._answer(
            request, body, await self._submissions.submit_chat(body), Envelope(body.model or self.name, chat=True)
        )

    async def _respond(self, request: Request) -> Response:
        body = await self._parse(request, ResponsesRequest)
        answers = await self._submissions.submit_chat(refuse_on_error(lambda: body.as_chat_request))
        return await self._write(request, answers, ResponseEnvelope(body.model or self.name, body), body.stream)

    async def _message(self, request: Request) -> Response:
        body = await self._parse(request, MessagesRequest)
        answers = await self._submissions.submit_chat(refuse_on_error(lambda: body.as_chat_request))
        return await self._write(request, answers, MessageEnvelope(body.model or self.name, body), body.stream)

    async def _count_tokens(self, request: Request) -> Response:
        body = await self._parse(request, CountRequest)
        _, prompt, _ = await self._submissions.encode_chat(refuse_on_error(lambda: body.as_chat_request))
        return JSONResponse({"input_tokens": len(prompt)})

    async def _write(
        self, request: Request, answers: Answers, envelope: ResponseEnvelope | MessageEnvelope, stream: bool | None
    ) -> Response:
        """Return a single answer as the HTTP response, JSON or an event stream."""
        if stream:
            return EventStream(answers, envelope.events(answers))
        parts = await self._submissions.collect(request, answers)
        if parts is None:
            return Response(status_code=GONE)
        return JSONResponse(envelope.whole(answers, parts[0]))

    async def _embed(self, request: Request) -> Response:
        body = await self._parse(request, EmbeddingRequest)
        self._check_unadapted(body.model)
        found = await self._embed_texts(request, body.prompts, body.priority)
        if found is None:
            return Response(status_code=GONE)
        vectors, tokens = found
        size = len(vectors[0])
        if body.dimensions not in (None, size):
            raise Refused(400, f"dimensions must be {size}, the model's hidden size; found {body.dimensions}.")
        written = embedding_body(self.name, vectors, tokens, base64=body.encoding_format == "base64")
        return JSONResponse(written)

    async def _score(self, request: Request) -> Response:
        body = await self._parse(request, ScoreRequest)
        found = await self._score_pairs(request, body, body.text_1, body.text_2)
        return Response(status_code=GONE) if found is None else JSONResponse(score_body(self.name, *found))

    async def _rerank(self, request: Request) -> Response:
        body = await self._parse(request, RerankRequest)
        found = await self._score_pairs(request, body, [body.query], body.documents)
        return Response(status_code=GONE) if found is None else JSONResponse(rerank_body(self.name, body, *found))

    async def _score_pairs(
        self, request: Request, body: ScoreRequest | RerankRequest, first: Sequence[str], second: Sequence[str]
    ) -> tuple[list[float], int] | None:
        """Return the score of each pair of texts, and their number of tokens; None if the client has gone.

        Raises:
          Refused: as `Submissions.pool`, or a text does not fit the model.
        """
        self._check_unadapted(body.model)
        classifier = self._classifier
        if classifier is None:
            found = await self._embed_texts(request, [*first, *second], body.priority)
            return found and (cosines(found[0][: len(first)], found[0][len(first) :]), found[1])
        self._submissions.check_count(len(second))
        pairs = zip([*first] * (len(second) // len(first)), second, strict=True)
        self._submissions.check_length([*first, *second])
        try:
            prompts = await asyncio.to_thread(lambda: [classifier.encode(*pair) for pair in pairs])
        except JaxstackError as error:
            raise Refused(400, str(error)) from None
        pooled = await self._submissions.pool(request, prompts, priority=body.priority or 0)
        if pooled is None:
            return None
        return classify(classifier, [last for _, last in pooled], body.use_activation), sum(map(len, prompts))

    async def _embed_texts(
        self, request: Request, texts: Sequence[str | list[int]], priority: int | None
    ) -> tuple[list[Float[np.ndarray, " D"]], int] | None:
        """Return a vector of length 1 for each text, and their number of tokens; None if the client has gone.

        Raises:
          Refused: as `Submissions.pool`.
        """
        self._submissions.check_count(len(texts))
        prompts = await self._submissions.encode(texts)
        pooled = await self._submissions.pool(request, prompts, priority=priority or 0)
        if pooled is None:
            return None
        vectors = [mean if self.config.pooling == "mean" else last for mean, last in pooled]
        return [vector / max(float(np.linalg.norm(vector)), 1e-12) for vector in vectors], sum(map(len, prompts))

    def _check_unadapted(self, name: str | None) -> None:
        if self._submissions.find_adapter(name) is not None:
            raise Refused(400, f"embeddings are those of {self.name!r}, without an adapter; ask for that model.")

    async def _parse(self, request: Request, kind: type[R]) -> R:
        """Read the JSON body of an HTTP request, and check that it asks for the model of this server.

        Raises:
          Refused: as `read_json`, or it asks for another model.
        """
        body = await read_json(request, kind, self.config)
        self._submissions.find_adapter(body.model)
        return body

    async def _answer(
        self, request: Request, body: GenerationRequest, answers: Answers, envelope: Envelope
    ) -> Response:
        """Return the HTTP response, JSON or an event stream."""
        if body.stream:
            options = body.stream_options
            usage = options is not None and options.include_usage
            return EventStream(answers, events(answers, envelope, body.samples, usage=usage))
        parts = await self._submissions.collect(request, answers)
        if parts is None:
            return Response(status_code=GONE)
        best = choose_best(answers, body.samples, body.n or 1) if body.samples > (body.n or 1) else range(len(parts))
        choices = [(parts[number], answers.answers[number].details.describe(parts[number])) for number in best]
        prompts = [answers.answers[number].prompt_fields for number in best]
        return JSONResponse(envelope.whole(choices, prompts, usage_of(answers, body.samples)))


_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"


async def refusal(request: Request, error: Exception) -> Response:
    """Return the response to a request that was refused."""
    assert isinstance(error, Refused)
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}, 503: {"Retry-After": "5"}}
    return _error(request, str(error), error.status, error.code, headers.get(error.status))


async def http_error(request: Request, error: Exception) -> Response:
    """Return the response to a request for an unknown route, or with a wrong method."""
    assert isinstance(error, HTTPException)
    known = ", ".join(route.path for route in request.app.routes if "{" not in route.path)
    messages = {404: f"there is nothing at {request.url.path}; known: {known}."}
    message = messages.get(error.status_code, f"{error.detail}: {request.method} {request.url.path}.")
    return _error(request, message, error.status_code, headers=error.headers)


async def failure(request: Request, error: Exception) -> Response:
    """Return the response to a request that failed unexpectedly."""
    return _error(request, f"the server failed: {type(error).__name__}.", 500)


def _error(
    request: Request, message: str, status: int, code: str | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """Return an error in the format of the route's API."""
    body = error_body(message, status, code)
    if request.url.path.startswith("/v1/messages"):
        body = messages_error(body, status)
    return JSONResponse(body, status, headers)
