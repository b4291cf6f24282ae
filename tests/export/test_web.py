"""The page in a browser: logits and greedy tokens of transformers, ids of the tokenizers library, its kernels."""

import contextlib
import dataclasses
import functools
import json
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from jaxstack.data.load_tokenizer import SubwordTokenizer, train_bpe
from jaxstack.data.tokenizer import ByteTokenizer, SyntheticTokenizer
from jaxstack.errors import ConfigError
from jaxstack.export import web
from jaxstack.export.web import describe_tokenizer, make_server
from tests.browser import PHONE, SOFTWARE_GPU, needs_chromium, open_browser
from tests.export.sources import MIXTURES, PROMPT, expected, make_source

TEXT = "It's naïve: 12 + 34\n\n  def f(x):\t return x\u0085 # 😀 日本語 don't\ufeff"


@contextlib.contextmanager
def served(folder):
    """The address at which a folder is served."""
    server = make_server(folder, 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/?measure="
    finally:
        server.shutdown()
        server.server_close()


def ask(browser, kind, **values):
    return browser.evaluate(f"jaxstack.ask({json.dumps(kind)}, {json.dumps(values)})")


@needs_chromium
@pytest.mark.parametrize("name", ["qwen3", pytest.param("gpt2", marks=pytest.mark.longer),
                                  pytest.param("gemma2", marks=pytest.mark.longer),
                                  pytest.param("gemma3", marks=pytest.mark.exhaustive),
                                  pytest.param("llama-biases", marks=pytest.mark.exhaustive)])  # fmt: skip
def test_the_page_computes_what_transformers_does(name, tmp_path):
    source = make_source(name)
    wanted = expected(name)
    assert web.problem(source) is None
    web.write(source, tmp_path / "page")
    tokens = wanted["tokens"][0].tolist()
    with served(tmp_path / "page") as address, open_browser(tmp_path / "profile") as browser:
        browser.open(f"{address}{0.05 if name == 'qwen3' else 0}", PHONE)
        for count in (24, 1, 13):
            found = ask(browser, "logits", ids=tokens[:count])["logits"]
            np.testing.assert_allclose(found, wanted["logits"][0, count - 1], atol=1e-4, rtol=0)
        done = ask(browser, "generate", ids=tokens[:PROMPT], maxTokens=12, temperature=0)
        assert done["ids"] == wanted["greedy"].tolist()
        report = browser.evaluate("jaxstack.loaded")
        assert report["candidates"] >= (24 if name == "qwen3" else 2)
        assert all(row["gflops"] > 0 for row in report["report"])
        assert browser.overflow() <= 0
        assert [text for text in browser.complaints if "No available adapters" not in text] == []  # Chromium's words
        assert "ready" in browser.evaluate("document.getElementById('status').textContent")
        assert report["device"].startswith("WebAssembly, ") and report["others"], "the page says why it takes no GPU"


@needs_chromium
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_threads_of_an_isolated_page_compute_the_same(name, tmp_path):
    source = make_source(name)
    wanted = expected(name)
    web.write(source, tmp_path / "page")
    tokens = wanted["tokens"][0].tolist()
    with served(tmp_path / "page") as address, open_browser(tmp_path / "profile") as browser:
        browser.open(f"{address}0&device=wasm&threads=3")
        for count in (24, 1, 13):
            found = ask(browser, "logits", ids=tokens[:count])["logits"]
            np.testing.assert_allclose(found, wanted["logits"][0, count - 1], atol=1e-4, rtol=0)
        done = ask(browser, "generate", ids=tokens[:PROMPT], maxTokens=12, temperature=0)
        assert done["ids"] == wanted["greedy"].tolist()
        assert browser.evaluate("jaxstack.loaded")["device"] == "WebAssembly, 3 threads" and not browser.complaints


@needs_chromium
@pytest.mark.exhaustive
def test_a_page_that_is_not_isolated_has_one_thread(tmp_path):
    source = make_source("llama")
    wanted = expected("llama")
    web.write(source, tmp_path)
    tokens = wanted["tokens"][0].tolist()
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(tmp_path))  # as python -m http.server has
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, open_browser(tmp_path / "profile") as browser:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser.open(f"http://127.0.0.1:{server.server_address[1]}/?measure=0&threads=2")
        done = ask(browser, "generate", ids=tokens[:PROMPT], maxTokens=12, temperature=0)
        assert done["ids"] == wanted["greedy"].tolist()
        report = browser.evaluate("jaxstack.loaded")
        assert report["device"] == "WebAssembly, 1 thread"
        assert any("does not isolate" in text for text in report["others"])
        server.shutdown()


@needs_chromium
@pytest.mark.parametrize("name", ["gemma2", *(pytest.param(name, marks=pytest.mark.exhaustive)
                                              for name in ("qwen3", "gpt2", "gemma3", "llama-biases"))])  # fmt: skip
def test_the_page_computes_the_same_on_webgpu(name, tmp_path):
    source = make_source(name)
    wanted = expected(name)
    web.write(source, tmp_path / "page")
    tokens = wanted["tokens"][0].tolist()
    with served(tmp_path / "page") as address, open_browser(tmp_path / "profile", SOFTWARE_GPU) as browser:
        browser.open(f"{address}0")
        if not browser.evaluate("navigator.gpu?.requestAdapter().then(adapter => adapter !== null) ?? false"):
            pytest.skip("this Chromium has no WebGPU")
        browser.open(f"{address}{0.05 if name == 'qwen3' else 0}&device=webgpu")
        for count in (24, 1, 13):
            found = ask(browser, "logits", ids=tokens[:count])["logits"]
            np.testing.assert_allclose(found, wanted["logits"][0, count - 1], atol=1e-4, rtol=0)
        done = ask(browser, "generate", ids=tokens[:PROMPT], maxTokens=12, temperature=0)
        assert done["ids"] == wanted["greedy"].tolist()
        report = browser.evaluate("jaxstack.loaded")
        assert report["device"].startswith("WebGPU") and report["candidates"] >= (24 if name == "qwen3" else 2)
        assert {row["rows"] for row in report["report"]} == {1, 64} and not browser.complaints


@needs_chromium
@pytest.mark.exhaustive
def test_a_prompt_of_several_parts_and_its_cache_are_the_same_on_both(tmp_path):
    source = dataclasses.replace(make_source("gemma3"), context=200)
    web.write(source, tmp_path / "page")
    ids = np.random.default_rng(0).integers(0, 60, 150).tolist()
    with served(tmp_path / "page") as address, open_browser(tmp_path / "profile", SOFTWARE_GPU) as browser:
        found = []
        for device in ("webgpu", "wasm"):
            browser.open(f"{address}0&device={device}")
            found.append(np.asarray(ask(browser, "logits", ids=ids)["logits"]))
    np.testing.assert_allclose(*found, atol=1e-4, rtol=0)


def sentencepiece(normalizer=None, pre_tokenizer=None) -> SubwordTokenizer:
    """A tokenizer as those of Llama 2: merges of characters, unknown ones as bytes."""
    words = ["<unk>", "<s>", *(f"<0x{i:02X}>" for i in range(256)), *"\u2581defx", "de", "def", "\u2581def", "\u2581x"]
    merges = [("d", "e"), ("de", "f"), ("\u2581", "def"), ("\u2581", "x")]
    model = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, merges, byte_fallback=True, unk_token="<unk>"))
    model.normalizer = normalizer
    model.pre_tokenizer = pre_tokenizer
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    model.decoder = decoders.Sequence(steps)
    return SubwordTokenizer(model, "file", 1)


MARKS = normalizers.Replace(" ", "\u2581")
SENTENCEPIECE = {
    "llama2": lambda: sentencepiece(normalizers.Sequence([normalizers.Prepend("\u2581"), MARKS])),
    "gemma": lambda: sentencepiece(MARKS, pre_tokenizers.Split(" ", "merged_with_previous")),
    "metaspace": lambda: sentencepiece(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
}


@pytest.mark.parametrize(("name", "prefix"), [("llama2", "always"), ("gemma", None), ("metaspace", "missing")])
def test_a_described_sentencepiece_tokenizer_has_marks_as_spaces(name, prefix):
    tokenizer = SENTENCEPIECE[name]()
    found = describe_tokenizer(tokenizer)
    assert found["prefix"] == prefix and found["characters"]["\u2581"] == 258
    ids = tokenizer.encode("def x\u00e9")
    text = bytes.fromhex("".join(found["tokens"][i] for i in ids)).decode()
    assert text == (" " if prefix else "") + "def x\u00e9"
    with pytest.raises(ConfigError, match="NFKC"):
        describe_tokenizer(sentencepiece(normalizers.NFKC()))


@needs_chromium
@pytest.mark.parametrize("name", ["bytes", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in SENTENCEPIECE)])
def test_the_page_encodes_and_generates_text(name, tmp_path):
    bpe = train_bpe([TEXT * 3, "def g(y): return y + 1\n" * 5], 300)
    tokenizer = bpe if name == "bytes" else SENTENCEPIECE[name]()
    source = make_source("llama")
    rows = np.random.default_rng(0).normal(size=(320, source.model.hidden_size)).astype(np.float32)
    source = dataclasses.replace(
        source,
        model=source.model.model_copy(update={"vocab_size": len(rows)}),
        parameters={**source.parameters, "embedding/table": rows},
        tokenizer=tokenizer,
        stop_tokens=(),
    )
    web.write(source, tmp_path / "page")
    with served(tmp_path / "page") as address, open_browser(tmp_path / "profile") as browser:
        browser.open(f"{address}0")
        assert ask(browser, "encode", text=TEXT)["ids"] == tokenizer.encode(TEXT).tolist()
        browser.evaluate("jaxstack.loaded")
        # Of this vocabulary the model knows only the first 64 ids.
        script = (
            "document.getElementById('prompt').value = '!#'; document.getElementById('tokens').value = 5; generate()"
        )
        browser.evaluate(script.replace("generate()", "document.getElementById('ask').requestSubmit()"))
        browser.evaluate("new Promise(done => setInterval(() => document.getElementById('go').disabled || done(), 20))")
        message = browser.evaluate("document.getElementById('status').textContent")
        assert "tokens" in message, message


def subword(**changes) -> SubwordTokenizer:
    """A trained tokenizer with other entries in its tokenizer.json."""
    said = json.loads(train_bpe(["some text for a few merges " * 4], 280).tokenizer_json())
    model = {**said["model"], **changes.pop("model", {})}
    return SubwordTokenizer(Tokenizer.from_str(json.dumps({**said, "model": model, **changes})), "file", 279)


def test_a_described_tokenizer_has_the_bytes_and_merges_of_the_original():
    assert describe_tokenizer(ByteTokenizer()) == {"kind": "byte"}
    tokenizer = subword(normalizer={"type": "NFC"})
    found = describe_tokenizer(tokenizer)
    assert bytes.fromhex("".join(found["tokens"][i] for i in tokenizer.encode("some text"))) == b"some text"
    assert all(found["tokens"][a] + found["tokens"][b] == found["tokens"][c] for a, b, c in found["merges"])
    assert [bytes.fromhex(found["tokens"][i]) for i in found["byteIds"]] == [bytes([b]) for b in range(256)]
    assert found["normalizer"] == "NFC" and r"\s" not in found["patterns"][0]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "Lowercase"),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Whitespace"}]}}, "Whitespace"),
        ({"model": {"byte_fallback": True}}, "byte_fallback"),
    ],
)
def test_other_tokenizers_are_refused_by_the_feature(changes, named):
    with pytest.raises(ConfigError, match=named):
        describe_tokenizer(subword(**changes))
    with pytest.raises(ConfigError, match="synthetic"):
        describe_tokenizer(SyntheticTokenizer(100))


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_of_experts_is_refused(name):
    assert "moe" in (web.problem(make_source(name)) or "")


def test_heads_that_rotate_in_part_are_refused():
    source = make_source("llama")
    model = source.model.model_copy(update={"partial_rotary_factor": 0.5})
    assert "partial_rotary_factor: 0.5 (only 1" in (web.problem(dataclasses.replace(source, model=model)) or "")
