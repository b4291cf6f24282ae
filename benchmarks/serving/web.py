"""An exported page against ONNX Runtime Web: both in one worker of headless Chromium, in turn, with equal threads.

    npm install onnxruntime-web
    python benchmarks/serving/web.py --run runs/quickstart --onnxruntime node_modules/onnxruntime-web/dist
    python benchmarks/serving/web.py --run runs/quickstart --threads 2            # prompts and tokens only
    python benchmarks/serving/web.py --run runs/quickstart --rounds 1 --tiny      # rows go to tiny/

The run is exported twice: as the page, and as the graph of `--to onnx` with the head for the last token only, which is
what the page computes too. Both continue the same prompt greedily and must choose the same tokens. Products of matrices
have constant weights, which both sides may pack beforehand. A row has the best of `--rounds`; `load` is the machine's
before the measurement.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from benchmarks.arguments import positive
from benchmarks.rows import append_rows, print_table, require_commit
from benchmarks.serving.browser import CHROMIUM, Browser, open_browser
from jaxstack.export import web
from jaxstack.export.onnx_target import Graph, build_graph
from jaxstack.export.source import Source, load_source
from jaxstack.export.web import make_server

PROMPT = 64
TOKENS = 64
REPEATS = 5
"""Tokens of the prompt, tokens after it, and how often a round repeats the prompt."""
PRODUCTS = ((128, 256, 1024), (128, 512, 512), (1, 512, 2048))
"""Rows, inner size and columns of the products."""
TEXT = 'def parse(lines):\n    """Return the fields of each line."""\n    return [line.split() for line in lines]\n' * 6
COLUMNS = ("work", "implementation", "milliseconds", "gflops", "variant")
PAGE = '<!doctype html><link rel="icon" href="data:,"><title>benchmark</title>'
ASK = """new Promise((resolve, reject) => {
  const worker = new Worker("web_worker.js", { type: "module" });
  worker.onerror = event => reject(new Error(event.message ?? "the worker does not load"));
  worker.onmessage = ({ data }) => {
    worker.terminate();
    return data.error ? reject(new Error(data.error)) : resolve(data.found);
  };
  worker.postMessage(%s);
})"""


def write_folder(source: Source, onnxruntime: Path, folder: Path) -> None:
    """Write the page, the graphs and the worker that measures them."""
    (folder / "page").mkdir()
    web.write(source, folder / "page")
    build_graph(source.model, source.parameters, last_only=True).save(folder / "model.onnx")
    random = np.random.default_rng(0)
    for m, k, n in PRODUCTS:
        weights = random.uniform(-0.5, 0.5, (k, n)).astype(np.float32)
        graph = Graph("product")
        product = graph.add("MatMul", graph.input("x", "FLOAT", [m, k]), graph.weight("w", weights))
        graph.output(product, "y", "FLOAT", [m, n])
        graph.save(folder / f"{m}x{k}x{n}.onnx")
        (folder / f"{m}x{k}x{n}.weights").write_bytes(weights.tobytes())
    (folder / "onnxruntime").symlink_to(onnxruntime.resolve(), target_is_directory=True)
    (folder / "web_worker.js").write_bytes(Path(__file__).with_name("web_worker.js").read_bytes())
    (folder / "index.html").write_text(PAGE, encoding="utf-8")


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder, and yield its address."""
    server = make_server(folder, 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def ask(browser: Browser, **message: Any) -> dict[str, Any]:
    """Return what a new worker answers."""
    return browser.evaluate(ASK % json.dumps(message))


def model_rows(found: Mapping[str, Any], ready: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return the rows of readiness, prompts and tokens.

    Raises:
      SystemExit: the two sides chose different tokens.
    """
    ids = {tuple(one["ids"]) for side in ("page", "graph") for one in found[side]}
    if len(ids) != 1:
        raise SystemExit(f"the page and ONNX Runtime Web chose different tokens: {sorted(ids)}")
    difference = float(np.max(np.abs(np.subtract(found["page"][0]["logits"], found["graph"][0]["logits"]))))
    rows = []
    for side in ("page", "graph"):
        prompt, token = (min(one[key] for one in found[side]) for key in ("promptMs", "tokenMs"))
        rows.append({"work": "ready", "side": side, "milliseconds": ready[side]})
        rows.append({"work": f"prompt of {PROMPT} tokens", "side": side, "milliseconds": prompt})
        position = f"one token, at position {PROMPT} to {PROMPT + TOKENS - 1}"
        rows.append({"work": position, "side": side, "milliseconds": token, "difference": difference})
    return rows


def product_rows(shape: Sequence[int], found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of one product."""
    m, k, n = shape
    rows = []
    for side in ("page", "graph"):
        ms = min(found[side])
        title = found["title"] if side == "page" else None
        row = {"work": f"product {m} x {k} x {n}", "side": side, "milliseconds": ms, "gflops": 2e-6 * m * k * n / ms}
        rows.append({**row, "variant": title, "difference": found["difference"]})
    return rows


def measure(source: Source, onnxruntime: Path, rounds: int, threads: int) -> list[dict[str, Any]]:
    """Return all rows."""
    prompt = source.tokenizer.encode(TEXT)[:PROMPT].tolist()
    if len(prompt) < PROMPT:
        raise SystemExit(f"the text has {len(prompt)} tokens for this tokenizer, fewer than {PROMPT}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_folder(source, onnxruntime, folder)
        with served(folder) as address, open_browser(folder / "profile") as browser:
            browser.open(f"{address}/page/index.html?threads={threads}")
            loaded = browser.evaluate("jaxstack.loaded")
            browser.open(f"{address}/index.html")
            settings = {"prompt": prompt, "count": TOKENS, "rounds": rounds, "repeats": REPEATS, "threads": threads}
            found = ask(browser, kind="model", context=source.context, **settings)
            rows = model_rows(found, {"page": loaded["totalMs"], "graph": found["graphMs"]})
            for m, k, n in PRODUCTS if threads == 1 else ():
                product = ask(browser, kind="product", file=f"{m}x{k}x{n}", m=m, k=k, n=n, rounds=rounds, threads=1)
                rows += product_rows((m, k, n), product)
    return rows


def describe(source: Source, onnxruntime: Path, threads: int) -> dict[str, Any]:
    """Return what all rows have in common."""
    version = json.loads((onnxruntime.parent / "package.json").read_text(encoding="utf-8"))["version"]
    assert CHROMIUM is not None
    browser = subprocess.run([CHROMIUM, "--version"], capture_output=True, text=True, check=True).stdout.split()
    parameters = sum(array.size for array in source.parameters.values())
    return {
        "onnxruntime": version,
        "chromium": next(word for word in browser if word[0].isdigit()),
        "parameters": parameters,
        "device": platform.machine(),
        "devices": 1,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "threads": threads,
    }


def main() -> None:
    """Measure, print and store the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True, help="run directory, or Hugging Face checkpoint")
    parser.add_argument(
        "--onnxruntime", type=Path, default=Path("node_modules/onnxruntime-web/dist"), help="dist of onnxruntime-web"
    )
    parser.add_argument("--rounds", type=positive(int), default=6, help="how often each side is measured, in turn")
    parser.add_argument("--threads", type=positive(int), default=1, help="threads of each side")
    parser.add_argument("--tiny", action="store_true", help="a try: rows go to tiny/")
    args = parser.parse_args()
    if not (args.onnxruntime / "ort.wasm.min.mjs").is_file():
        parser.error(f"{args.onnxruntime} has no ort.wasm.min.mjs; run npm install onnxruntime-web, and name its dist")
    if CHROMIUM is None:
        parser.error("no chromium, chromium-browser or google-chrome is installed")
    script = "tiny/web" if args.tiny else "web"
    require_commit(script)
    source = load_source(args.run)
    common = describe(source, args.onnxruntime, args.threads)
    names = {"page": "jaxstack", "graph": f"ONNX Runtime Web {common['onnxruntime']}"}
    measured = measure(source, args.onnxruntime, args.rounds, args.threads)
    rows = [{**common, **row, "implementation": names[row["side"]]} for row in measured]
    append_rows(script, rows)
    print_table(rows, COLUMNS)


if __name__ == "__main__":
    main()
