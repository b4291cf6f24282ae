"""Where torch and transformers are installed: they load what we write, and compute what we compute."""

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxstack.models import from_huggingface, to_huggingface

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
HERE = Path(__file__).parent
FAMILIES = sorted(path.parent.name for path in HERE.glob("*/config.json"))


def kind(name: str) -> str:
    return transformers.AutoConfig.from_pretrained(HERE / name).model_type


def logits_of_transformers(folder: Path, tokens: np.ndarray) -> np.ndarray:
    model, said = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(said[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), said
    with torch.no_grad():
        return model.eval()(torch.tensor(tokens)).logits.numpy()


@pytest.mark.parametrize("name", FAMILIES)
def test_an_export_computes_the_same_in_transformers(name, tmp_path):
    model = from_huggingface(HERE / name)
    to_huggingface(model, tmp_path, family=kind(name), max_shard_bytes=50_000)
    tokens = np.random.default_rng(0).integers(0, 64, (2, 40))
    ours = jax.jit(lambda model, tokens: model(tokens))(model, tokens)
    np.testing.assert_allclose(logits_of_transformers(tmp_path, tokens), ours, atol=1e-4, rtol=0)


# transformers 5.23 writes norms and convolutions of OLMo Hybrid by other names and in other parts than it reads them.
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "olmo-hybrid"])
def test_what_transformers_saves_again_is_read(name, tmp_path):
    to_huggingface(from_huggingface(HERE / name), tmp_path / "ours", family=kind(name), dtype="bfloat16")
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    to_huggingface(from_huggingface(tmp_path / "theirs"), tmp_path / "again", family=kind(name), dtype="bfloat16")
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "ours" / file).read_bytes() == (tmp_path / "again" / file).read_bytes(), file
    shutil.rmtree(tmp_path / "theirs")
