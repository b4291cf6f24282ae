"""Sequences of a million tokens fit on four H200s, by the compiler's account."""

from pathlib import Path

import jax
import pytest

from jaxstack.plan.rehearsal import can_compile, rehearse
from jaxstack.run_config import load_config

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.mark.exhaustive
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="our Hopper kernels need jax 0.11")
def test_a_million_tokens_fit():
    if not can_compile():
        pytest.skip("needs the CUDA plugin of JAX: pip install 'jaxstack[cuda]'")
    config = load_config(CONFIGS / "llama3-8b-1m.yaml", [])
    found = rehearse(config)
    assert found["fits"], found
    assert "flash_attention: mosaic" in found["kernels"] and "context_attention: ring" in found["kernels"]
    tokens = config.train.sequence_length // config.parallel.context
    assert found["host_bytes"] == config.model.num_layers * tokens * config.model.hidden_size * 2
