"""The command and its documentation: the quick start of docs/serving.md, SIGTERM, and wrong settings."""

import http.client
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from jaxstack.decoding.engine import Engine
from jaxstack.observe.number_format import byte_size
from jaxstack.run.load import load
from jaxstack.serve.__main__ import API_KEY, main
from jaxstack.serve.config import EngineConfig, ServerConfig
from tests.word_models import make_word_model

pytest.importorskip("uvicorn")

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
JSON = {"Content-Type": "application/json"}
PORT = re.compile(r"serving (\S+) at http://127\.0\.0\.1:(\d+)")


def shell_block(number: int) -> list[str]:
    """The commands of one of the page's shell blocks."""
    block = re.findall(r"^```sh\n(.*?)^```", PAGE, re.M | re.S)[number]
    return block.replace("\\\n", " ").strip().splitlines()


def one_device() -> dict[str, str]:
    """The environment of a user on one device, with this project on the path."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2]), "JAX_NUM_CPU_DEVICES": "1"}
    environment.pop(API_KEY, None)
    return environment


def start(command: str, folder: Path, *more: str) -> tuple[subprocess.Popen, str]:
    """Start a server of the page on a free port; return its process and its port."""
    words = [sys.executable, *shlex.split(command)[1:], "--port", "0", *more]
    process = subprocess.Popen(words, cwd=folder, env=one_device(), stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if found := PORT.match(line):
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return process, found[2]
    raise AssertionError("".join(said))


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl installed")
def test_the_quick_start_of_the_page_works(tmp_path):
    """Train (shorter), serve, ask with curl; then SIGTERM during an answer, which is finished."""
    train, serve = shell_block(0)
    root = Path(__file__).resolve().parents[2]
    (tmp_path / "configs").symlink_to(root / "configs")
    small = ["train.steps=3", "train.eval_every_steps=3", "train.eval_tokens=2000", "schedule.warmup_steps=1"]
    words = [sys.executable, *shlex.split(train)[1:-1], "model.num_layers=1", *small]
    trained = subprocess.run(words, cwd=tmp_path, env=one_device(), capture_output=True, text=True)
    assert trained.returncode == 0, trained.stderr
    process, port = start(serve, tmp_path, "engine.slots=2", "engine.chunk=64")
    try:
        plain, streamed, structured = (
            subprocess.run(command.replace("8000", port), shell=True, check=True, capture_output=True, text=True).stdout
            for command in shell_block(1)
        )
        assert json.loads(plain)["choices"][0]["text"]
        assert streamed.startswith("data: {") and streamed.endswith("data: [DONE]\n\n")
        assert re.fullmatch(r"[0-9]\.[0-9]{1,2}", json.loads(structured)["choices"][0]["text"])
        long = shell_block(1)[1].replace("8000", port).replace('"max_tokens": 40', '"max_tokens": 100')
        client = subprocess.Popen(long, shell=True, stdout=subprocess.PIPE, text=True)
        assert client.stdout is not None
        first = client.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert (first + client.stdout.read()).endswith("data: [DONE]\n\n")
        assert process.wait(60) == 0
    finally:
        process.kill()


@pytest.mark.exhaustive
def test_requests_beyond_the_drain_get_an_error_from_the_process(tmp_path):
    """A whole answer gets status 503, a stream an error event; the process ends by itself, with code 0."""
    model = make_word_model("llama", tmp_path / "llama")
    sizes = "engine.slots=1 engine.queue=1000 engine.chunk=16 engine.decode_steps=1 server.drain=0.3"
    process, port = start(f"python -m jaxstack.serve --run {model} {sizes}", tmp_path)
    try:
        body = {"prompt": [[3, 4]] * 3, "max_tokens": 12, "ignore_eos": True}
        streamed, whole = (http.client.HTTPConnection("127.0.0.1", int(port), timeout=60) for _ in range(2))
        streamed.request("POST", "/v1/completions", json.dumps({**body, "n": 128, "stream": True}), JSON)
        events = streamed.getresponse()
        whole.request("POST", "/v1/completions", json.dumps({**body, "n": 128}), JSON)
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        answer = whole.getresponse()
        error = json.loads(answer.read())["error"]["message"]
        assert answer.status == 503 and "shutting down" in error, error
        last = [line for line in events.read().decode().split("\n\n") if line][-1]
        assert "shutting down" in json.loads(last.removeprefix("data: "))["error"]["message"]
        assert process.wait(30) == 0
    finally:
        process.kill()


@pytest.mark.parametrize("key", ["a\nb", "\x07bell", "tab\there", "delete\x7fd"])
def test_a_key_with_control_characters_is_refused_at_the_start(key, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(API_KEY, key)
    assert main(["--run", str(tmp_path), "--port", "0"]) == 2
    assert f"{API_KEY} has a control character" in capsys.readouterr().err


def test_the_page_has_every_key_with_its_default():
    for title, component in (("## Sizes", EngineConfig), ("Limits of the HTTP server", ServerConfig)):
        text = PAGE[PAGE.index(title) :].split("\n\n|", 1)[1].split("\n\n", 1)[0]
        rows = dict(re.findall(r"^\|? ?`(\w+)` \| `([^`]+)` \|", text, re.M))
        expected = {name: field.default for name, field in component.model_fields.items()}
        assert {name: yaml.safe_load(default) for name, default in rows.items()} == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["engine.slot=4"], "did you mean 'slots'"),
        (["engine.slots=0"], "engine.slots"),
        (["quickly"], "'quickly' is no setting"),
        (["--port", "70000"], "--port must be from 0 to 65535; found 70000"),
        (["--host", "203.0.113.7"], "cannot listen on 203.0.113.7:0"),
        ([], "is neither a run directory"),
    ],
)
def test_a_wrong_setting_is_told_with_code_2(arguments, message, tmp_path, capsys):
    assert main(["--run", str(tmp_path), "--port", "0", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said and "Traceback" not in said


@pytest.mark.longer
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--draft=nowhere", "nowhere is neither a run directory"),
        ("--draft={folder}/other", "other has another tokenizer than "),
        ("server.chat_template=nofile", "server.chat_template: 'nofile' is not a file"),
        ("--adapter=sql", "--adapter is NAME=DIR"),
        ("--adapter=sql=nowhere", "nowhere is neither a run with adapters nor a directory of PEFT"),
        ("--adapter=sql={folder}/llama", "is neither a run with adapters nor a directory of PEFT"),
        ("--adapter=sql={folder}/wide", "have the shapes (3, 9) and (32, 3), which do not fit a layer with 32 inputs"),
        ("--adapter=sql={folder}/rank", "matrices of the rank 2, where its adapter_config.json has 3"),
        ("--adapter=sql={folder}/nan", "nan holds NaN or infinity, in decoder/layers/0/attention/o_proj"),
        ("--adapter=sql={folder}/head", "head has lm_head.lora_A.weight, which belongs to no dense"),
    ],
)
def test_what_belongs_to_a_model_is_looked_for_before_that_is_loaded(option, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("jaxstack.run.load.load", lambda *_, **__: pytest.fail("loaded"))
    model = make_word_model("llama", tmp_path / "llama")
    make_word_model("llama", tmp_path / "other", words=50)
    layer = "base_model.model.model.layers.0.self_attn.o_proj"
    sizes = {"wide": (3, 9, 32, layer), "rank": (2, 32, 32, layer), "nan": (3, 32, 32, layer)}
    sizes["head"] = (3, 32, 64, "base_model.model.lm_head")
    for name, (rank, inputs, outputs, path) in sizes.items():
        (tmp_path / name).mkdir()
        settings = {"peft_type": "LORA", "r": 3, "lora_alpha": 6}
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(settings))
        a, b = np.ones((rank, inputs), np.float32), np.ones((outputs, rank), np.float32)
        a[0, 0] = np.nan if name == "nan" else 1
        matrices = {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b}
        save_file(matrices, str(tmp_path / name / "adapter_model.safetensors"))
    assert main(["--run", str(model), "--plan", option.format(folder=tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_a_plan_is_printed_without_serving(tmp_path, capsys, monkeypatch):
    """With the numbers of the engine that would run; what does not fit is one message with numbers, and code 2."""
    model = make_word_model("llama", tmp_path / "llama")
    asked = ["--run", str(model), "--plan", "engine.page_size=8", "engine.pages=40", "parallel.tensor=1"]
    assert main(asked) == 0
    said = capsys.readouterr().out
    found = re.search(r"cache of keys and values +(\S+ \S+) +40 pages of 8 tokens, (\S+ \S+) each: 320 tokens", said)
    run = load(model, ["parallel.tensor=1"])
    run.decoder.join_projections()
    config = EngineConfig(page_size=8, pages=40)
    with Engine(run.decoder, config, warm_up=False, start=False) as engine:
        kept = sum(x.nbytes for x in jax.tree.leaves(engine.programs._pages))
    assert found is not None and found[1] == byte_size(kept) and found[2] == byte_size(kept / 40)
    assert re.search(rf"weights +{re.escape(byte_size(run.decoder.weight_bytes))}\n", said)
    assert "16 requests at a time (engine.slots)" in said and "would fit: " in said
    assert main([*asked, "engine.slots=1000000000"]) == 2
    assert re.search(r"logits of 1,000,000,000 requests .* at most [\d,]+", capsys.readouterr().err)
    assert main([*asked, "engine.pages=100000000000"]) == 2
    refused = re.search(r"100,000,000,000 pages \(engine.pages\) take .* at most ([\d,]+), or", capsys.readouterr().err)
    assert refused is not None
    assert main([*asked, f"engine.pages={refused[1].replace(',', '')}"]) == 0
    assert re.search(r"left for programs and their temporaries +\d", capsys.readouterr().out)
    staged = ["--run", str(model), "--plan", "parallel.pipeline=2", "parallel.tensor=1"]
    assert main([*staged, "engine.draft_tokens=2"]) == 2
    assert "a pipeline is served without engine.draft_tokens" in capsys.readouterr().err
    monkeypatch.setattr("jaxstack.run.load.memory_per_device", lambda: 1000)
    assert main(asked) == 2
    assert "the weights take " in capsys.readouterr().err
