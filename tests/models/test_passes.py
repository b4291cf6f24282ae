"""What a layer moves through memory, as compiled for an H200."""

import re

import pytest

from tests.hopper_steps import compile_step
from tests.small_runs import small_config

LAYERS = 2
B = 8
T = 1024
D = 256
SHAPE = (
    f"model.num_layers={LAYERS}", f"model.hidden_size={D}", "model.num_heads=4", "model.head_dim=64",
    "model.intermediate_size=512", "model.vocab_size=512", "model.scan_layers=false", "model.remat=none",
    f"train.sequence_length={T}", f"train.global_batch_size={B}",
)  # fmt: skip


@pytest.mark.exhaustive
def test_matmuls_add_the_residual_and_the_gradients_of_an_input():
    text = compile_step(small_config(*SHAPE))[1].as_text()
    assert text.count('"beta":1') >= 5 * LAYERS, "o and down; and k and q onto v, gate onto up"
    copies = re.findall(rf"= bf16\[{B * T},{D}\]\S* copy\(", text)
    assert len(copies) <= 1, "of the embeddings, whose only use is the first layer"


@pytest.mark.exhaustive
def test_a_scan_computes_the_forward_pass_of_a_layer_once():
    """XLA would repeat each operation whose result it writes into the stack of saved activations."""
    texts = [compile_step(small_config(*SHAPE, f"model.scan_layers={scan}"))[1].as_text() for scan in ("true", "false")]
    scanned, unrolled = (
        re.findall(r"custom-call\(.*/jvp\(layers\)/.*(?:dot_general|attention_forward)", t) for t in texts
    )
    assert len(scanned) * LAYERS == len(unrolled) >= 6 * LAYERS
