"""Writes tests/models/huggingface/compressed_tensors/: tiny random Llamas whose weights the library compressed-tensors
quantized and packed, with what it makes of them. Needs torch, transformers and compressed-tensors (made with 2.13.0,
5.23.0 and 0.20.0); jaxstack and its tests need none of them.

    python scripts/make_compressed_tensors_fixtures.py
    python scripts/make_compressed_tensors_fixtures.py --check EXPORT DENSE

The second command loads what `jaxstack convert --format NAME` wrote, with the library, and compares weights and logits
with those of `--format dense` of the same run. A folder is a checkpoint as llm-compressor saves it, and

    dequantized.json        SHA-256 of each weight as the library dequantizes it, in the dtype of its scales
    expected.safetensors    tokens, and the logits in float32 of a model with the weights dequantized in float32

packing.safetensors has integers of 1 to 8 bits, and the words that the library packs them into, along rows and columns.
"""

import hashlib
import json
import shutil
import sys
from pathlib import Path

import torch
import transformers
from compressed_tensors.compressors import BaseCompressor, ModelCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams
from compressed_tensors.utils import get_direct_state_dict
from safetensors.torch import save_file

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "models" / "huggingface" / "compressed_tensors"
SIZES = {
    "vocab_size": 32, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 31,
}  # fmt: skip
SCHEMES = {"int4": "W4A16", "int4-zeros": "W4A16_ASYM", "int8": "W8A8", "fp8": "FP8_DYNAMIC"}
GROUP = 32


def make_model() -> transformers.LlamaForCausalLM:
    """Returns a random model with bfloat16 weights, in float32."""
    config = transformers.LlamaConfig(**SIZES)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.2))
            parameter.copy_(parameter.bfloat16().float())
    return model


def set_scales(module: torch.nn.Module) -> None:
    """Fills the scales and zero points of a module from the ranges of its weights."""
    args = module.quantization_scheme.weights
    rows = module.weight.shape[0]
    groups = module.weight.reshape(rows, -1, args.group_size or module.weight.shape[1])
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    module.weight_scale.data.copy_(scale)
    module.weight_zero_point.data.copy_(zero)


def make(name: str) -> None:
    """Writes one folder."""
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    scheme = preset_name_to_scheme(SCHEMES[name], ["Linear"])
    if scheme.weights.group_size:
        scheme.weights.group_size = GROUP
    model = make_model().to(torch.bfloat16)
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"]))
    quantized = {name: m for name, m in model.named_modules() if getattr(m, "quantization_scheme", None)}
    for module in quantized.values():
        set_scales(module)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    compressor.remove_decompression_hook(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)

    dense = make_model()
    hashes = {}
    for name, module in quantized.items():
        library = BaseCompressor.get_value_from_registry(module.quantization_scheme.format)
        state = get_direct_state_dict(module)
        found = library.decompress(state, module.quantization_scheme)["weight"]
        hashes[name] = hashlib.sha256(found.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        state["weight_scale"] = state["weight_scale"].float()
        exact = library.decompress(state, module.quantization_scheme)["weight"]
        dense.get_submodule(name).weight.data.copy_(exact)
    (folder / "dequantized.json").write_text(json.dumps(hashes, indent=1) + "\n")
    tokens = torch.randint(0, 31, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = dense(tokens).logits
    save_file({"tokens": tokens.int(), "logits": logits}, folder / "expected.safetensors")


def make_packing() -> None:
    """Writes integers of every width and their words."""
    arrays = {}
    for bits in range(1, 9):
        limit = 2 ** (bits - 1)
        values = torch.randint(-limit, limit, (5, 45), generator=torch.Generator().manual_seed(bits), dtype=torch.int8)
        arrays[f"values{bits}"] = values
        arrays[f"rows{bits}"] = pack_to_int32(values, bits)
        arrays[f"columns{bits}"] = pack_to_int32(values, bits, packed_dim=0)
    save_file(arrays, FOLDER / "packing.safetensors")


def check(export: str, dense: str) -> None:
    """Compares a quantized checkpoint, as the library loads it, with one of plain numbers."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    model, said = load(export, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    assert not any(said[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), said
    plain = load(dense, dtype=torch.float32, attn_implementation="eager")
    quantized = [name for name, m in model.named_modules() if getattr(m, "quantization_scheme", None)]
    for name in quantized:
        model.get_submodule(name).quantization_enabled = False  # activations stay as they are
    tokens = torch.randint(0, model.config.vocab_size, (2, 16))
    with torch.no_grad():
        difference = (model.eval()(tokens).logits - plain.eval()(tokens).logits).abs().max()
    equal = sum(torch.equal(model.get_submodule(name).weight, plain.get_submodule(name).weight) for name in quantized)
    print(f"{equal} of {len(quantized)} quantized weights are equal; largest difference of logits {difference:.3g}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--check"]:
        check(*sys.argv[2:])
        raise SystemExit
    FOLDER.mkdir(exist_ok=True)
    for chosen in SCHEMES:
        make(chosen)
        print(chosen, sum(path.stat().st_size for path in (FOLDER / chosen).iterdir()), "bytes")
    make_packing()
