"""StableHLO programs: the logits of transformers for any number of rows, in a process without jaxstack too."""

import ast
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from jax import export

from jaxstack.export import run_exported, stablehlo
from jaxstack.export.run_exported import StableHLOModel, generate
from tests.export.sources import MIXTURES, PROMPT, expected, make_source
from tests.shapes import unchecked


@pytest.mark.quick
@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_of_experts_is_refused(name):
    assert "moe" in (stablehlo.problem(make_source(name)) or "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "llama"
    folder.mkdir()
    with unchecked():  # a number of rows that is not known is no int
        stablehlo.write(make_source("llama"), folder)
    return folder


def test_logits_and_greedy_tokens_are_those_of_transformers(folder):
    wanted = expected("llama")
    model = StableHLOModel(folder)
    tokens = wanted["tokens"]
    found = model.start([tokens[0, :3], tokens[1, :20]])
    np.testing.assert_allclose(found, wanted["logits"][[0, 1], [2, 19]], atol=1e-4, rtol=0)
    found = model.advance(np.array([tokens[0, 3], tokens[1, 20]]))
    np.testing.assert_allclose(found, wanted["logits"][[0, 1], [3, 20]], atol=1e-4, rtol=0)
    settings = json.loads((folder / run_exported.SETTINGS).read_text())
    greedy = [int(ids[0]) for ids in generate(model, [tokens[0, :PROMPT]], 12, settings)]
    assert greedy == wanted["greedy"].tolist()


def test_programs_are_for_two_platforms_and_take_the_parameters_as_arguments(folder):
    for name in ("prefill", "decode"):
        program = export.deserialize(bytearray((folder / f"{name}.jax_export").read_bytes()))
        assert program.platforms == ("cpu", "cuda")
        assert str(program.in_avals[-1].shape[0]) == "b"
        text = (folder / f"{name}.mlir").read_text()
        assert "stablehlo.dot_general" in text and len(text) < 400_000


def test_a_process_with_jax_alone_generates(folder):
    imported = {
        name.name.split(".")[0] for node in ast.walk(ast.parse((folder / "run.py").read_text()))
        for name in (node.names if isinstance(node, ast.Import) else [])
    }  # fmt: skip
    assert "jaxstack" not in imported
    wanted = expected("llama")
    prompt = ",".join(map(str, wanted["tokens"][0, :PROMPT]))
    blocked = "import sys, runpy; sys.modules['jaxstack'] = sys.modules['flax'] = None; sys.argv = sys.argv[1:]"
    command = [sys.executable, "-c", f"{blocked}; runpy.run_path(sys.argv[0], run_name='__main__')"]
    done = subprocess.run(
        [*command, str(folder / "run.py"), "--ids", prompt, "--max-tokens", "12"],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ",".join(map(str, wanted["greedy"]))


@pytest.mark.parametrize("name", [pytest.param("gpt2", marks=pytest.mark.longer),
                                  pytest.param("gemma3", marks=pytest.mark.exhaustive),
                                  pytest.param("gemma4-shared-keys", marks=pytest.mark.exhaustive)])  # fmt: skip
def test_other_families(name, tmp_path, unchecked_shapes):
    stablehlo.write(make_source(name), tmp_path)
    wanted = expected(name)
    model = StableHLOModel(tmp_path)
    tokens = wanted["tokens"]
    np.testing.assert_allclose(model.start([tokens[0, :10]])[0], wanted["logits"][0, 9], atol=1e-4, rtol=0)
    for position in range(10, 24):
        found = model.advance(tokens[:1, position])
    np.testing.assert_allclose(found[0], wanted["logits"][0, -1], atol=1e-4, rtol=0)
