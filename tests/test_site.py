"""The documentation as a site, and a run's report, as a browser shows them: complete, without a network, on a phone."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxstack.observe.report.page import write_report
from jaxstack.plan.draw import describe_plan
from scripts.pages import configuration
from tests.browser import DESK, PHONE, Browser, needs_chromium, open_browser
from tests.small_runs import small_config

ALL = "[...document.querySelectorAll"
ROOT = Path(__file__).resolve().parents[1]
needs_mkdocs = pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="mkdocs-material not installed")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with open_browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def load_script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_page(browser: Browser, page: Path) -> None:
    """Nothing is wrong on it, nothing comes from elsewhere, and it is as wide as a phone and as a desk."""
    browser.complaints.clear()
    browser.asked_for.clear()
    for window in (DESK, PHONE):
        browser.open(page.as_uri(), window)
        assert browser.overflow() <= 0, f"{page.name} is {browser.overflow()} px wider than {window[0]}"
    assert browser.evaluate("[...document.images].filter(i => !i.naturalWidth).map(i => i.src)") == []
    assert browser.complaints == []
    assert [address for address in browser.asked_for if not address.startswith(("file:", "data:", "blob:"))] == []


# --- the site ---------------------------------------------------------------------------------------------------------


@needs_mkdocs
def test_site_has_every_page_and_brings_in_what_lies_outside(site):
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    built = {path.stem for path in site.glob("*.html")}
    assert pages | {"first_hour", "contributing", "changelog"} <= built
    examples = re.sub("<[^>]+>", "", (site / "examples.html").read_text(encoding="utf-8"))
    assert "def main" in examples and "source: examples/" not in examples
    hour = (site / "first_hour.html").read_text(encoding="utf-8")
    assert "jaxstack.train" in hour and "first_hour.ipynb" in hour
    assert 'href="contributing.html"' in (site / "index.html").read_text(encoding="utf-8")


@pytest.mark.exhaustive
@needs_mkdocs
@needs_chromium
def test_pages_of_the_site_in_a_browser(site, browser):
    # That one is for servers: its links begin at their root.
    pages = sorted(set(site.glob("*.html")) - {site / "404.html"})
    assert len(pages) > 25
    for page in pages:
        check_page(browser, page)
        assert browser.evaluate("document.querySelector('h1').innerText.length") > 2, page.name


# --- the report -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A run directory with everything that a report can show."""
    run = tmp_path_factory.mktemp("run")
    lines = []
    for step in range(1, 301):
        line = {"step": step, "loss": 8.0 / step**0.2, "grad_norm": 1.0, "learning_rate": 1e-3, "tokens": 512 * step}
        line |= {"tokens_per_second": 1e4 + step, "step_time_seconds": 0.05, "peak_memory_bytes": 2**30, "mfu": 0.4}
        lines.append(line)
    lines.append({"step": 300, "eval_loss": 2.5, "eval_bits_per_byte": 1.1})
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = small_config("parallel.data=2", "parallel.fsdp=2", "parallel.pipeline=2", "train.global_batch_size=16")
    plan = describe_plan(config)
    ran = {
        "kernels": [{"operation": "flash_attention", "site": "a/very/long/path/of/a/file.py:45", "passed_over": ["x"]}],
        "collectives": [{"kind": "all-gather", "axes": "fsdp", "wire_bytes": 1024, "calls": 3}],
        "sharding": plan["sharding"],
        "pipeline": plan["pipeline"],
    }
    environment = {"ran": ran, "schedule": [[1, 0.0], [300, 1e-3]], "devices": 8, "device_kinds": ["cpu"]}
    (run / "environment.json").write_text(json.dumps(environment))
    (run / "config.yaml").write_text("run: {name: shown}\ntrain: {steps: 300}\n")
    return write_report(run)


@needs_chromium
def test_report_in_a_browser(report, browser):
    check_page(browser, report)
    for window in (DESK, PHONE):
        browser.open(report.as_uri(), window)
        sizes = browser.evaluate(ALL + "('path.line')].map(p => [p.getBoundingClientRect().width, p.getTotalLength()])")
        assert len(sizes) >= 8
        assert all(width > 100 and length > 500 for width, length in sizes if length > 1)
        assert sum(length > 1 for _, length in sizes) >= 7
        boxes = browser.evaluate(ALL + "('.sharding rect')].map(r => r.getBoundingClientRect().width)")
        assert len(boxes) > 8 and min(boxes) > 10
        assert browser.evaluate("document.querySelectorAll('.pipeline .task-f').length") > 0


@needs_chromium
def test_pointing_at_a_chart_tells_its_values(report, browser):
    browser.open(report.as_uri())
    said = browser.evaluate(
        """(() => {
            const figure = document.querySelector('figure.chart'), plot = figure.querySelector('.plot');
            const box = plot.getBoundingClientRect();
            const at = {clientX: box.left + box.width / 2, clientY: box.top + 5, bubbles: true};
            plot.dispatchEvent(new PointerEvent('pointermove', at));
            return figure.querySelector('output').textContent;
        })()"""
    )
    assert said.startswith("step 15") and "train" in said  # the middle of 300 steps
    assert browser.complaints == []


# --- what scripts make ------------------------------------------------------------------------------------------------


@pytest.mark.longer
def test_pictures_are_what_their_script_makes():
    script = load_script("pictures")
    for name, content in script.make_pictures().items():
        assert (script.PICTURES / name).read_text(encoding="utf-8") == content, "run: python scripts/pictures.py"


def test_tables_of_the_configuration_are_made_again():
    (page, _) = configuration.PAGES
    made = page.make(page.read().replace("1000", "7"))
    assert "| `steps` | `1000` | Optimizer steps of the whole run. |" in made


@pytest.mark.exhaustive
def test_notebook_of_the_first_hour_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")  # of the commands that it runs, as a reader does
    notebook = load_script("run_notebook").run_notebook(ROOT / "docs" / "first_hour.ipynb")
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", ())]
    texts = ["".join(output["text"]) for output in outputs]
    assert any("step 60/60" in text for text in texts) and any("step 80/80" in text for text in texts)
    assert any("flash_attention at" in text for text in texts)


def test_notebook_holds_what_its_cells_printed():
    notebook = json.loads((ROOT / "docs" / "first_hour.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, 1 + len(cells)))
    assert sum(bool(cell["outputs"]) for cell in cells) >= 6
