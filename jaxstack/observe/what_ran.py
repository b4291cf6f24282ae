"""What actually ran: the kernels chosen, the collectives, the matmuls and the memory of a compiled step."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxstack.errors import ConfigError
from jaxstack.observe.collectives import collectives, fp8_matmuls, matmuls, summarise
from jaxstack.observe.hlo import parse_module
from pallas_kernels.dispatch import Choice


def describe_program(
    compiled: jax.stages.Compiled, choices: Sequence[Choice], mesh_axes: Mapping[str, int], fp8_expected: int = 0
) -> dict[str, Any]:
    """Sections for `environment.json` and the report, as plain JSON.

    Args:
      compiled: the compiled train step.
      choices: what `pallas_kernels.record_choices` collected while it was traced.
      mesh_axes: axis name -> size.
      fp8_expected: how many FP8 matmuls the step should have at least.
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
    except (ValueError, AssertionError) as error:  # a form of HLO text that we cannot read must not stop a run
        sections["collectives"] = f"not readable from this compiler's output: {error}"
    sections["memory"] = predicted_memory(compiled)
    return sections


def predicted_memory(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Bytes a device needs by the compiler's account: state and batch, working memory, and their sum; host memory."""
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


_FALLBACKS = ("xla", "xla_dense", "reference")
"""Backends that are no GPU kernels, of the operations that have kernels; and what to do about such a fallback:"""
_ATTENTION = "name a backend in model.attention_implementation"
_FP8 = "leave the layer out in precision.fp8_rules"
_WITH_KERNELS = {
    "flash_attention": _ATTENTION,
    "longformer_attention": _ATTENTION,
    "block_sparse_attention": _ATTENTION,
    "fp8_dot_general": _FP8,
}


def refuse_fallbacks(choices: Sequence[Choice]) -> None:
    """Raise ConfigError where a call for a GPU got no GPU kernel though there are some, naming call and reasons.

    On other platforms there is nothing to fall back from.
    """
    for choice in choices:
        fell_back = choice.operation in _WITH_KERNELS and choice.backend in _FALLBACKS
        if fell_back and " on cuda" in choice.call and not choice.explicit:
            raise ConfigError(
                f"observe.fail_on_fallback: {choice}. Change the model so that the preferred backend can run it, "
                f"{_WITH_KERNELS[choice.operation]}, or set observe.fail_on_fallback to false."
            )


def refuse_missing_fp8(ran: Mapping[str, Any]) -> None:
    """Raise ConfigError where the compiled step has fewer FP8 matmuls than it should, by `describe_program`."""
    counted = ran.get("matmuls")
    if counted and counted["fp8"] < counted["fp8_expected"]:
        raise ConfigError(
            f"observe.fail_on_fallback: the compiled step has {counted['fp8']} FP8 matmuls and should have "
            f"{counted['fp8_expected']}: XLA made bfloat16 ones of the rest. Drop XLA_FLAGS that are set, leave layers "
            "out in precision.fp8_rules, or set observe.fail_on_fallback to false."
        )


def in_short(ran: Mapping[str, Any]) -> str:
    """One line of what the compiled step holds."""
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
        beside = f" and {host / 2**30:.2f} GiB of host memory" if host else ""
        parts.append(f"{predicted / 2**30:.2f} GiB{beside} a device predicted")
    rows = ran.get("collectives")
    if isinstance(rows, list):
        count = sum(row["calls"] for row in rows)
        sent = sum(row["wire_bytes"] for row in rows)
        parts.append(f"{count} collectives, {sent / 2**20:.1f} MiB sent a device" if count else "no collectives")
    return "; ".join(parts)
