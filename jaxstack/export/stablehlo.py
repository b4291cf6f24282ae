"""Export of a model to StableHLO: serialized prefill and decode programs that take the parameters as arguments.

Dims: b rows, t prompt length; both are chosen when a program is called.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import export
from jaxtyping import Array, Float, Int

from jaxstack.export import run_exported
from jaxstack.export.source import Source, write_parameters
from jaxstack.files import write_file, write_json
from jaxstack.models.config import ModelConfig
from jaxstack.models.transformer import Cache, Transformer
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.parameter_paths import nest
from pallas_kernels.target import lowering_platform

PLATFORMS = ("cpu", "cuda")

Arrays = dict[str, jax.Array]


class Programs(NamedTuple):
    """The prefill and decode programs of a model, serialized for export.

    `prefill(parameters, tokens int32 [b, t], lengths int32 [b])` and
    `decode(parameters, token int32 [b], position int32 [b], cache)` return (logits float32 [b, V], cache), where the
    cache is a list of arrays whose first dim is b.
    """

    prefill: export.Exported
    decode: export.Exported


def problem(source: Source) -> str | None:
    """Return the first feature of the model that StableHLO export does not support, as text; None if none."""
    if source.model.moe is not None:
        return "moe, a mixture of experts, whose kernels need a fixed number of rows"
    if others := [mixer.described for mixer in source.model.mixers() if mixer.title not in _KINDS]:
        return f"{others[0]} (only attention.name {', '.join(_KINDS)})"
    return None


_KINDS = ("softmax",)
"""Attention kinds whose programs can be traced with any number of rows."""


def write(source: Source, folder: Path) -> str:
    """Write the model's programs, parameters and tokenizer, and a script that generates text with JAX alone."""
    programs = export_programs(source.model, source.parameters, jnp.dtype(source.dtype), source.context)
    for name, program in programs._asdict().items():
        write_file(folder / f"{name}.jax_export", bytes(program.serialize()))
        write_file(folder / f"{name}.mlir", str(program.mlir_module()).encode())
    write_parameters(source, folder)
    write_json(folder / run_exported.SETTINGS, {"format": "stablehlo", **source.generation()})
    source.tokenizer.save(folder)
    shutil.copyfile(run_exported.__file__, folder / "run.py")
    return 'python {folder}/run.py --prompt "def "'


def export_programs(model: ModelConfig, parameters: dict[str, Any], dtype: jnp.dtype, context: int) -> Programs:
    """Export the model's prefill and its single decoding step as programs for any number of sequences.

    Args:
      model: configuration of the model.
      parameters: its arrays, or their shapes and dtypes, by path.
      dtype: dtype of the computation.
      context: tokens per row that the cache has room for.
    """
    # The definition of attention: the other backends choose by the length, which is not known yet.
    update = {"attention_implementation": "reference", "scan_layers": False, "remat": "none"}
    config = model.model_copy(update=update)
    module = ModuleArrays(lambda rngs: Transformer(config, rngs, dtype=dtype))
    rows, length = export.symbolic_shape("b, t", constraints=[f"t <= {context}"])
    arguments = {path: jax.ShapeDtypeStruct(x.shape, x.dtype) for path, x in parameters.items()}
    ids = jax.ShapeDtypeStruct((rows,), jnp.int32)
    prefill, decode = _functions(module, context)
    prompts = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    with lowering_platform("cpu"):
        first = export.export(jax.jit(prefill), platforms=PLATFORMS)(arguments, prompts, ids)
        _, cache = jax.tree.unflatten(first.out_tree, first.out_avals)
        (rows,) = export.symbolic_shape("b")  # without the prompt's length, which this program does not have
        ids = jax.ShapeDtypeStruct((rows,), jnp.int32)
        cache = [jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype) for x in cache]
        next_token = export.export(jax.jit(decode, donate_argnums=3), platforms=PLATFORMS)
        return Programs(first, next_token(arguments, ids, ids, cache))


def _functions(module: ModuleArrays, context: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return prefill and decode as functions of a flat dict of parameters and a flat list of cache arrays."""
    example = module.merge(module.abstract_params, module.abstract_non_params)
    structure = jax.tree.structure(jax.eval_shape(lambda: example.make_cache(1, context).layers))

    def prefill(
        parameters: Arrays, tokens: Int[Array, "b t"], lengths: Int[Array, " b"]
    ) -> tuple[Float[Array, "b V"], list[jax.Array]]:
        logits, cache = module.merge(nest(parameters.items()), {}).prefill(tokens, lengths, context)
        return logits, jax.tree.leaves(cache.layers)

    def decode(
        parameters: Arrays, token: Int[Array, " b"], position: Int[Array, " b"], cache: list[jax.Array]
    ) -> tuple[Float[Array, "b V"], list[jax.Array]]:
        before = Cache(jax.tree.unflatten(structure, cache), position)
        logits, after = module.merge(nest(parameters.items()), {}).decode(token[:, None], position[:, None], before)
        return logits[:, 0], jax.tree.leaves(after.layers)

    return prefill, decode
