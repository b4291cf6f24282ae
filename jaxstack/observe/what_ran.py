"""Describes what actually ran: kernels, collectives, matmuls and memory of a compiled step."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxstack.errors import ConfigError
from jaxstack.observe.collectives import collectives, fp8_matmuls, matmuls, summarise
from jaxstack.observe.hlo import parse_module
from jaxstack.observe.number_format import byte_size
from pallas_kernels.dispatch import Choice


def describe_program(
    compiled: jax.stages.Compiled,
    choices: Sequence[Choice],
    mesh_axes: Mapping[str, int],
    fp8_expected: int = 0,
) -> dict[str, Any]:
    """Describe kernels, collectives, matmuls and memory of a compiled train step, as plain JSON.

    Args:
      compiled: the compiled train step.
      choices: the choices of kernels that `pallas_kernels.record_choices` collected during tracing.
      mesh_axes: axis name -> size.
      fp8_expected: smallest number of FP8 matmuls that the step should have.
    """
    sections: dict[str, Any] = {"mesh": {axis: size for axis, size in mesh_axes.items() if size > 1}}
    sections["kernels"] = [
        {
            "operation": choice.operation,
            "site": choice.site,
            "call": choice.call,
            "backend": choice.backend,
            "passed_over": [f"{name}: {reason}" for name, reason in choice.refused],
        }
        for choice in choices
    ]
    try:
        module = parse_module(compiled.as_text() or "")
        sections["collectives"] = summarise(collectives(module, mesh_axes))
        sections["matmuls"] = {"all": matmuls(module), "fp8": fp8_matmuls(module), "fp8_expected": fp8_expected}
    except (ValueError, AssertionError) as error:  # HLO text of an unknown form must not stop a run
        sections["collectives"] = f"not readable from this compiler's output: {error}"
    sections["memory"] = compiler_memory_estimate(compiled)
    return sections


def compiler_memory_estimate(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Return the compiler's memory estimate in bytes per device: arguments (state, batch), temporaries, total, host."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return {}
    fresh = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return {
        "arguments_bytes": analysis.argument_size_in_bytes,
        "temporary_bytes": analysis.temp_size_in_bytes,
        "predicted_bytes": analysis.argument_size_in_bytes + analysis.temp_size_in_bytes + max(fresh, 0),
        "host_bytes": analysis.host_temp_size_in_bytes,
    }


_FALLBACKS = ("xla", "xla_dense", "reference", "compiler", "callback")
"""Backends that are not GPU kernels."""
_ATTENTION = "name a backend in model.attention_implementation"
_FP8 = "leave the layer out in precision.fp8_rules"
_OVERLAP = "set parallel.overlap to never"
_WAY_OUT = {
    "flash_attention": _ATTENTION,
    "longformer_attention": _ATTENTION,
    "block_sparse_attention": _ATTENTION,
    "fp8_dot_general": _FP8,
    "fp8_grouped_matmul": _FP8,
    "grouped_matmul": "name a backend in model.moe.implementation",
    "packed_matmul": "leave the weights in bfloat16",
    "float8_mlp": "leave the weights in bfloat16",
    "tensor_parallel_input": _OVERLAP,
    "tensor_parallel_output": _OVERLAP,
    "tensor_parallel_mlp": _OVERLAP,
}
"""Operation -> what to do about a fallback, other than changing the model."""


def describe_backends(choices: Sequence[Choice], *operations: str) -> str | None:
    """Describe in one line which backends compute operations, and why not others; None if there is no such call.

    Of several calls that break one rule the numbers of the first are shown.

    Args:
      choices: of all operations, as `pallas_kernels.record_choices` collected them during tracing.
      operations: names of operations, e.g. "packed_matmul".
    """
    lines = [_describe(name, [choice for choice in choices if choice.operation == name]) for name in operations]
    return "; ".join(filter(None, lines)) or None


def _describe(operation: str, choices: Sequence[Choice]) -> str | None:
    by_backend: dict[str, list[Choice]] = {}
    for choice in choices:
        by_backend.setdefault(choice.backend, []).append(choice)
    parts = []
    for backend, chosen in by_backend.items():
        reasons: dict[str, str] = {}
        for name, reason in (refused for choice in chosen for refused in choice.refused):
            reasons.setdefault(f"{name} {reason.partition('; got ')[0]}", f"not {name}: {reason}")
        why = f" ({'; '.join(reasons.values())})" if reasons else ""
        parts.append(f"{backend} for {len(chosen)} {'shape' if len(chosen) == 1 else 'shapes'}{why}")
    return f"{operation}: {', '.join(parts)}" if parts else None


def refuse_fallbacks(choices: Sequence[Choice]) -> None:
    """Check that no call on a GPU uses a fallback backend where a GPU kernel was preferred.

    Raises:
      ConfigError: one did; the message names the call and the reasons.
    """
    for choice in choices:
        fell_back = choice.fallback and choice.backend in _FALLBACKS
        if fell_back and " on cuda" in choice.call and not choice.explicit:
            way_out = f"{_WAY_OUT[choice.operation]}, " if choice.operation in _WAY_OUT else ""
            raise ConfigError(
                f"observe.fail_on_fallback: {choice}. Change the model so that the preferred backend can run it, "
                f"{way_out}or set observe.fail_on_fallback to false."
            )


def refuse_missing_fp8(ran: Mapping[str, Any]) -> None:
    """Check that the compiled step has at least the expected number of FP8 matmuls.

    Args:
      ran: the result of `describe_program`.

    Raises:
      ConfigError: it has fewer.
    """
    counted = ran.get("matmuls")
    if counted and counted["fp8"] < counted["fp8_expected"]:
        raise ConfigError(
            f"observe.fail_on_fallback: the compiled step has {counted['fp8']} FP8 matmuls and should have "
            f"{counted['fp8_expected']}: XLA made bfloat16 ones of the rest. Drop XLA_FLAGS that are set, leave layers "
            "out in precision.fp8_rules, or set observe.fail_on_fallback to false."
        )


def summarise_program(ran: Mapping[str, Any]) -> str:
    """Summarise a compiled train step in one line, from the result of `describe_program`."""
    parts = []
    chosen: dict[str, list[str]] = {}
    for kernel in ran.get("kernels", ()):
        backends = chosen.setdefault(kernel["operation"], [])
        if kernel["backend"] not in backends:
            backends.append(kernel["backend"])
    parts += [f"{operation}: {'+'.join(backends)}" for operation, backends in chosen.items()]
    products = ran.get("matmuls")
    if products and (products["fp8"] or products["fp8_expected"]):
        parts.append(f"{products['fp8']} of {products['all']} matmuls in FP8")
    predicted = ran.get("memory", {}).get("predicted_bytes")
    if predicted:
        host = ran["memory"].get("host_bytes")
        host_part = f" and {host / 2**30:.2f} GiB of host memory" if host else ""
        parts.append(f"{predicted / 2**30:.2f} GiB{host_part} a device predicted")
    rows = ran.get("collectives")
    if isinstance(rows, list):
        count = sum(row["calls"] for row in rows)
        sent = sum(row["wire_bytes"] for row in rows)
        parts.append(f"{count} collectives, {sent / 2**20:.1f} MiB sent a device" if count else "no collectives")
    if exchanged := ran.get("local_sgd", {}).get("exchange_bytes"):
        sent = " + ".join(byte_size(size) for size in exchanged)
        parts.append(f"{ran['local_sgd']['step_bytes']} bytes between workers a step, {sent} a device an exchange")
    return "; ".join(parts)
