"""Turns requests of HTTP clients into requests to the engine: checks, encodes and submits them, collects answers."""

import asyncio
import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial

import numpy as np
from jaxtyping import Float
from starlette.requests import Request

from jaxstack.data.tokenizer import Tokenizer
from jaxstack.data.tool_calls import ToolFormat
from jaxstack.decoding import requests as generation
from jaxstack.decoding.engine import Engine, EngineBusy, EngineClosed
from jaxstack.decoding.requests import Constraint
from jaxstack.decoding.text_stream import TextStream
from jaxstack.errors import ConfigError, JaxstackError
from jaxstack.serve.answers import Answers, Readers, TextAnswer
from jaxstack.serve.chat_format import ChatFormatter
from jaxstack.serve.chat_request import ChatRequest
from jaxstack.serve.config import ServerConfig
from jaxstack.serve.engine import EngineGroup
from jaxstack.serve.grammar import GrammarConstraint, Grammars, Kind
from jaxstack.serve.metrics import Metrics
from jaxstack.serve.protocol import GenerationRequest
from jaxstack.serve.refusals import Refused, refuse_on_error, shutting_down, until_gone
from jaxstack.serve.request_fields import PromptRequest, Truncation
from jaxstack.serve.tasks import unless
from jaxstack.serve.token_details import Part, TokenDetails, TokenTexts
from jaxstack.serve.tools import ToolReader
from jaxstack.serve.word_limits import AllowedTokens, BadWords, WithoutWords

COMPLETION_TOKENS = 16
"""Token limit of a completion without `max_tokens`, as OpenAI has it."""
_MOST_COMPILING = 2
"""Number of grammars that are compiled at the same time."""
_GRAMMAR_SECONDS = 10.0
"""Time limit for compiling a grammar, which cannot be interrupted when its client goes away."""


class Submissions:
    """Submits the requests of HTTP clients to the engine, within the server's limits.

    Args:
      engine: generates tokens.
      tokenizer: the model's tokenizer.
      name: name of the model in requests.
      config: limits.
      metrics: records the latencies of the tokens.

    Attributes:
      chat: encodes chats with the tokenizer's chat template; None if it has none.

    Raises:
      ConfigError: `config.chat_template` names no template, and is not "auto".
    """

    def __init__(
        self, engine: Engine | EngineGroup, tokenizer: Tokenizer, name: str, config: ServerConfig, metrics: Metrics
    ):
        self.engine = engine
        self.tokenizer = tokenizer
        self.name = name
        self.config = config
        self._metrics = metrics
        self._texts = TokenTexts(tokenizer)
        self._answers = weakref.WeakSet[Answers]()
        seconds = min(_GRAMMAR_SECONDS, config.timeout / 2)
        self._grammars = Grammars(tokenizer, engine.stop_tokens or {tokenizer.document_start}, seconds)
        # A few separate threads, so that others are left for the requests of other clients.
        self._compilers = ThreadPoolExecutor(_MOST_COMPILING, thread_name_prefix="jaxstack grammars")
        self.chat: ChatFormatter | None = None
        with contextlib.suppress(ConfigError):
            self.chat = ChatFormatter(tokenizer, config.chat_template)
        if self.chat is None and config.chat_template != "auto":
            ChatFormatter(tokenizer, config.chat_template)  # raises the reason

    def end(self) -> None:
        """Refuse the running requests; to be called in the event loop."""
        self._compilers.shutdown(wait=False, cancel_futures=True)
        for answers in list(self._answers):
            answers.refuse(shutting_down())

    def find_adapter(self, name: str | None) -> str | None:
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

    async def submit_chat(self, body: ChatRequest) -> Answers:
        """Submit a chat to the engine, once for each requested sample.

        Raises:
          Refused: as `encode_chat` or `submit`.
        """
        self.check_count(body.samples)
        chat, prompt, form = await self.encode_chat(body)
        tools = body.chosen_tools
        limit = body.max_completion_tokens or body.max_tokens
        truncation = self.truncation_of_prompt(body, limit)
        prompt = prompt if truncation is None else truncation.cut(prompt)
        limit = limit or max(1, min(self.engine.context - len(prompt), self.config.max_tokens))
        stops = (*body.stops, *chat.stop)
        return await self.submit(
            body,
            [prompt],
            limit,
            stops,
            chat.stop_tokens,
            read=lambda: Readers(tools and ToolReader(tools, form), chat.reader(prompt)),
            wrap=lambda constraint, ends: chat.constrain(constraint, prompt, ends),
        )

    async def encode_chat(self, body: ChatRequest) -> tuple[ChatFormatter, list[int], ToolFormat | None]:
        """Return the chat formatter, the token ids of a chat, and the format of tool calls if the answer may have some.

        Raises:
          Refused: there is no chat template, or it refuses the chat.
        """
        chat = self.chat
        if chat is None:
            raise Refused(
                400,
                "the model's tokenizer has no chat template; use /v1/completions, or start the server with "
                "server.chat_template=chatml (or llama3, gemma, a file).",
            )
        messages = refuse_on_error(lambda: [message.as_template_input for message in body.messages])
        tools = body.chosen_tools
        if body.truncate_prompt_tokens is None:
            self.check_length(["".join(message["content"] for message in messages)])
        try:
            form = None
            if tools is not None and not tools.chosen:
                form = await asyncio.to_thread(chat.tool_format, tools, self.engine.stop_tokens)
            prompt = await asyncio.to_thread(
                chat.encode,
                messages,
                tools,
                body.variables,
                begins=body.add_generation_prompt,
                continues=body.continue_final_message,
            )
        except JaxstackError as error:
            raise Refused(400, str(error)) from None
        return chat, prompt, form

    def truncation_of_prompt(self, body: PromptRequest, max_tokens: int | None) -> Truncation | None:
        """Return how a prompt is cut to leave room for an answer of `max_tokens`; None: it is not."""
        return body.truncation(self.engine.context - max(1, COMPLETION_TOKENS if max_tokens is None else max_tokens))

    def truncation_of_text(self, body: PromptRequest) -> Truncation | None:
        """Return how a text that no answer continues is cut; None: it is not."""
        return body.truncation(self.engine.context - 1, "right")

    async def pool(
        self, request: Request, prompts: Sequence[Sequence[int]], body: PromptRequest
    ) -> list[Float[np.ndarray, "2 D"]]:
        """Return the mean of the final hidden states of each prompt, and the last one.

        Args:
          request: the client's request.
          prompts: ids of each prompt.
          body: the request's fields.

        Raises:
          Refused: the engine does not accept them, or as `collect`.
        """
        options = {"priority": body.priority or 0, "cache_salt": body.cache_salt}
        submitted = self._start(partial(self.engine.embed, prompt, **options) for prompt in prompts)
        details = TokenDetails(self._texts, chat=False, logprobs=None, prompt_logprobs=None, ids=False)
        answers = Answers(
            [TextAnswer(one, TextStream(self.tokenizer), details, echo_only=True) for one in submitted],
            self._metrics,
            self.config.timeout,
        )
        self._answers.add(answers)
        await self.collect(request, answers)
        found = []
        for one in submitted:
            assert one.pooled is not None
            found.append(one.pooled / [[len(one.prompt)], [1]])
        return found

    async def encode(
        self, texts: Sequence[str | list[int]], *, opened: bool = True, truncation: Truncation | None = None
    ) -> list[list[int]]:
        """Return the token ids of texts, some of which may be ids already.

        Args:
          texts: the texts.
          opened: put the document start before each text, if the server does so (`server.document_start`).
          truncation: how each is cut; None: it is not.

        Raises:
          Refused: a text is longer than the context.
        """
        if truncation is None:
            self.check_length(text for text in texts if isinstance(text, str))
        return await asyncio.to_thread(lambda: [self._encode(text, opened, truncation) for text in texts])

    async def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, with the names of special tokens.

        Raises:
          Refused: an id is outside of the vocabulary.
        """
        self._check_known("tokens", tokens)
        return await asyncio.to_thread(self.tokenizer.decode_marked, tokens)

    def texts_of(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of each token, as log-probabilities name it."""
        return [self._texts.text_of(token) for token in tokens]

    def _check_known(self, name: str, tokens: Sequence[int]) -> None:
        """Refuse ids of the field `name` that are outside of the vocabulary."""
        known = self.tokenizer.vocab_size
        unknown = next((token for token in tokens if token >= known), None)
        if unknown is not None:
            raise Refused(400, f"{name} must be below {known}, the number of ids; found {unknown}.")

    @cached_property
    def _most_characters(self) -> int | None:
        """Upper bound of the characters of a prompt that fits the context; None if the tokenizer has no such bound."""
        return self.engine.context * int(self.tokenizer.byte_lengths.max()) if self.tokenizer.writes_bytes else None

    def check_length(self, texts: Iterable[str]) -> None:
        """Refuse texts that are too long without encoding them, which would take seconds for megabytes.

        Raises:
          Refused: a text has more characters than the longest tokens would write in the context.
        """
        for text in texts:
            if self._most_characters is not None and len(text) > self._most_characters:
                raise Refused(
                    400,
                    f"a prompt of {len(text)} characters exceeds the context of {self.engine.context} tokens; shorten "
                    "it, or start the server with a longer engine.context.",
                )

    def _encode(self, prompt: str | list[int], opened: bool, truncation: Truncation | None) -> list[int]:
        if not isinstance(prompt, str):
            return prompt if truncation is None else truncation.cut(prompt)
        opening = [self.tokenizer.document_start] if opened and self.config.document_start else []
        most = self._most_characters
        if truncation is None:
            return [*opening, *self.tokenizer.encode(prompt).tolist()]
        if most is not None and len(prompt) > most:  # tokens beyond these characters would not be kept
            prompt = prompt[:most] if truncation.side == "right" else prompt[-most:]
        return truncation.cut([*opening, *self.tokenizer.encode(prompt).tolist()], len(opening))

    def _echo(self, prompt: str | list[int]) -> tuple[str, int]:
        """Return the text of a prompt and the number of tokens that `_encode` puts before it."""
        if not isinstance(prompt, str):
            return self.tokenizer.decode(prompt), 0
        return prompt, int(self.config.document_start)

    def check_count(self, count: int) -> None:
        """Check the number of answers, before any prompt is encoded.

        Raises:
          Refused: the engine does not take so many.
        """
        most = self.engine.most_requests
        if not 1 <= count <= most:
            limit = f"1 to {most} answers or texts (engine.slots and engine.queue together)"
            raise Refused(400, f"a request must ask for {limit}; found {count}. Send several requests.")

    async def submit(
        self,
        body: GenerationRequest,
        prompts: Sequence[list[int]],
        max_tokens: int,
        stop: Sequence[str],
        stop_tokens: frozenset[int],
        echo: Sequence[str | list[int]] | None = None,
        read: Callable[[], Readers] = Readers,
        wrap: Callable[[Constraint, Collection[int]], Constraint] = lambda constraint, ends: constraint,
    ) -> Answers:
        """Submit every prompt of an HTTP request to the engine, once for each requested sample.

        Args:
          body: the request.
          prompts: ids of each prompt.
          max_tokens: token limit of each answer; 0: the prompt alone.
          stop, stop_tokens: texts and ids that end an answer.
          echo: texts or ids of the prompts, with which the answers begin.
          read: returns the readers of one answer, which split it into reasoning, tool calls and text.
          wrap: returns the constraint of an answer, given the constraint that the request asks for and the stop tokens.

        Raises:
          Refused: a limit is exceeded, or the engine does not accept them.
        """
        if max_tokens > self.config.max_tokens:
            limit = f"{self.config.max_tokens} (server.max_tokens)"
            raise Refused(400, f"max_tokens must be at most {limit}; found {max_tokens}.")
        self._check_known("stop_token_ids", body.stop_token_ids or ())
        self._check_known("allowed_token_ids", body.allowed_token_ids or ())
        ends = frozenset() if body.ignore_eos else self.engine.stop_tokens | stop_tokens
        stops = ends | frozenset(body.stop_token_ids or ())
        constraints = await self._constraints(len(prompts) * body.samples, body, lambda form: wrap(form, stops))
        scores = 0 if body.samples > (body.n or 1) and body.likeliest is None else body.likeliest
        scored = [count for count in (body.prompt_logprobs, body.likeliest if echo else None) if count is not None]
        told = {"logprobs": scores, "prompt_logprobs": max(scored, default=None)}
        sampling = dataclasses.replace(refuse_on_error(lambda: body.sampling), **told)
        adapter = self.find_adapter(body.model)
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
                cache_salt=body.cache_salt,
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
                named_by_id=bool(body.return_tokens_as_token_ids),
            )
            opening = None if echo is None else self._echo(echo[index // body.samples])
            only = max_tokens == 0
            readers = read()
            answer = TextAnswer(
                request,
                self._text_of(request, body, stop, readers),
                details,
                echo=opening,
                echo_only=only,
                readers=readers,
                reasons=(*body.stops, *(body.stop_token_ids or ())),
            )
            texts.append(answer)
        answers = Answers(texts, self._metrics, self.config.timeout)
        self._answers.add(answers)
        return answers

    async def _constraints(
        self, count: int, body: GenerationRequest, wrap: Callable[[Constraint], Constraint]
    ) -> list[Constraint | None]:
        """Return the constraints of `count` answers, each None if the request asks for none.

        Args:
          count: number of answers.
          body: the request.
          wrap: returns the constraint of an answer, given that of its grammar.
        """
        grammar = refuse_on_error(lambda: body.grammar)
        allowed = None if body.allowed_token_ids is None else AllowedTokens(body.allowed_token_ids)
        words = None
        if bad := body.bad_words:  # to encode many words would hold up the event loop
            words = await asyncio.to_thread(refuse_on_error, lambda: BadWords(bad, self.tokenizer))
        found = list[Constraint | None]()
        for _ in range(count):
            form = wrap(await self._constrain(*grammar)) if grammar else allowed
            found.append(form if words is None else WithoutWords(words, form))
        return found

    def _text_of(
        self, request: generation.Request, body: GenerationRequest, stop: Sequence[str], readers: Readers
    ) -> TextStream:
        """Return the decoder of an answer's tokens; arguments as in `submit`."""
        special = self.tokenizer.special_tokens
        shown = {token: name for name, token in special.items()} if body.skip_special_tokens is False else {}
        return TextStream(
            self.tokenizer,
            request.prompt,
            stop,
            min_tokens=request.sampling.min_tokens,
            marks=shown or readers.marks(special),
            kept=body.stops if body.include_stop_str_in_output else (),
        )

    def _start(self, submissions: Iterable[Callable[[], generation.Request]]) -> list[generation.Request]:
        """Submit requests to the engine, all or none.

        Raises:
          Refused: the engine does not accept one.
        """
        submitted: list[generation.Request] = []
        try:
            with self.engine.together():
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
        """Return the constraint of one answer to a grammar, which is compiled unless an earlier request used it.

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

    async def collect(self, request: Request, answers: Answers) -> list[Part]:
        """Return the whole of each answer.

        Raises:
          Refused: as `Answers.stream`, or the client has closed its connection.
        """
        try:
            return await unless(answers.collect(), until_gone(request))
        finally:
            answers.cancel()
