"""Adapter that runs EleutherAI's lm-evaluation-harness tasks on models (`pip install 'jaxstack[eval]'`).

The harness brings tasks, prompts and metrics; the adapter answers with log-likelihoods and generated text.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from jaxstack.decoding.decode import Scorer
from jaxstack.decoding.sampling import Sampling
from jaxstack.decoding.text_stream import TextGenerator
from jaxstack.errors import ConfigError, JaxstackError, nearest

_DEFAULT_TOKENS = 256
"""Token limit of a generated answer, unless the task sets one."""
_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens")
_KNOWN_SETTINGS = {"until", "do_sample", "temperature", "top_k", "top_p", "min_p", *_LIMITS}


class _BatchKey(NamedTuple):
    """Generation settings that all questions of one batch must share."""

    max_tokens: int
    sampling: Sampling
    stop: tuple[str, ...]


class _Question(NamedTuple):
    """A request of the harness to generate text, with its settings."""

    number: int
    ids: list[int]
    settings: _BatchKey


class HarnessModel(TemplateLM):
    """Adapts a model to lm-evaluation-harness, for `lm_eval.simple_evaluate(model=...)`.

    Texts begin with the ids of `TextGenerator.opening`, as in training.

    Args:
      generator: the model with its tokenizer.
      max_length: token limit of a sequence; the beginning of a longer one is cut off.
      batch_size: sequences per batch.
      seed: seed of sampled answers; answer number n of a task has seed + n, in whatever batch it is.
      report: called after each batch with the number of requests done; default: shows progress on a terminal.
    """

    def __init__(
        self,
        generator: TextGenerator,
        *,
        max_length: int,
        batch_size: int = 16,
        seed: int = 0,
        report: Callable[[int], object] | None = None,
    ):
        super().__init__()
        self.generator = generator
        self.max_length = max_length
        self.seed = seed
        self._report = report
        self.scorer = Scorer(generator.decoder, batch_size)

    @property
    def eot_token_id(self) -> int:
        """Token id that separates documents."""
        return self.generator.tokenizer.document_start

    @property
    def tokenizer_name(self) -> str:
        """Hash that identifies the tokenizer; the harness uses it in the keys of its caches."""
        return self.generator.tokenizer.hash

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        """Return the token ids of a text, without adding a document-start id."""
        return list(map(int, self.generator.tokenizer.encode(string)))

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str], Sequence[int], Sequence[int]]],
        disable_tqdm: bool = False,
        **kwargs: object,
    ) -> list[tuple[float, bool]]:
        """Return for each answer, given as token ids, (log-likelihood, True if greedy decoding would produce it).

        Requests are (texts, context ids, answer ids).
        """
        rows = []
        for _, context, wanted in requests:
            before = self._with_opening(context)
            if len(wanted) > self.max_length:
                raise ConfigError(f"an answer of {len(wanted)} tokens exceeds the model's {self.max_length}.")
            ids = [*before, *wanted][-(self.max_length + 1) :]
            rows.append((ids, len(ids) - len(wanted)))
        found = self._scores(rows, disable_tqdm)
        for (texts, *_), result in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, result)
        return found

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text, scored in windows of `max_length` tokens."""
        rows = []
        owners = []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(ids, self._with_opening([])[-1], self.max_length, 1):
                context, wanted = make_disjoint_window(window)
                rows.append(([*context, *wanted], len(context)))
                owners.append(number)
        totals = [0.0] * len(requests)
        for number, (value, _) in zip(owners, self._scores(rows, disable_tqdm), strict=True):
            totals[number] += value
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate the answer to each of the harness's requests."""
        questions = [self._make_question(number, *request.args) for number, request in enumerate(requests)]
        answers = [""] * len(requests)
        progress = self._progress("answered", len(requests), disable_tqdm)
        done = 0
        for settings in dict.fromkeys(question.settings for question in questions):
            alike = sorted((q for q in questions if q.settings == settings), key=lambda q: -len(q.ids))
            for start in range(0, len(alike), self.scorer.batch_size):
                batch = alike[start : start + self.scorer.batch_size]
                self._answer(batch, answers)
                done += len(batch)
                progress(done)
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, answer)
        return answers

    def _progress(self, word: str, total: int, quiet: bool) -> Callable[[int], object]:
        if self._report is not None:
            return self._report

        def show(done: int) -> None:
            if not quiet and sys.stderr.isatty():
                end = "\n" if done == total else ""
                print(f"\r{word} {done}/{total}", end=end, file=sys.stderr, flush=True)

        return show

    def _with_opening(self, context: Sequence[int]) -> list[int]:
        """Prepend the ids that begin a document, unless the context has them; the result is never empty."""
        opening = list(self.generator.opening)
        if list(context[: len(opening)]) == opening:
            opening = []
        return [*opening, *context] or [self.eot_token_id]

    def _scores(self, rows: Sequence[tuple[Sequence[int], int]], quiet: bool) -> list[tuple[float, bool]]:
        scores = self.scorer.score(rows, self._progress("scored", len(rows), quiet))
        return [(score.log_probability, score.is_greedy) for score in scores]

    def _make_question(self, number: int, context: str, settings: Mapping[str, Any]) -> _Question:
        """Convert one of the harness's requests to a `_Question`: token ids and checked generation settings.

        Raises:
          ConfigError: a setting is unknown or wrong.
        """
        if unknown := sorted(settings.keys() - _KNOWN_SETTINGS):
            hint = nearest(unknown[0], _KNOWN_SETTINGS)
            raise ConfigError(f"a task wants the generation setting {unknown[0]!r}; {hint}")
        until = settings.get("until") or []
        stop = [until] if isinstance(until, str) else until
        limits = (settings.get(name) for name in _LIMITS)
        tokens = min(int(next((n for n in limits if n is not None), _DEFAULT_TOKENS)), self.max_length // 2)
        temperature = float(settings.get("temperature") or 0.0)
        if settings.get("do_sample") is False:
            temperature = 0.0
        try:
            sampling = Sampling(temperature, settings.get("top_k"), settings.get("top_p"), settings.get("min_p"))
        except ValueError as error:
            raise ConfigError(f"a task's generation settings: {error}") from None
        ids = self._with_opening(self.tok_encode(context))[-(self.max_length - tokens) :]
        return _Question(number, ids, _BatchKey(tokens, sampling, tuple(s for s in stop if s)))

    def _answer(self, batch: Sequence[_Question], answers: list[str]) -> None:
        """Generate the answers to a batch of questions with equal settings, and store them in `answers`."""
        tokens, sampling, stop = batch[0].settings
        rows = [question.ids for question in batch]
        missing = self.scorer.batch_size - len(rows)  # pads the last batch to the shape of the others
        seeds = [(self.seed + question.number) % 2**32 for question in batch]
        ended = 0
        pieces = self.generator.stream(
            rows + rows[:1] * missing, tokens, sampling, seed=seeds + seeds[:1] * missing, stop=stop
        )
        for piece in pieces:
            if piece.row < len(batch):
                answers[batch[piece.row].number] += piece.text
                ended += piece.finish_reason is not None
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
    """Run tasks of the lm-evaluation-harness on a model.

    Args:
      model: the model to evaluate.
      tasks: names, or paths of task files.
      num_fewshot: examples before each question; default: as the task defines.
      limit: maximum number of questions per task.
      manager: what `make_task_manager` returned for these tasks.

    Returns:
      The harness's results as plain data; `results` has the metrics of each task.

    Raises:
      ConfigError: there is no such task.
      JaxstackError: a task or its data cannot be loaded.
    """
    manager = manager or make_task_manager(tasks)
    found = simple_evaluate(
        model=model, tasks=list(tasks), num_fewshot=num_fewshot, limit=limit, task_manager=manager, log_samples=False
    )
    return dict(found or {})


def make_task_manager(tasks: Sequence[str], include_path: str | None = None) -> TaskManager:
    """Return the harness's task manager, and check that it knows these tasks.

    Its own tasks, thousands of files, are read only if a name asks for them.

    Args:
      tasks: names, or paths of task files.
      include_path: directory with additional task files.

    Raises:
      ConfigError: there is no such task.
    """
    names = [name for name in tasks if not Path(name).is_file()]
    manager = _TaskManager(include_path=include_path, include_defaults=bool(names))
    for name in names:
        if name not in manager.all_tasks:
            hint = nearest(name, manager.all_tasks)
            raise ConfigError(f"there is no task {name!r} and no such file; {hint} (all: `lm_eval ls tasks`)")
    return manager


class _TaskManager(TaskManager):
    """A harness task manager that reports each failure to load a task (files, code, network) in one message."""

    def load(self, task_list: Any) -> Any:
        try:
            return super().load(task_list)
        except Exception as error:  # a task's own code may raise anything
            cause = error.__cause__ or error  # for unreadable data, only the cause says why
            reason = f"{type(cause).__name__}: {cause}".splitlines()[0]
            raise JaxstackError(f"the tasks {task_list} cannot be loaded: {reason}") from error


def task_metrics(results: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the metrics of each task and task group from the results of `run_tasks`.

    Returns:
      Task -> metric -> value, with `<metric>_stderr` if the harness computes it. If a task filters answers in several
      ways, the filter's name follows the metric's.
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
