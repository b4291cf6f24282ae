"""The adapters of a run: with them the model that it started from computes what the run computes."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack import load_config, train
from jaxstack.errors import ConfigError
from jaxstack.parameter_paths import flatten
from jaxstack.run.adapters import read_adapter
from jaxstack.run.load import load
from tests.word_models import make_word_model


@pytest.mark.longer
def test_a_run_has_the_matrices_that_it_trained(tmp_path):
    """Of stacked layers too; runs with other adapters, and of other models, are refused."""
    base = make_word_model("llama", tmp_path / "base")
    (tmp_path / "text.txt").write_text(
        "\n\n".join(" ".join(f"w{i * j % 63 + 1}" for j in range(40)) for i in range(60))
    )
    settings = {
        "run": {"dir": str(tmp_path), "init_from": str(base)},
        "data": {"sources": [{"path": str(tmp_path / "text.txt")}], "cache_dir": str(tmp_path / "cache")},
        "train": {"steps": 2, "global_batch_size": 8, "sequence_length": 16},
        "parallel": {"data": -1},
        "optimizer": {"learning_rate": 0.05},
        "precision": {"compute": "float32"},
        "observe": {"trackers": ["jsonl"], "progress": False},
    }

    def trained(name: str, **more):
        own = settings | more | {"run": settings["run"] | {"name": name}}
        (tmp_path / f"{name}.yaml").write_text(json.dumps(own))
        train(load_config(tmp_path / f"{name}.yaml"))
        return tmp_path / name

    rules = [{"path": "[qo]_proj", "rank": 3, "alpha": 6}, {"path": "down_proj", "rank": 2}]
    run = trained("tuned", adapters={"rules": rules})
    found = read_adapter(run, load(base).config.model)
    before, after = (flatten(load(folder, ["precision.compute=float32"]).parameters) for folder in (base, run))
    changed = set()
    for path, value in after.items():
        own = found.get("/".join(path[:-1])) if path[-1] == "kernel" else None
        change = 0 if own is None else jnp.tensordot(own.a, own.b, 1)
        np.testing.assert_allclose(value, before[path] + change, atol=1e-5, err_msg="/".join(path))
        changed |= {path[-2]} if own is not None and np.abs(change).max() > 1e-4 else set()
    assert changed == {"q_proj", "o_proj", "down_proj"}
    dora = trained("dora", adapters={"rules": [{"path": "q_proj", "method": "dora"}]})
    with pytest.raises(ConfigError, match="of the method lora, to be served beside others"):
        read_adapter(dora, load(base).config.model)
    with pytest.raises(ConfigError, match="is neither a run with adapters nor a directory of PEFT"):
        read_adapter(base, load(base).config.model)
    same = load(base).parameters
    norm = same["final_norm"]["scale"]
    for rounded in (norm, norm.astype(jnp.bfloat16), jnp.round(norm * 64) / 64):  # as in files, or 8 bits of a recipe
        assert set(read_adapter(run, load(base).config.model, same | {"final_norm": {"scale": rounded}})) == set(found)
    with pytest.raises(ConfigError, match=f"was trained on other weights .* started from \\({base}\\)"):
        read_adapter(run, load(base).config.model, load(trained("further")).parameters)
    with pytest.raises(ConfigError, match="there are none. Serve it alone"):
        read_adapter(tmp_path / "further", load(base).config.model, same)
    other = make_word_model("qwen3", tmp_path / "other")
    with pytest.raises(ConfigError, match="are of another model"):
        read_adapter(run, load(other).config.model, load(other).parameters)
