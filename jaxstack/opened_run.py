"""A finished or running run, opened for generation and evaluation: its configuration, tokenizer and parameters."""

import argparse
import codecs
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxstack.checkpoint.manager import CheckpointManager
from jaxstack.data import Data, SourceConfig, TokenizerConfig, load_tokenizer, open_data
from jaxstack.errors import ConfigError, JaxstackError
from jaxstack.evaluation import bits_per_byte
from jaxstack.functional import FunctionalModule
from jaxstack.generate import Decoder, Sampling
from jaxstack.language_run import build_model, make_trainer
from jaxstack.models import Transformer
from jaxstack.parallel import AxisRules, ParallelConfig, make_mesh, make_rules
from jaxstack.run_config import RunConfig, load_config
from jaxstack.staged_module import StagedModule
from jaxstack.startup import cache_compilations, start_devices


def open_run(directory: str | Path) -> RunConfig:
    """The configuration of an existing run.

    Raises:
      ConfigError: the directory holds no run.
    """
    path = Path(directory) / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{directory} is not a run directory (it has no config.yaml); runs are at runs/<run.name>.")
    return load_config(path)


def choose_step(manager: CheckpointManager, step: int | None) -> int:
    """`step` if there is such a checkpoint, the newest intact one for None.

    Raises:
      JaxstackError: there is none.
    """
    if step is None:
        latest = manager.latest_step()
        if latest is None:
            raise JaxstackError(f"{manager.directory} holds no checkpoint yet; train the run first.")
        return latest
    steps = manager.all_steps()
    if step not in steps:
        known = ", ".join(map(str, steps)) or "none"
        raise ConfigError(f"there is no checkpoint of step {step} in {manager.directory}; there are: {known}.")
    return step


def restore_parameters(
    directory: str | Path, module: FunctionalModule, rules: AxisRules, step: int | None
) -> tuple[Any, Any, int]:
    """(params, rest, step) of a checkpoint, laid out on the mesh of `rules`; the optimizer's state is not read."""
    manager = CheckpointManager(Path(directory) / "checkpoints", report=lambda text: print(text, file=sys.stderr))
    chosen = choose_step(manager, step)
    stored = module.plain if isinstance(module, StagedModule) else module
    specs = stored.parameter_specs(rules)

    def wanted(x: Any, spec: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rules.sharding(spec))

    params = jax.tree.map(wanted, stored.abstract_params, specs)
    rest = jax.tree.map(lambda x: wanted(x, jax.P()), module.abstract_rest)
    tree, _ = manager.restore(chosen, {"params": params, "rest": rest}, subset=True)
    params = tree["params"]
    if isinstance(module, StagedModule):
        shardings = jax.tree.map(rules.sharding, module.parameter_specs(rules))
        params = jax.jit(module.stage_parameters, out_shardings=shardings)(params)
    return params, tree["rest"], chosen


def tensor_degree(config: RunConfig, devices: int, wanted: int | None) -> int:
    """Devices to shard the weights over: as asked for, or the most that divide the model's heads.

    Raises:
      ConfigError: the degree asked for does not divide the key/value heads, or there are too few devices.
    """
    heads = config.model.kv_heads
    fits = [d for d in range(1, devices + 1) if heads % d == 0]
    if wanted is not None and wanted not in fits:
        raise ConfigError(
            f"--tensor {wanted} must divide the model's {heads} key/value heads and not exceed {devices} devices; "
            f"fitting: {', '.join(map(str, fits))}."
        )
    return wanted or fits[-1]


def open_decoder(directory: str | Path, *, step: int | None = None, tensor: int | None = None) -> tuple[Decoder, int]:
    """(a decoder with the run's parameters, their step), weights sharded over `tensor` devices."""
    config = open_run(directory)
    devices = start_devices(config.parallel.simulate_devices)
    cache_compilations()
    degree = tensor_degree(config, devices, tensor)
    mesh = make_mesh(ParallelConfig(tensor=degree), jax.devices()[:degree])
    rules = make_rules(mesh)
    dtype = jnp.dtype(config.precision.compute_dtype(jax.devices()[0].platform))
    module = FunctionalModule(build_model(config, dtype))
    params, rest, chosen = restore_parameters(directory, module, rules, step)
    if config.adapters:
        plain = FunctionalModule(lambda rngs: Transformer(config.model, rngs, dtype=dtype))
        layout = jax.tree.map(rules.sharding, plain.parameter_specs(rules))
        params = jax.jit(module.merge_adapters, out_shardings=layout, donate_argnums=0)(params, rest)
        module = plain
    return Decoder(module, params, rest, rules), chosen


def stream_samples(args: argparse.Namespace) -> None:
    """What `python -m jaxstack.generate` does."""
    try:
        sampling = Sampling(args.temperature, args.top_k, args.top_p)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    open_run(args.run)
    tokenizer = load_tokenizer(Path(args.run) / "tokenizer")
    decoder, step = open_decoder(args.run, step=args.step, tensor=args.tensor)
    print(f"[{args.run}, step {step}]", file=sys.stderr)
    prompt = [tokenizer.document_start, *(int(i) for i in tokenizer.encode(args.prompt))]
    stream = decoder.generate([prompt] * args.samples, args.max_tokens, sampling, seed=args.seed)
    if args.samples == 1:
        print(args.prompt, end="", flush=True)
        for piece in decode_stream((int(ids[0]) for ids in stream), tokenizer):
            print(piece, end="", flush=True)
        print()
        return
    columns = list(zip(*(ids.tolist() for ids in stream), strict=True))
    for number, ids in enumerate(columns, 1):
        print(f"--- sample {number}\n{args.prompt}{''.join(decode_stream(iter(ids), tokenizer))}")


def evaluate_run(args: argparse.Namespace) -> None:
    """What `python -m jaxstack.evaluate` does."""
    if args.max_tokens is not None and args.max_tokens < 1:
        raise ConfigError(f"--max-tokens must be at least 1; found {args.max_tokens}.")
    config = open_run(args.run)
    devices = start_devices(config.parallel.simulate_devices)
    cache_compilations()
    trained_on = math.prod(degree for degree in config.parallel.degrees.values())
    if trained_on != devices:  # another machine than the one it was trained on: any layout gives the same loss
        one_device = ParallelConfig(simulate_devices=config.parallel.simulate_devices)
        config = config.model_copy(update={"parallel": one_device})
    data = _evaluation_data(config, args)
    trainer = make_trainer(config, data, jax.devices()[: math.prod(config.parallel.degrees.values())])
    params, rest, step = restore_parameters(args.run, trainer.module, trainer.rules, args.step)
    values = trainer.evaluator.run(params, rest, args.max_tokens)
    if values is None:
        raise JaxstackError("there is no held-out text to evaluate on; give some with --data.")
    raw = data.held_out_bytes(args.max_tokens)
    values = {"step": step, **values, **bits_per_byte(values, len(raw)), "bytes": len(raw)}
    if args.json:
        print(json.dumps(values))
        return
    print(f"{args.run}, step {step}: {int(values['eval_items']):,} tokens, {len(raw):,} bytes")
    for name, unit in (("eval_loss", "nats a token"), ("eval_perplexity", ""), ("eval_bits_per_byte", "")):
        if name in values:
            print(f"  {name.removeprefix('eval_').replace('_', ' '):<16}{values[name]:.4f} {unit}".rstrip())


def _evaluation_data(config: RunConfig, args: argparse.Namespace) -> Data:
    """The run's own data, or the given paths as held-out text under the run's tokenizer."""
    section = config.data
    if args.data:
        tokenizer_dir = Path(args.run) / "tokenizer"
        sources = tuple(SourceConfig(path=path, text_key=args.text_key) for path in args.data)
        tokenizer = TokenizerConfig(name="file", path=str(tokenizer_dir))
        section = section.model_copy(update={"held_out": sources, "sources": sources, "tokenizer": tokenizer})
    return open_data(
        section,
        sequence_length=config.train.sequence_length,
        seed=config.run.seed,
        report=lambda text: print(text, file=sys.stderr),
    )


def decode_stream(ids: Iterator[int], tokenizer: Any) -> Iterator[str]:
    """Text of token ids as they come, until the document ends; characters cut between tokens wait for the rest."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in ids:
        if token == tokenizer.document_start:
            break
        if token < tokenizer.vocab_size:
            yield decoder.decode(tokenizer.decode_bytes([token]))
    yield decoder.decode(b"", final=True)
