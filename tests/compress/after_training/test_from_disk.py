"""`compress --from-disk`: the same bits as with the whole model in memory, and less memory than the model."""

import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxstack.checkpoint.compressed import named_leaves, read_compressed
from jaxstack.compress.__main__ import main
from jaxstack.compress.after_training.run import CompressOptions, compress
from jaxstack.compress.config import load_recipe
from jaxstack.data.tokenizer import ByteTokenizer
from jaxstack.errors import ConfigError
from jaxstack.models import ModelConfig, Transformer, to_huggingface
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.run.evaluate import TextOptions

SIZES = {
    "vocab_size": 320,
    "hidden_size": 32,
    "num_layers": 3,
    "num_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
MODELS = {
    "dense": {},
    "tied": {"tie_word_embeddings": True},
    "mixture": {"moe": {"num_experts": 4, "num_experts_per_tok": 2}, "intermediate_size": 32},
}


def make_checkpoint(place, **changes):
    """A Hugging Face checkpoint with a tokenizer of bytes, and a text beside it."""
    model = ModuleArrays(lambda rngs: Transformer(ModelConfig(**{**SIZES, **changes}), rngs))
    to_huggingface(model.merge(*model.init(jax.random.key(0))), place / "model")
    ByteTokenizer().save(place / "model")
    (place / "text.txt").write_text("A sentence to calibrate on, and another one. " * 60)
    return place / "model"


def leaves_of(directory):
    return jax.tree.leaves_with_path(named_leaves(read_compressed(directory)[0]))


@pytest.mark.longer
@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("dense", "gptq"),
        ("dense", "rtn"),
        ("tied", "awq"),
        ("tied", "gptq"),
        ("mixture", "gptq"),
        ("mixture", "rtn"),
    ],
)
def test_weights_are_those_of_the_whole_model(kind, method, tmp_path):
    source = make_checkpoint(tmp_path, **MODELS[kind])
    path = tmp_path / "recipe.yaml"
    # A tied table is the head, too, whose inputs are measured last.
    table = "gptq, bits: 8, group_size: 16" if (kind, method) == ("tied", "gptq") else "keep"
    others = f"{{path: .*, method: {method}, bits: 4, group_size: 16}}"
    path.write_text(
        f"layers: [{{path: ^embedding/table$, method: {table}}}, {others}]\n"
        f"calibration: {{data: ['{tmp_path / 'text.txt'}'], sequences: 8, sequence_length: 32}}\n"
    )
    recipe = load_recipe(str(path))
    wanted = compress(source, recipe, tmp_path / "whole")
    found = compress(source, recipe, tmp_path / "parts", CompressOptions(from_disk=True))
    pairs = zip(leaves_of(tmp_path / "whole"), leaves_of(tmp_path / "parts"), strict=True)
    for (path, whole), (same, part) in pairs:
        assert path == same and whole.dtype == part.dtype
        np.testing.assert_array_equal(whole, part, err_msg=jax.tree_util.keystr(path))
    assert found.rows == wanted.rows
    assert (found.bytes_before, found.bytes_after) == (wanted.bytes_before, wanted.bytes_after)
    assert found.expert_tokens == wanted.expert_tokens
    files = list((tmp_path / "parts" / "compressed").glob("*.safetensors"))
    assert len(files) >= (2 if kind == "dense" else 1), "written while layers are compressed"


@pytest.mark.longer
def test_what_is_refused(tmp_path, capsys):
    source = make_checkpoint(tmp_path)
    text = TextOptions((str(tmp_path / "text.txt"),))
    with pytest.raises(ConfigError, match="leave it out with --from-disk"):
        compress(source, "int8", tmp_path / "out", CompressOptions(text=text, from_disk=True))
    assert main(["--run", str(source), "--recipe", "int8", "--out", str(tmp_path / "run"), "--from-disk"]) == 0
    compressed = ["--run", str(tmp_path / "run"), "--recipe", "int8", "--out", str(tmp_path / "again")]
    assert main([*compressed, "--from-disk"]) == 2
    assert "is compressed already" in capsys.readouterr().err


MEASURE = """
import sys, threading, time
from pathlib import Path
from jaxstack.compress.after_training.run import CompressOptions, compress

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1e3

peak = start = anonymous()
done = False

def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.01)

thread = threading.Thread(target=watch)
thread.start()
compress(sys.argv[1], "int8", sys.argv[2], CompressOptions(from_disk=sys.argv[3] == "parts"))
done = True
thread.join()
print(peak - start)
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_process_needs_less_memory_than_the_model(tmp_path):
    source = make_checkpoint(tmp_path, hidden_size=1024, num_layers=16, intermediate_size=2816, num_heads=8)
    size = 16 * (4 * 1024 * 1024 + 3 * 1024 * 2816) * 4 / 1e6

    def megabytes(mode):
        arguments = [str(source), str(tmp_path / mode), mode]
        done = subprocess.run([sys.executable, "-c", MEASURE, *arguments], capture_output=True, text=True, check=True)
        return float(done.stdout.splitlines()[-1])

    parts = megabytes("parts")
    whole = megabytes("whole")
    assert parts < 0.6 * size < size < whole, (parts, whole, size)
