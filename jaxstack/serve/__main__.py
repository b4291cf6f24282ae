"""The command `python -m jaxstack.serve --run DIR`: serve a trained model over HTTP with OpenAI's completion API."""

import argparse
import contextlib
import gc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from jaxstack.cli import CommandParser, add_examples, run_command
from jaxstack.config.loader import build_component, merge_overrides
from jaxstack.errors import ConfigError
from jaxstack.heartbeat import doing
from jaxstack.serve.config import ServeConfig

if TYPE_CHECKING:
    from jaxstack.decoding.config import EngineConfig
    from jaxstack.decoding.decoder import Decoder
    from jaxstack.decoding.engine import Engine
    from jaxstack.models.adapter_stack import AdapterMatrices
    from jaxstack.run.load import Run
    from jaxstack.serve.engine import EngineGroup
    from jaxstack.serve.pair_scores import Classifier
    from jaxstack.stored import StoredModel

_DRAFT_TOKENS = 4
"""Default of `engine.draft_tokens` with a draft model."""
API_KEY = "JAXSTACK_API_KEY"
"""Environment variable with the API key, which the command line would show to other users."""

_LESS_MEMORY = (
    "engine.slots, engine.context, engine.chunk or engine.memory_fraction, or use more devices (parallel.tensor)"
)
"""Ways to need less device memory, for the message that there is too little."""


def make_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        prog="jaxstack serve",
        description="Serve a trained run or a Hugging Face checkpoint over HTTP, with OpenAI's routes /v1/completions "
        "and /v1/chat/completions, metrics for Prometheus at /metrics, and a chat page at /.",
        epilog=f"Sizes and limits are set as engine.key=value and server.key=value, such as engine.slots=64. Without "
        f"--host only this machine can connect. Set the environment variable {API_KEY} to ask clients for that key.",
    )
    parser.add_argument("--run", metavar="DIR", required=True, help="run directory, or Hugging Face checkpoint")
    parser.add_argument(
        "--draft", metavar="DIR", help="a smaller run or checkpoint with the same tokenizer, which guesses tokens"
    )
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=DIR",
        help="a run with adapters of this model, or a directory of PEFT, for requests with this name as their model; "
        "may be given several times",
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="engine, server, parallel, precision")
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (default 127.0.0.1)"
    )
    parser.add_argument(
        "--port", type=int, default=8000, metavar="N", help="port to listen on, 0 for any free one (default 8000)"
    )
    parser.add_argument(
        "--name", metavar="NAME", help="name of the model for clients (default: the name of the directory)"
    )
    parser.add_argument(
        "--plan", action="store_true", help="print slots, pages and the bytes of weights and caches, and exit"
    )
    parser.add_argument(
        "--replicas",
        type=int,
        metavar="N",
        help="serve with N engines of this host behind a router; on several nodes of a Slurm or indexed Kubernetes job "
        "with N engines of each, and the router on the first",
    )
    parser.add_argument(
        "--router",
        metavar="URL",
        help="be an engine of the router at http://HOST:PORT, with the router's JAXSTACK_ENGINE_KEY",
    )
    parser.add_argument("--step", type=int, metavar="N", help="checkpoint to load (default: the newest)")
    parser.add_argument(
        "--recipe",
        metavar="NAME|FILE",
        help="compress the weights at loading by a recipe of jaxstack compress that needs no calibration, such as "
        "fp8-dynamic; those of --draft stay as they are",
    )
    return add_examples(
        parser,
        "serve --run runs/quickstart",
        "serve --run models/qwen2.5-0.5b --port 9000 engine.slots=32",
        "serve --run models/qwen2.5-0.5b engine.slots=256 --plan",
        "serve --run models/qwen2.5-7b --draft models/qwen2.5-0.5b",
        "serve --run models/qwen2.5-7b --adapter sql=runs/sql --adapter legal=models/legal-lora",
        "serve --run models/qwen2.5-7b --replicas 8",
        "serve --run models/llama-3.1-8b --recipe fp8-dynamic",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `python -m jaxstack.serve` with the arguments `argv`; return its exit code."""
    args = make_parser().parse_intermixed_args(argv)
    # What is imported stays: the garbage collector would go through it again and again for nothing.
    gc.disable()
    try:
        return run_command("jaxstack serve", lambda: _serve(args), _LESS_MEMORY)
    finally:
        gc.enable()


def _serve(args: argparse.Namespace) -> int | None:
    for override in args.overrides:
        if "=" not in override:
            raise ConfigError(f"{override!r} is no setting; write section.key=value, such as engine.slots=32.")
    own = [override for override in args.overrides if override.startswith(("engine.", "server."))]
    config = build_component(ServeConfig, merge_overrides({}, own), "the settings", own)
    others = [override for override in args.overrides if override not in own]
    key = _read_key(API_KEY)
    try:
        from jaxstack.serve.engine import check_settings
        from jaxstack.serve.listen import bind, check_router, serve
        from jaxstack.serve.registration import ENGINE_KEY, parse_url
        from jaxstack.serve.replicas import serve_replicas
    except ImportError as error:
        raise ConfigError(f"serving needs {error.name}: pip install 'jaxstack[serve]'.") from None
    engine_key = _read_key(ENGINE_KEY)
    if args.replicas is not None and not args.plan:
        _collect_newer_objects()
        return serve_replicas(args, config.server, key, engine_key, _report)
    address = None if args.router is None else parse_url(args.router)
    with contextlib.ExitStack() as stack:
        bound = None if args.plan else stack.enter_context(contextlib.closing(bind(args.host, args.port)))
        router = None if bound is None or address is None else check_router(address, bound, engine_key)
        models = _load_models(args, others, config)
        check_settings(models.run.decoder, models.config, models.draft)
        if bound is None:
            print(_plan(models.run.decoder, models.config, models.draft))
            return
        _report(f"[{args.run}, step {models.run.step}] compiling")
        _collect_newer_objects()
        engine = _compile(models)
        with engine, doing(None):
            for named, matrices in models.adapters.items():
                engine.load_adapter(named, matrices)
            gc.collect()
            _collect_newer_objects()
            serve(
                engine,
                models.run.tokenizer,
                args.name or Path(args.run).resolve().name,
                config.server,
                bound,
                api_key=key,
                read_adapter=models.read_adapter,
                classifier=models.classifier,
                router=router,
                report=_report,
            )


class _Models(NamedTuple):
    """The loaded model of a server, with its draft model, reward head and adapters."""

    run: "Run"
    draft: "Decoder | None"
    classifier: "Classifier | None"
    adapters: "Mapping[str, AdapterMatrices]"
    read_adapter: "Callable[[Path], AdapterMatrices]"
    config: "EngineConfig"
    """Settings of the engine, with room for the adapters, and with draft tokens if there is a draft model."""


def _load_models(args: argparse.Namespace, overrides: Sequence[str], config: ServeConfig) -> _Models:
    """Load the model and what belongs to it."""
    from jaxstack.run.adapters import check_base, read_adapter
    from jaxstack.run.load import find_reward_head, load, run_config
    from jaxstack.serve.chat_format import ChatFormatter
    from jaxstack.serve.pair_scores import Classifier
    from jaxstack.stored import StoredModel

    # What is wrong with other files is told before minutes of loading the model.
    stored = StoredModel.open(args.run)
    if args.draft is not None:
        _check_draft(StoredModel.open(args.draft), stored)
    if config.server.chat_template != "auto":
        ChatFormatter(stored.tokenizer, config.server.chat_template)
    read = partial(read_adapter, model=run_config(stored, overrides).model)
    adapters = {name: read(directory) for name, directory in map(_adapter, args.adapter)}
    engine = _with_places(config.engine, adapters)
    with doing("loading the model"):
        run = load(args.run, overrides, step=args.step, recipe=args.recipe, serving=True, report=_report)
        for _, directory in map(_adapter, args.adapter):
            check_base(directory, run.parameters)
        head = find_reward_head(args.run, step=args.step)
        if not engine.adapters:  # which are those of single projections
            run.decoder.join_projections()
    draft = None
    if args.draft is not None:
        draft = _load_draft(args.draft, run, overrides)
        engine = engine.model_copy(update={"draft_tokens": engine.draft_tokens or _DRAFT_TOKENS})
    classifier = None if head is None else Classifier(head.weights, head.encode)
    return _Models(run, draft, classifier, adapters, partial(read, base=run.parameters), engine)


def _compile(models: _Models) -> "Engine | EngineGroup":
    """Return the running engine; tell by which kernels packed weights are multiplied."""
    from jaxstack.observe.what_ran import describe_backends
    from jaxstack.serve.engine import open_engine
    from pallas_kernels import record_choices
    from pallas_kernels.target import current_target

    with doing("compiling"), record_choices() as choices:
        engine = open_engine(
            models.run.decoder,
            models.config,
            vocab_size=models.run.tokenizer.vocab_size,
            stop_tokens=models.run.stop_tokens,
            draft=models.draft,
            # On a GPU XLA measures kernels while it compiles, which steps would disturb.
            warm_up="first" if current_target().platform == "cpu" else "cached",
        )
    if products := describe_backends(choices, "packed_matmul", "float8_mlp"):
        _report(products)
    return engine


def _collect_newer_objects() -> None:
    """Let the garbage collector run for objects that are made from now on."""
    gc.freeze()
    gc.enable()


def _plan(model: "Decoder", config: "EngineConfig", draft: "Decoder | None") -> str:
    """Return what a server of these sizes keeps in the memory of each replica's devices."""
    from jaxstack.decoding.memory_plan import describe_memory

    first, *others = model.split_replicas()
    lines = [f"{1 + len(others)} replicas (parallel.data), each with:"] if others else []
    return "\n".join([*lines, describe_memory(first, config, None if draft is None else draft.split_replicas()[0])])


def _read_key(variable: str) -> str | None:
    """Return the key in an environment variable; None if there is none.

    Raises:
      ConfigError: it is empty, or nobody could send it.
    """
    key = os.environ.get(variable)
    if key is not None and not key.strip():
        raise ConfigError(f"the environment variable {variable} is empty; set it to a key, or unset it.")
    if key is not None and any(ord(character) < 32 or ord(character) == 127 for character in key.strip()):
        raise ConfigError(
            f"the environment variable {variable} has a control character, such as a line break, which no client can "
            "send in a header; set it to one line of text."
        )
    return key


def _adapter(argument: str) -> tuple[str, str]:
    """Return the name and the directory of an argument NAME=DIR.

    Raises:
      ConfigError: it has another form.
    """
    name, found, directory = argument.partition("=")
    if not name or not found or not directory:
        raise ConfigError(f"--adapter is NAME=DIR, such as sql=runs/sql; found {argument!r}.")
    return name, directory


def _with_places(config: "EngineConfig", adapters: "Mapping[str, AdapterMatrices]") -> "EngineConfig":
    """Return the configuration with room for these adapters at least."""
    ranks = [layer.a.shape[-1] for matrices in adapters.values() for layer in matrices.values()]
    update = {
        "adapters": max(config.adapters, len(adapters)),
        "adapter_rank": max([config.adapter_rank, *ranks]),
    }
    return config.model_copy(update=update)


def _check_draft(draft: "StoredModel", model: "StoredModel") -> None:
    """Check that a draft model can guess the tokens of the served model.

    Raises:
      ConfigError: it has another tokenizer.
    """
    if draft.tokenizer.hash != model.tokenizer.hash:
        raise ConfigError(
            f"the draft model {draft.directory} has another tokenizer than {model.directory};"
            " use one that was trained with the same tokenizer."
        )


def _load_draft(directory: str, run: "Run", overrides: Sequence[str]) -> "Decoder":
    """Load the draft model for speculative decoding onto the device mesh of the served model."""
    from jaxstack.run.load import keeps_layout, load

    degrees = [f"parallel.{axis}={degree}" for axis, degree in run.decoder.rules.mesh.shape.items() if degree > 1]
    others = [override for override in overrides if not override.startswith("parallel.") or keeps_layout(override)]
    draft = load(directory, [*others, *(degrees or ["parallel.tensor=1"])], serving=True, report=_report)
    draft.decoder.join_projections()
    return draft.decoder


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
