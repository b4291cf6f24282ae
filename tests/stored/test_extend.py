"""A stored format in one file that is not shipped: a folder with one .npz file and a model.yaml."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from jaxstack import load
from jaxstack.config.loader import build_component, dump_yaml, load_yaml
from jaxstack.data.tokenizer import ByteTokenizer
from jaxstack.models import ModelConfig, Transformer
from jaxstack.parameter_paths import flatten, nest
from jaxstack.stored import StoredModel
from jaxstack.stored.model import convert, initial_variables

MODEL = ModelConfig(vocab_size=260, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64)


class NumpyFolder(StoredModel, register=False):
    """A folder with model.yaml and weights.npz."""

    marker = "model.yaml"
    title = "a folder of NumPy arrays"
    held_out_text = False

    @classmethod
    def is_in(cls, directory):
        return (directory / cls.marker).is_file()

    def read_model(self):
        return build_component(ModelConfig, load_yaml(self.directory / self.marker), str(self.directory))

    def settings(self):
        return {"model": self.model.model_dump(mode="json"), "train": {"sequence_length": 64}}

    def choose_step(self, step):
        return 0

    def describe(self, step=None):
        return f"the arrays in {self.directory}"

    @functools.cached_property
    def arrays(self):
        with np.load(self.directory / "weights.npz") as file:
            return nest((path.replace(".", "/"), file[path]) for path in file.files)

    def read(self, wanted, model=None, *, form="plain", step=None, direct_storage=False):
        placed = convert(self.arrays, wanted, self.model, model or self.model)
        return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), placed, wanted)

    def read_state(self, module, rules, step=None):
        return module.store(self.arrays), initial_variables(module)


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(StoredModel, "kinds", [*StoredModel.kinds, NumpyFolder])


@pytest.mark.parametrize("overrides", [["parallel.data=1"], ["parallel.tensor=2", "parallel.fsdp=2"]])
def test_a_new_format_is_one_file(registered, tmp_path, overrides):
    model = Transformer(MODEL, nnx.Rngs(0))
    arrays = {".".join(map(str, p)): v.get_raw_value() for p, v in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    np.savez(tmp_path / "weights.npz", **{path: np.asarray(x) for path, x in arrays.items()})
    (tmp_path / "model.yaml").write_text(dump_yaml(MODEL))
    ByteTokenizer().save(tmp_path / "tokenizer")
    run = load(tmp_path, [*overrides, "precision.compute=float32"])
    tokens = np.arange(24, dtype=np.int32).reshape(3, 8)
    np.testing.assert_allclose(run.model(tokens), model(tokens), atol=2e-5)
    assert run.generate(["ab"], max_tokens=3)[0].finish_reason == "length"
    assert len(flatten(run.parameters)) > len(arrays)  # layers are unrolled


def test_other_directories_are_told_which_kinds_there_are(registered, tmp_path):
    with pytest.raises(Exception, match=r"neither a run directory .* nor a folder of NumPy arrays \(with model.yaml\)"):
        load(tmp_path)
