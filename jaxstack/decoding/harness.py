"""Models as EleutherAI's lm-evaluation-harness wants them (`pip install 'jaxstack[eval]'`), and its tasks run on them.

The harness brings tasks, prompts and metrics; we give it log-likelihoods and generated text.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from jaxstack.decoding.sampling import Sampling
from jaxstack.decoding.score import Scorer
from jaxstack.decoding.text import TextGenerator
from jaxstack.errors import ConfigError, JaxstackError, nearest

_TOKENS = 256
"""New tokens of a generated answer, where the task does not say."""
_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens")
_KNOWN = {"until", "do_sample", "temperature", "top_k", "top_p", "min_p", *_LIMITS}


class _Question(NamedTuple):
    """A request to generate, with what may not differ within a batch."""

    number: int
    ids: list[int]
    tokens: int
    sampling: Sampling
    stop: tuple[str, ...]

    @property
    def kind(self) -> tuple[Any, ...]:
        return self.tokens, self.sampling, self.stop


class HarnessModel(TemplateLM):
    """A model for `lm_eval.simple_evaluate(model=...)`.

    A text begins with the ids that open one (`TextGenerator.opening`), as in training.

    Args:
      generator: the model with its tokenizer.
      max_length: tokens of a sequence; what is longer loses its beginning.
      batch_size: rows at a time.
      seed: of answers that are drawn; answer number n of a task has seed + n, whatever batch it is in.
      report: is told after each batch how many of a kind of requests are done; default: shown on a terminal.
    """

    def __init__(
        self,
        generator: TextGenerator,
        *,
        max_length: int,
        batch_size: int = 16,
        seed: int = 0,
        report: Callable[[int], Any] | None = None,
    ):
        super().__init__()
        self.generator, self.max_length, self.seed, self._report = generator, max_length, seed, report
        self.scorer = Scorer(generator.decoder, batch_size)

    @property
    def eot_token_id(self) -> int:
        return self.generator.tokenizer.document_start

    @property
    def tokenizer_name(self) -> str:
        """For the harness's caches."""
        return self.generator.tokenizer.hash

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The ids of a text without those that open it."""
        return list(map(int, self.generator.tokenizer.encode(string)))

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, Sequence[int], Sequence[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        rows = []
        for _, context, wanted in requests:
            before = self._opened(context)
            if len(wanted) > self.max_length:
                raise ConfigError(f"an answer of {len(wanted)} tokens exceeds the model's {self.max_length}.")
            ids = [*before, *wanted][-(self.max_length + 1) :]
            rows.append((ids, len(ids) - len(wanted)))
        found = self._scores(rows, disable_tqdm)
        for (words, *_), one in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", words, one)
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        rows, owners = [], []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(ids, self._opened([])[-1], self.max_length, 1):
                context, wanted = make_disjoint_window(window)
                rows.append(([*context, *wanted], len(context)))
                owners.append(number)
        totals = [0.0] * len(requests)
        for number, (value, _) in zip(owners, self._scores(rows, disable_tqdm), strict=True):
            totals[number] += value
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        questions = [self._question(number, *request.args) for number, request in enumerate(requests)]
        answers, progress = [""] * len(requests), self._progress("answered", len(requests), disable_tqdm)
        done = 0
        for kind in dict.fromkeys(question.kind for question in questions):
            alike = sorted((q for q in questions if q.kind == kind), key=lambda q: -len(q.ids))
            for start in range(0, len(alike), self.scorer.batch_size):
                batch = alike[start : start + self.scorer.batch_size]
                self._answer(batch, answers)
                done += len(batch)
                progress(done)
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, answer)
        return answers

    def _progress(self, word: str, total: int, quiet: bool) -> Callable[[int], Any]:
        if self._report is not None:
            return self._report

        def show(done: int) -> None:
            if not quiet and sys.stderr.isatty():
                end = "\n" if done == total else ""
                print(f"\r{word} {done}/{total}", end=end, file=sys.stderr, flush=True)

        return show

    def _opened(self, context: Sequence[int]) -> list[int]:
        """A context from the beginning of a text on; at least one token, as something must come before an answer."""
        opening = list(self.generator.opening)
        if list(context[: len(opening)]) == opening:
            opening = []
        return [*opening, *context] or [self.eot_token_id]

    def _scores(self, rows: Sequence[tuple[Sequence[int], int]], quiet: bool) -> list[tuple[float, bool]]:
        scores = self.scorer.score(rows, self._progress("scored", len(rows), quiet))
        return [(score.log_probability, score.is_greedy) for score in scores]

    def _question(self, number: int, context: str, settings: dict[str, Any]) -> _Question:
        if unknown := sorted(settings.keys() - _KNOWN):
            raise ConfigError(f"a task wants the generation setting {unknown[0]!r}; {nearest(unknown[0], _KNOWN)}")
        until = settings.get("until") or []
        stop = [until] if isinstance(until, str) else until
        limits = (settings.get(name) for name in _LIMITS)
        tokens = min(int(next((n for n in limits if n is not None), _TOKENS)), self.max_length // 2)
        temperature = float(settings.get("temperature") or 0.0)
        if settings.get("do_sample") is False:
            temperature = 0.0
        try:
            sampling = Sampling(temperature, *(settings.get(name) for name in ("top_k", "top_p", "min_p")))
        except ValueError as error:
            raise ConfigError(f"a task's generation settings: {error}") from None
        ids = self._opened(self.tok_encode(context))[-(self.max_length - tokens) :]
        return _Question(number, ids, tokens, sampling, tuple(s for s in stop if s))

    def _answer(self, batch: Sequence[_Question], answers: list[str]) -> None:
        tokens, sampling, stop = batch[0].kind
        rows = [question.ids for question in batch]
        missing = self.scorer.batch_size - len(rows)  # the last batch has the shape of the others
        seeds = [(self.seed + question.number) % 2**32 for question in batch]
        ended = 0
        pieces = self.generator.stream(
            rows + rows[:1] * missing, tokens, sampling, seed=seeds + seeds[:1] * missing, stop=stop
        )
        for piece in pieces:
            if piece.row < len(batch):
                answers[batch[piece.row].number] += piece.text
                ended += piece.reason is not None
                if ended == len(batch):
                    break


def run_tasks(
    model: HarnessModel,
    tasks: Sequence[str],
    *,
    num_fewshot: int | None = None,
    limit: int | None = None,
    manager: TaskManager | None = None,
) -> dict[str, Any]:
    """The harness's results, plain data: `results` has the metrics of each task.

    Args:
      tasks: names, or paths of task files.
      num_fewshot: examples before each question; default: as the task says.
      limit: questions of each task at most.
      manager: what `find_tasks` returned for them.

    Raises:
      ConfigError: there is no such task.
      JaxstackError: a task or its data cannot be loaded.
    """
    manager = manager or find_tasks(tasks)
    found = simple_evaluate(
        model=model, tasks=list(tasks), num_fewshot=num_fewshot, limit=limit, task_manager=manager, log_samples=False
    )
    return dict(found or {})


def find_tasks(tasks: Sequence[str], include_path: str | None = None) -> TaskManager:
    """What loads the tasks; the harness's own, of which it reads thousands of files, only where a name asks for them.

    Args:
      include_path: directory with further task files.

    Raises:
      ConfigError: there is no such task.
    """
    names = [name for name in tasks if not Path(name).is_file()]
    manager = _Tasks(include_path=include_path, include_defaults=bool(names))
    for name in names:
        if name not in manager.all_tasks:
            hint = nearest(name, manager.all_tasks)
            raise ConfigError(f"there is no task {name!r} and no such file; {hint} (all: `lm_eval ls tasks`)")
    return manager


class _Tasks(TaskManager):
    """Tasks whose loading fails with one message: files, their code, the network."""

    def load(self, task_list: Any) -> Any:
        try:
            return super().load(task_list)
        except Exception as error:  # whatever a task's own code raises
            cause = error.__cause__ or error  # of unreadable data only the cause says what is wrong with them
            reason = f"{type(cause).__name__}: {cause}".splitlines()[0]
            raise JaxstackError(f"the tasks {task_list} cannot be loaded: {reason}") from error


def task_metrics(results: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Of each task and group its numbers: metric -> value, and `<metric>_stderr` where the harness has one.

    Where a task filters answers in several ways, the filter's name follows that of the metric.
    """
    found: dict[str, dict[str, float]] = {}
    for task, values in results["results"].items():
        numbers = found.setdefault(task, {})
        for key, value in values.items():
            metric, comma, answers = key.partition(",")
            if comma and isinstance(value, int | float):
                base = metric.removesuffix("_stderr")
                name = base if answers == "none" else f"{base}_{answers}"
                numbers[f"{name}_stderr" if metric != base else name] = float(value)
    return found
