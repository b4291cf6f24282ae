"""The HTTP server: OpenAI-compatible routes, health check, metrics and a chat page."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from jaxstack import __version__
from jaxstack.data.tokenizer import Tokenizer
from jaxstack.decoding.engine import Engine
from jaxstack.errors import JaxstackError
from jaxstack.models.adapter_stack import AdapterMatrices
from jaxstack.serve.access import check_hosts, check_key, read_json
from jaxstack.serve.adapters import AdapterLoader, LoadAdapterRequest, UnloadAdapterRequest
from jaxstack.serve.answers import Answers, EventStream, choose_best, events, usage_of
from jaxstack.serve.chat_request import ChatRequest
from jaxstack.serve.config import ServerConfig
from jaxstack.serve.engine import EngineGroup
from jaxstack.serve.messages import CountRequest, MessageEnvelope, MessagesRequest
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
from jaxstack.serve.pooling import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    classify_body,
    embedding_body,
    pooling_body,
)
from jaxstack.serve.protocol import CompletionRequest, Envelope, GenerationRequest, StreamOptions
from jaxstack.serve.refusals import HANDLERS, Refused, refuse_on_error, until_ending
from jaxstack.serve.request_fields import PromptRequest
from jaxstack.serve.request_ids import RequestIds, id_of, name_request
from jaxstack.serve.responses import ResponseEnvelope, ResponsesRequest
from jaxstack.serve.submission import COMPLETION_TOKENS, Submissions
from jaxstack.serve.tasks import unless
from jaxstack.serve.tokenization import DetokenizeRequest, TokenizeRequest, tokenize_body

_PAGE = Path(__file__).with_name("chat.html")

R = TypeVar(
    "R",
    bound=GenerationRequest
    | EmbeddingRequest
    | ResponsesRequest
    | CountRequest
    | ScoreRequest
    | RerankRequest
    | TokenizeRequest
    | DetokenizeRequest,
)

Pooled = EmbeddingRequest | ScoreRequest | RerankRequest
"""Requests for outputs of the model that are no text."""


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
            "/classify": self._classify,
            "/pooling": self._pool,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
            "/v1/load_lora_adapter": self._load_adapter,
            "/v1/unload_lora_adapter": self._unload_adapter,
        }
        self.app = Starlette(
            routes=[
                *(Route(path, self._require_key(handler), methods=["POST"]) for path, handler in posted.items()),
                Route("/v1/models", self._require_key(self._models)),
                Route("/v1/models/{name:path}", self._require_key(self._model)),
                Route("/health", self._health),
                Route("/version", self._version),
                Route("/metrics", self._metrics),
                Route("/", self._page),
            ],
            exception_handlers=HANDLERS,
        )
        self.app.router.redirect_slashes = False  # behind a router a redirection would name this process's address
        check_hosts(self.app, self.config, loopback=loopback)
        self.app.add_middleware(RequestIds)

    def end(self) -> None:
        """Refuse all requests from now on, the running ones included (status 503); to be called in the event loop."""
        self._ending.set()
        self._submissions.end()

    def _require_key(
        self, handler: Callable[[Request], Coroutine[Any, Any, Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Wrap a route's handler so that it first checks the API key, and is cancelled when the server ends."""

        async def authorized(request: Request) -> Response:
            check_key(request, self._api_key)
            return await unless(handler(request), until_ending(self._ending))

        return authorized

    async def _page(self, request: Request) -> Response:
        settings = {"model": self.name, "chat": self._submissions.chat is not None, "key": self._api_key is not None}
        page = _PAGE.read_text(encoding="utf-8").replace("{{settings}}", json.dumps(settings).replace("<", "\\u003c"))
        return HTMLResponse(page, headers={"Content-Security-Policy": _POLICY, "X-Frame-Options": "DENY"})

    async def _health(self, request: Request) -> Response:
        failure = self.engine.failure
        return JSONResponse({"status": failure or "ok"}, 200 if failure is None else 503)

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

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
        prompts = await self._submissions.encode(
            texts,
            opened=body.add_special_tokens,
            truncation=self._submissions.truncation_of_prompt(body, body.max_tokens),
        )
        longest = max(map(len, prompts), default=0)
        limit = max(1, min(COMPLETION_TOKENS, self.engine.context - longest))
        limit = limit if body.max_tokens is None else body.max_tokens
        begun = texts if body.truncate_prompt_tokens is None and body.add_special_tokens else prompts
        answers = await self._submissions.submit(
            body, prompts, limit, body.stops, frozenset(), begun if body.echo else None
        )
        envelope = Envelope(body.model or self.name, id_of(request), chat=False)
        return await self._answer(request, body, answers, envelope)

    async def _complete_chat(self, request: Request) -> Response:
        body = await self._parse(request, ChatRequest)
        envelope = Envelope(body.model or self.name, id_of(request), chat=True)
        return await self._answer(request, body, await self._submissions.submit_chat(body), envelope)

    async def _respond(self, request: Request) -> Response:
        body = await self._parse(request, ResponsesRequest)
        answers = await self._submissions.submit_chat(refuse_on_error(lambda: body.as_chat_request))
        envelope = ResponseEnvelope(body.model or self.name, id_of(request), body)
        return await self._write(request, answers, envelope, body.stream)

    async def _message(self, request: Request) -> Response:
        body = await self._parse(request, MessagesRequest)
        answers = await self._submissions.submit_chat(refuse_on_error(lambda: body.as_chat_request))
        envelope = MessageEnvelope(body.model or self.name, id_of(request), body)
        return await self._write(request, answers, envelope, body.stream)

    async def _count_tokens(self, request: Request) -> Response:
        body = await self._parse(request, CountRequest)
        _, prompt, _ = await self._submissions.encode_chat(refuse_on_error(lambda: body.as_chat_request))
        return JSONResponse({"input_tokens": len(prompt)})

    async def _tokenize(self, request: Request) -> Response:
        body = await self._parse(request, TokenizeRequest)
        if body.prompt is None:
            _, prompt, _ = await self._submissions.encode_chat(refuse_on_error(lambda: body.as_chat_request))
        else:
            (prompt,) = await self._submissions.encode([body.prompt], opened=body.add_special_tokens is not False)
        texts = await asyncio.to_thread(self._submissions.texts_of, prompt) if body.return_token_strs else None
        return JSONResponse(tokenize_body(prompt, self.engine.context, texts))

    async def _detokenize(self, request: Request) -> Response:
        body = await self._parse(request, DetokenizeRequest)
        return JSONResponse({"prompt": await self._submissions.decode(body.tokens)})

    async def _write(
        self, request: Request, answers: Answers, envelope: ResponseEnvelope | MessageEnvelope, stream: bool | None
    ) -> Response:
        """Return a single answer as the HTTP response, JSON or an event stream."""
        if stream:
            return EventStream(answers, envelope.events(answers))
        parts = await self._submissions.collect(request, answers)
        return JSONResponse(envelope.whole(answers, parts[0]))

    async def _embed(self, request: Request) -> Response:
        body = await self._parse(request, EmbeddingRequest)
        vectors, tokens = await self._embed_for(request, body)
        written = embedding_body(self.name, vectors, tokens, base64=body.encoding_format == "base64")
        return JSONResponse(written)

    async def _classify(self, request: Request) -> Response:
        body = await self._parse(request, ClassifyRequest)
        return JSONResponse(classify_body(self.name, id_of(request), *await self._classify_texts(request, body)))

    async def _pool(self, request: Request) -> Response:
        body = await self._parse(request, PoolingRequest)
        if body.task == "classify" or (body.task is None and self._classifier is not None):
            scores, tokens = await self._classify_texts(request, body)
            found = list(np.array(scores)[:, None])
        else:
            found, tokens = await self._embed_for(request, body, normalized=body.use_activation is not False)
        base64 = body.encoding_format == "base64"
        written = pooling_body(self.name, id_of(request), found, tokens, base64=base64)
        return JSONResponse(written)

    async def _classify_texts(self, request: Request, body: ClassifyRequest) -> tuple[list[float], int]:
        """Return the score of each text of a request by the head of the model, and their number of tokens.

        Raises:
          Refused: as `Submissions.pool`, or the model has no such head.
        """
        if self._classifier is None:
            raise Refused(
                400, f"{self.name!r} has no head that classifies texts; serve a reward model, or use /v1/embeddings."
            )
        if body.dimensions not in (None, 1):
            raise Refused(400, f"dimensions must be 1, as a text has one score; found {body.dimensions}.")
        pooled, tokens = await self._pool_texts(request, body.prompts, body)
        return classify(self._classifier, [last for _, last in pooled], body.use_activation), tokens

    async def _embed_for(
        self, request: Request, body: EmbeddingRequest, *, normalized: bool = True
    ) -> tuple[list[Float[np.ndarray, " D"]], int]:
        """Return a vector for each text of a request, and their number of tokens.

        Raises:
          Refused: as `_embed_texts`, or the vectors are not as long as it asks for.
        """
        vectors, tokens = await self._embed_texts(request, body.prompts, body, normalized=normalized)
        size = len(vectors[0])
        if body.dimensions not in (None, size):
            raise Refused(400, f"dimensions must be {size}, the model's hidden size; found {body.dimensions}.")
        return vectors, tokens

    async def _score(self, request: Request) -> Response:
        body = await self._parse(request, ScoreRequest)
        scores, tokens = await self._score_pairs(request, body, body.text_1, body.text_2)
        return JSONResponse(score_body(self.name, id_of(request), scores, tokens))

    async def _rerank(self, request: Request) -> Response:
        body = await self._parse(request, RerankRequest)
        scores, tokens = await self._score_pairs(request, body, [body.query], body.documents)
        return JSONResponse(rerank_body(self.name, id_of(request), body, scores, tokens))

    async def _score_pairs(
        self, request: Request, body: ScoreRequest | RerankRequest, first: Sequence[str], second: Sequence[str]
    ) -> tuple[list[float], int]:
        """Return the score of each pair of texts, and their number of tokens.

        Raises:
          Refused: as `Submissions.pool`, or a text does not fit the model.
        """
        classifier = self._classifier
        if classifier is None:
            vectors, tokens = await self._embed_texts(request, [*first, *second], body)
            return cosines(vectors[: len(first)], vectors[len(first) :]), tokens
        self._check_unadapted(body.model)
        self._submissions.check_count(len(second))
        pairs = zip([*first] * (len(second) // len(first)), second, strict=True)
        truncation = self._submissions.truncation_of_text(body)
        if truncation is None:
            self._submissions.check_length([*first, *second])
        try:
            prompts = await asyncio.to_thread(lambda: [classifier.encode(*pair) for pair in pairs])
        except JaxstackError as error:
            raise Refused(400, str(error)) from None
        prompts = prompts if truncation is None else [*map(truncation.cut, prompts)]
        pooled = await self._submissions.pool(request, prompts, body)
        return classify(classifier, [last for _, last in pooled], body.use_activation), sum(map(len, prompts))

    async def _embed_texts(
        self, request: Request, texts: Sequence[str | list[int]], body: Pooled, *, normalized: bool = True
    ) -> tuple[list[Float[np.ndarray, " D"]], int]:
        """Return a vector for each text, of length 1 if `normalized`, and their number of tokens.

        Raises:
          Refused: as `_pool_texts`.
        """
        pooled, tokens = await self._pool_texts(request, texts, body)
        vectors = [mean if self.config.pooling == "mean" else last for mean, last in pooled]
        if normalized:
            vectors = [vector / max(float(np.linalg.norm(vector)), 1e-12) for vector in vectors]
        return vectors, tokens

    async def _pool_texts(
        self, request: Request, texts: Sequence[str | list[int]], body: Pooled
    ) -> tuple[list[Float[np.ndarray, "2 D"]], int]:
        """Return the mean of the final hidden states of each text, and the last one; and their number of tokens.

        Raises:
          Refused: as `Submissions.pool`, or the request asks for an adapter.
        """
        self._check_unadapted(body.model)
        self._submissions.check_count(len(texts))
        prompts = await self._submissions.encode(texts, truncation=self._submissions.truncation_of_text(body))
        pooled = await self._submissions.pool(request, prompts, body)
        return pooled, sum(map(len, prompts))

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
        name_request(request, body.request_id if isinstance(body, PromptRequest | ResponsesRequest) else None)
        return body

    async def _answer(
        self, request: Request, body: GenerationRequest, answers: Answers, envelope: Envelope
    ) -> Response:
        """Return the HTTP response, JSON or an event stream."""
        if body.stream:
            options = body.stream_options or StreamOptions()
            return EventStream(answers, events(answers, envelope, body.samples, options))
        parts = await self._submissions.collect(request, answers)
        best = choose_best(answers, body.samples, body.n or 1) if body.samples > (body.n or 1) else range(len(parts))
        choices = [(parts[number], answers.answers[number].describe(parts[number])) for number in best]
        prompts = [answers.answers[number].prompt_fields for number in best]
        return JSONResponse(envelope.whole(choices, prompts, usage_of(answers, body.samples)))


_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
