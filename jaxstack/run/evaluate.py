"""What `python -m jaxstack.evaluate` does: the loss on held-out text, and tasks of the lm-evaluation-harness."""

import argparse
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxstack.data.build_shards import available_cores
from jaxstack.data.config import SourceConfig, TokenizerConfig
from jaxstack.data.loader import Data, open_data
from jaxstack.distributed.devices import cache_compilations, start_devices
from jaxstack.errors import ConfigError, JaxstackError
from jaxstack.evaluation import bits_per_byte
from jaxstack.files import write_file
from jaxstack.models.pretrained import is_run
from jaxstack.parallel import ParallelConfig
from jaxstack.run.build import make_trainer
from jaxstack.run.eval_tasks import longest_sequence, open_harness
from jaxstack.run.load import open_config, open_generator, open_tokenizer, restore_parameters
from jaxstack.run_config import RunConfig, layout_problems


def evaluate(args: argparse.Namespace) -> None:
    """Evaluates what the parsed arguments say, and prints it."""
    config = open_config(args.run, args.overrides)
    if not args.tasks and not args.data and not is_run(args.run):
        raise ConfigError(f"{args.run} is a Hugging Face checkpoint, with no held-out text: give --data or --tasks.")
    harness = open_harness() if args.tasks else None
    values: dict[str, Any] = {}
    if args.data or not args.tasks:
        values = _held_out_loss(config, args)
    if harness is not None:
        values |= _run_tasks(harness, config, args)
    if args.json:
        print(json.dumps(values))
    else:
        _show(args.run, values)


def _held_out_loss(config: RunConfig, args: argparse.Namespace) -> dict[str, Any]:
    devices = start_devices(config.parallel.simulate_devices)
    cache_compilations()
    config = _laid_out(config, devices, any(word.startswith("parallel.") for word in args.overrides))
    data = _evaluation_data(config, args)
    rows = config.model.vocab_size or 0
    if data.tokenizer.vocab_size > rows:
        raise ConfigError(
            f"the tokenizer has {data.tokenizer.vocab_size} ids, the model only {rows} rows for them: it is that of "
            "another model."
        )
    trainer = make_trainer(config, data, jax.devices()[: math.prod(config.parallel.degrees.values())])
    params, non_params, step = restore_parameters(args.run, config.model, trainer.module, trainer.rules, args.step)
    values = trainer.evaluator.run(params, non_params, args.max_tokens)
    if values is None:
        raise JaxstackError("there is no held-out text to evaluate on; give some with --data.")
    raw = data.held_out_bytes(args.max_tokens)
    return {"step": step, **values, **bits_per_byte(values, len(raw)), "bytes": len(raw)}


def _laid_out(config: RunConfig, devices: int, given: bool) -> RunConfig:
    """The configuration with the layout that is `given`, or its own where that fits the machine, else over `fsdp`."""
    parallel = config.parallel
    if given or -1 in parallel.degrees.values():
        fits = -1 not in parallel.degrees.values() and math.prod(parallel.degrees.values()) <= devices
        parallel = parallel if fits else parallel.resolve(devices)
    elif math.prod(parallel.degrees.values()) == devices:
        return config
    else:  # another machine than the one it was trained on: any layout gives the same loss
        parallel = ParallelConfig(fsdp=devices, simulate_devices=parallel.simulate_devices)
    train, stages = config.train, parallel.pipeline
    unit = parallel.data * parallel.fsdp * parallel.expert * (2 * stages if stages > 1 else 1)
    size = train.eval_batch_size or train.global_batch_size // train.gradient_accumulation
    size = -(-size // unit) * unit
    sizes = {"eval_batch_size": size, "global_batch_size": size, "gradient_accumulation": 1}
    config = config.model_copy(update={"parallel": parallel, "train": train.model_copy(update=sizes)})
    if problems := layout_problems(config):
        raise ConfigError(" ".join(problems))
    return config


def _evaluation_data(config: RunConfig, args: argparse.Namespace) -> Data:
    """The run's own data, or the given paths as held-out text under the model's tokenizer."""
    section = config.data
    if args.data:
        open_tokenizer(args.run)
        folder = Path(args.run) / "tokenizer" if is_run(args.run) else Path(args.run)
        sources = tuple(SourceConfig(path=path, text_key=args.text_key) for path in args.data)
        tokenizer = TokenizerConfig(name="file", path=str(folder))
        unused = (SourceConfig(path="synthetic"),)
        section = section.model_copy(update={"held_out": sources, "sources": unused, "tokenizer": tokenizer})
    return open_data(
        section,
        sequence_length=config.train.sequence_length,
        seed=config.run.seed,
        report=lambda text: print(text, file=sys.stderr),
        workers=available_cores(),
    )


def _run_tasks(harness: Any, config: RunConfig, args: argparse.Namespace) -> dict[str, Any]:
    manager = harness.find_tasks(args.tasks, args.include_path)
    generator, step = open_generator(
        args.run, args.overrides, step=args.step, document_start=not args.no_document_start
    )
    longest = config.model.max_position_embeddings
    length = args.max_length or longest_sequence(config)
    if longest is not None and length > longest:
        raise ConfigError(f"--max-length {length} exceeds the model's max_position_embeddings ({longest}).")
    model = harness.HarnessModel(generator, max_length=length, batch_size=args.batch_size)
    found = harness.run_tasks(model, args.tasks, num_fewshot=args.num_fewshot, limit=args.limit, manager=manager)
    if args.output is not None:
        write_file(Path(args.output), (json.dumps(found, indent=2, default=str) + "\n").encode())
    return {"step": step, "tasks": harness.task_metrics(found)}


def _show(run: str, values: Mapping[str, Any]) -> None:
    print(f"{run}, step {values['step']}")
    if "eval_loss" in values:
        print(f"held-out text: {int(values['eval_items']):,} tokens, {values['bytes']:,} bytes")
        for name, unit in (("eval_loss", "nats a token"), ("eval_perplexity", ""), ("eval_bits_per_byte", "")):
            if name in values:
                print(f"  {name.removeprefix('eval_').replace('_', ' '):<16}{values[name]:.4f} {unit}".rstrip())
    for task, metrics in values.get("tasks", {}).items():
        print(f"{task}:")
        for name in metrics:
            if not name.endswith("_stderr"):
                error = metrics.get(f"{name}_stderr", math.nan)
                print(f"  {name:<16}{metrics[name]:.4f}" + (f" +- {error:.4f}" if math.isfinite(error) else ""))
