"""Exact rollouts: the log-probabilities of sampler and trainer are equal bit for bit.

Both compute the model with the operations of `pallas_kernels.batch_invariant`, in which no token's result depends on
the tokens beside it, and with the same roundings.
"""

from jaxstack.distributed.xla_options import OptionValue, low_precision_cpu_options
from jaxstack.models import ModelConfig
from jaxstack.models.attention.softmax import SoftmaxAttention
from jaxstack.models.layer import Layer
from pallas_kernels.target import current_target


def exact_options() -> dict[str, OptionValue]:
    """Return the XLA options of programs that must round alike, whatever else they compute.

    Otherwise XLA leaves out roundings to bfloat16 between operations that it fuses, and on a CPU it leaves some
    operations to a library.
    """
    own = low_precision_cpu_options() if current_target().platform == "cpu" else {}
    return {**own, "xla_allow_excess_precision": False}


def inexact_part(model: ModelConfig) -> str | None:
    """Return the setting of a model that has no batch-invariant operation, or None if all of it has."""
    for layer in model.layers():
        problem = _inexact_layer(layer)
        if problem is not None:
            return problem
    moe = model.moe
    found = {
        f"model.qk_norm={model.qk_norm}": model.qk_norm not in (True, False),
        "model.hidden_size_per_layer_input": model.hidden_size_per_layer_input,
        "model.floor_scale": model.floor_scale,
    }
    if moe is not None:
        names = ("expert_bias", "router_bias", "shared_expert_gate", "beside_mlp", "weight_inputs", "capacity_factor")
        found |= {f"model.moe.{name}": getattr(moe, name) for name in names}
        found["model.moe.swiglu_limit"] = moe.swiglu_limit is not None
    return next((name for name, value in found.items() if value), None)


def _inexact_layer(layer: Layer) -> str | None:
    if layer.mixer is None:
        return None
    if type(layer.mixer) is not SoftmaxAttention:
        return layer.mixer.described
    if layer.mixer.sinks:
        return "model.attention.sinks"
    if layer.chunk is not None:
        return "model.attention_chunk_size"
    return "shared keys and values" if layer.keeps or layer.reuses else None
