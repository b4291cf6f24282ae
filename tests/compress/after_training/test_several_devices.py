"""`compress` on several devices: weights and calibration are split over them, and the result is that of one device."""

import jax
import numpy as np
import pytest

from jaxstack.compress.__main__ import main
from jaxstack.compress.after_training import run as compress_run
from tests.compress.after_training.test_from_disk import MODELS, leaves_of, make_checkpoint


@pytest.mark.longer
@pytest.mark.parametrize(
    ("kind", "method", "layout"),
    [
        ("dense", "awq", ["parallel.tensor=2", "parallel.data=1"]),
        ("mixture", "gptq", ["parallel.fsdp=2"]),
        pytest.param("mixture", "gptq", ["parallel.fsdp=2", "--from-disk"], marks=pytest.mark.exhaustive),
        pytest.param("dense", "rtn", ["parallel.data=4"], marks=pytest.mark.exhaustive),
    ],
)
def test_weights_are_those_of_one_device(kind, method, layout, tmp_path, monkeypatch):
    source = make_checkpoint(tmp_path, **MODELS[kind])
    recipe = tmp_path / "recipe.yaml"
    others = f"{{path: .*, method: {method}, bits: 4, group_size: 16}}"
    recipe.write_text(f"layers: [{{path: ^embedding/table$, method: keep}}, {others}]\n")
    text = f"calibration={{data: ['{tmp_path / 'text.txt'}'], sequences: 8, sequence_length: 32}}"
    command = ["--run", str(source), "--recipe", str(recipe), text, "--out"]
    used = []
    load = compress_run.load_decoder

    def watched(*args, **kwargs):
        decoder = load(*args, **kwargs)
        used.append({len(x.sharding.device_set) for x in jax.tree.leaves(decoder.params)})
        return decoder

    monkeypatch.setattr(compress_run, "load_decoder", watched)
    assert main([*command, str(tmp_path / "one")]) == 0
    assert main([*command, str(tmp_path / "several"), *layout]) == 0
    assert used[:1] == [{1}] and all(counts == {4 if "data=4" in layout[0] else 2} for counts in used[1:])
    pairs = zip(leaves_of(tmp_path / "one"), leaves_of(tmp_path / "several"), strict=True)
    for (path, one), (same, several) in pairs:
        assert path == same and one.dtype == several.dtype
        # The sums of several devices are rounded otherwise, which may move a value to its neighbour.
        different = np.mean(np.asarray(one, np.float32) != np.asarray(several, np.float32))
        close = np.allclose(np.asarray(one, np.float32), np.asarray(several, np.float32), rtol=1e-2, atol=1e-5)
        assert close or different < 0.02, jax.tree_util.keystr(path)


def test_a_loss_and_other_axes_are_refused(tmp_path, capsys):
    command = ["--run", str(tmp_path), "--recipe", "int8", "--out", str(tmp_path / "out"), "--data", "x.txt"]
    assert main([*command, "parallel.tensor=2"]) == 2
    assert "measures losses on one device; leave it out with parallel.tensor=2" in capsys.readouterr().err
    assert main([*command[:-2], "parallel.pipeline=2"]) == 2
    assert "parallel.tensor only; leave out parallel.pipeline=2" in capsys.readouterr().err
