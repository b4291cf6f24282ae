"""Prometheus metrics of the server, under vLLM's metric names so that dashboards made for vLLM work."""

import collections
import math
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.utils import floatToGoString

from jaxstack.decoding.engine import Engine
from jaxstack.decoding.requests import Request
from jaxstack.serve.engine import EngineGroup

_LATENCY = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
_DURATION = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0, 480.0)

_STEP_TOKENS = (1.0, *(float(2**power) for power in range(3, 15)))
_COUNT = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))


class Metrics:
    """Prometheus metrics of a serving engine and of the latencies of its requests.

    Args:
      engine: read at each scrape.
      model: value of the label model_name.
    """

    def __init__(self, engine: Engine | EngineGroup, model: str):
        self._engine = engine
        self._model = model
        self.registry = CollectorRegistry()
        self.registry.register(self)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(f"vllm:{name}", text, ["model_name"], registry=self.registry, buckets=buckets)
            return family.labels(model)

        self._first = histogram("time_to_first_token_seconds", "Time to first token.", _LATENCY)
        self._between = histogram("inter_token_latency_seconds", "Time between tokens.", _LATENCY)
        self._whole = histogram("e2e_request_latency_seconds", "Duration of requests.", _DURATION)
        self._queue = histogram("request_queue_time_seconds", "Time before a slot was free.", _DURATION)
        self._prefill = histogram(
            "request_prefill_time_seconds", "Time from a free slot to the first token.", _DURATION
        )
        self._decode = histogram("request_decode_time_seconds", "Time from the first token to the last.", _DURATION)
        self._inference = histogram("request_inference_time_seconds", "Time from a free slot to the end.", _DURATION)
        self._mean = histogram("request_time_per_output_token_seconds", "Mean time between tokens.", _LATENCY)
        self._prompt_tokens = histogram("request_prompt_tokens", "Tokens of a prompt.", _COUNT)
        self._answer_tokens = histogram("request_generation_tokens", "Tokens of an answer.", _COUNT)
        self._longest = histogram("request_max_num_generation_tokens", "Tokens of a request's longest answer.", _COUNT)
        self._limit = histogram("request_params_max_tokens", "Token limit of an answer.", _COUNT)

    def observe(self, request: Request, tokens: int, before: float | None, now: float) -> None:
        """Record the latency of newly generated tokens of a request.

        Args:
          tokens: number of new tokens.
          before: time of the tokens before them; None if they are the first.
          now: time of the newest token.
        """
        if before is None:
            times = request.times
            self._first.observe((times.first_token or now) - times.submitted)
            self._queue.observe((times.started or now) - times.submitted)
            before = times.first_token or now
            tokens = tokens - 1
        for _ in range(tokens):
            self._between.observe((now - before) / tokens)

    def observe_end(self, request: Request, tokens: int, now: float) -> None:
        """Record the durations and sizes of a finished request, whose answer has this number of tokens."""
        times = request.times
        self._whole.observe(now - times.submitted)
        self._prompt_tokens.observe(len(request.prompt))
        self._answer_tokens.observe(tokens)
        self._limit.observe(request.max_tokens)
        if times.started is None or times.first_token is None:
            return
        decode = (times.newest_token or now) - times.first_token
        self._prefill.observe(times.first_token - times.started)
        self._decode.observe(decode)
        self._inference.observe(now - times.started)
        if tokens > 1:
            self._mean.observe(decode / (tokens - 1))

    def observe_longest(self, tokens: int) -> None:
        """Record the size of the longest of all answers to a finished HTTP request."""
        self._longest.observe(tokens)

    def collect(self) -> Iterable[Metric]:
        """Yield the engine's current metrics; called by the Prometheus registry at each scrape."""
        state = self._engine.state
        stats = self._engine.state.stats
        usage = state.used_pages / state.pages
        gauges = {
            "num_requests_running": ("Requests that have a slot.", state.running),
            "num_requests_waiting": ("Requests that wait for a slot.", state.waiting),
            "kv_cache_usage_perc": ("Share of the KV cache's pages in use, 1 is all.", usage),
        }
        counters = {
            "prompt_tokens": ("Tokens of prompts.", stats.prompt_tokens),
            "generation_tokens": ("Tokens of answers.", stats.generated_tokens),
            "spec_decode_num_draft_tokens": ("Tokens that were guessed.", stats.draft_tokens),
            "spec_decode_num_accepted_tokens": ("Guessed tokens that were right.", stats.accepted_tokens),
            "num_preemptions": ("Requests that were stopped and recomputed.", state.preemptions),
            "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", state.prefix_queries),
            "prefix_cache_hits": ("Prompt tokens found in the prefix cache.", state.prefix_hits),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        counters = {f"vllm:{name}": counted for name, counted in counters.items()}
        counters["jaxstack:engine_steps"] = ("Steps of the engine.", stats.steps)
        counters["jaxstack:engine_steps_with_drafts"] = ("Those of them that guessed tokens.", stats.draft_steps)
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter
        yield self._step_tokens(stats.step_tokens)
        finished = CounterMetricFamily(
            "vllm:request_success", "Answers by the reason of their end.", labels=["model_name", "finished_reason"]
        )
        for reason in ("stop", "length", "cancelled", "error"):
            finished.add_metric([self._model, "abort" if reason == "cancelled" else reason], stats.finished[reason])
        yield finished

    def _step_tokens(self, counted: Mapping[int, int]) -> Metric:
        """Return the histogram of the numbers of tokens of steps, given how many steps had each number."""
        found = list(counted.items())  # at once, as the engine's thread goes on counting
        limits = [*_STEP_TOKENS, math.inf]
        buckets = [(floatToGoString(limit), sum(n for tokens, n in found if tokens <= limit)) for limit in limits]
        text = "Tokens of prompts and answers that a step of the engine computed."
        family = HistogramMetricFamily("vllm:iteration_tokens_total", text, labels=["model_name"])
        family.add_metric([self._model], buckets, sum(tokens * n for tokens, n in found))
        return family

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


_MEANS = frozenset(["vllm:kv_cache_usage_perc"])
"""Gauges of which the mean over all engines is told, not the sum."""
_COUNTING = ("counter", "histogram")


class _Families:
    """Metric families as a collector of Prometheus."""

    def __init__(self, families: Iterable[Metric]):
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        """Yield the families."""
        return iter(self._families)


def _render(families: Iterable[Metric]) -> str:
    registry = CollectorRegistry()
    registry.register(_Families(families))
    return generate_latest(registry).decode()


def add_up(living: Sequence[str], ended: Sequence[str]) -> str:
    """Return the metrics of several engines as those of one, in Prometheus' text format.

    Args:
      living: metrics of engines that work. Their numbers are added; of shares the mean is taken.
      ended: metrics of engines that have ended, of which only what has been counted is added: so no counter falls.
    """
    families: dict[str, Metric] = {}
    sums: dict[str, collections.Counter[tuple[str, tuple[tuple[str, str], ...]]]] = {}
    for number, text in enumerate([*living, *ended]):
        for family in text_string_to_metric_families(text):
            if family.name.endswith("_created") or (number >= len(living) and family.type not in _COUNTING):
                continue
            families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            counted = sums.setdefault(family.name, collections.Counter())
            for sample in family.samples:
                counted[sample.name, tuple(sorted(sample.labels.items()))] += sample.value  # type: ignore[assignment]
    for name, family in families.items():
        share = len(living) if name in _MEANS else 1
        for (sample, labels), value in sums[name].items():
            family.add_sample(sample, dict(labels), value / share)
    return _render(families.values())


def is_metrics(text: str) -> bool:
    """Return True if a text is in Prometheus' format, so that `add_up` can read it."""
    try:
        add_up([text], [])
    except (ValueError, LookupError):
        return False
    return True


def render_router(engines: int, unanswered: int, retried: int) -> str:
    """Return the router's own metrics in Prometheus' text format.

    Args:
      engines: number of engines that take requests.
      unanswered: number of requests that are not answered yet.
      retried: number of times that a request was sent to another engine.
    """
    return _render(
        [
            GaugeMetricFamily("jaxstack:router_engines", "Engines that take requests.", engines),
            GaugeMetricFamily("jaxstack:router_requests", "Requests that are not answered yet.", unanswered),
            CounterMetricFamily("jaxstack:router_retries", "Requests sent to another engine.", retried),
        ]
    )
