"""The report: one well-formed, self-contained page with the run's numbers, whatever the files hold."""

import html
import json
import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from jaxstack.observe.report.chart import linear_ticks, log_ticks, step_axis, value_axis
from jaxstack.observe.report.page import write_report
from jaxstack.observe.report.series import downsample, make_series, read_metrics, smooth

VOID = {"meta", "br", "path", "img", "input", "link"}


class _Page(HTMLParser):
    """Checks that tags nest, and collects texts, tags and embedded data."""

    def __init__(self, path):
        super().__init__()
        self.open = []
        self.tags = []
        self.texts = []
        self.data = []
        self.attributes = []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.data += [json.loads(data)] if data.startswith("{") else []
        elif not self.open or self.open[-1] != "style":
            self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())

    def chart(self, label):
        return next(d for d in self.data if any(c["label"] == label for c in d["curves"]))


def _write(run_dir, lines, config="", environment=None):
    run_dir.mkdir(exist_ok=True)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run_dir / "config.yaml").write_text(config)
    if environment is not None:
        (run_dir / "environment.json").write_text(json.dumps(environment))
    return _Page(write_report(run_dir))


def _line(step, **values):
    return {
        "step": step,
        "loss": 5.0 - step / 100,
        "grad_norm": 1.5,
        "learning_rate": 1e-3,
        "tokens": step * 1000,
        "tokens_per_second": 12345.0,
        "tokens_per_second_per_device": 12345.0,
        "step_time_seconds": 0.25,
        "model_tflops_per_device": 1.5,
        "mfu": None,
        "peak_memory_bytes": 3 * 2**30,
        "data_wait_fraction": 0.01,
    } | values


def test_page_shows_the_run(tmp_path):
    lines = [_line(step) for step in range(10, 210, 10)]
    lines.append({"step": 100, "eval_loss": 3.1111})
    lines.append({"step": 200, "eval_loss": 3.2222, "eval_bits_per_byte": 1.7654})
    environment = {
        "versions": {"jax": "9.9.9"},
        "devices": 4,
        "device_kinds": ["NVIDIA H200"],
        "started": "2025-01-02T03:04:05+00:00",
        "ran": {
            "kernels": [{"site": "layers", "backend": "cudnn", "passed_over": ["mosaic: needs jax 0.11"]}],
            "collectives": [{"kind": "all-gather", "axes": "fsdp", "payload_bytes": 5 * 2**20}],
            "memory": {"predicted_bytes": 2**31},
        },
        "schedule": [[0, 0.0], [100, 2e-3], [200, 0.0]],
    }
    page = _write(tmp_path / "run", lines, "run: {name: my run}\ntrain: {steps: 250}\n", environment)
    for shown in (
        "my run",
        "200",
        "of 250",
        "3.0000",
        "3.2222",
        "best 3.1111",
        "1.7654",
        "12.3k",
        "3.0 GiB",
        "4 × NVIDIA H200",
        "jax 9.9.9",
        "2025-01-02 03:04:05 UTC",
        "cudnn",
        "mosaic: needs jax 0.11",
        "all-gather",
        "5.0 MiB",
        "2.0 GiB",
        "steps: 250",
    ):
        assert shown in page.text, shown
    loss = page.chart("held-out")
    curves = {curve["label"]: curve for curve in loss["curves"]}
    assert curves["held-out"]["values"] == [3.1111, 3.2222]
    assert curves["train"]["steps"] == list(range(10, 210, 10))
    assert curves["train"]["values"][-1] == 3.0
    rates = {curve["label"]: curve for curve in page.chart("planned")["curves"]}
    assert rates["planned"]["values"] == [0.0, 0.002, 0.0] and rates["used"]["values"][0] == 0.001
    assert {"norm", "all devices", "peak", "share"} <= {c["label"] for d in page.data for c in d["curves"]}
    assert not any(c["label"] == "MFU" for d in page.data for c in d["curves"])  # null on every line


def test_page_shows_the_balance_of_experts(tmp_path):
    values = {"router_entropy": 1.2, "router_dropped": 0.1, "expert_load": 1.5, "expert_overload": 1.25}
    text = _write(tmp_path, [_line(step, **values, expert_overload_layer=3) for step in (1, 2)]).text
    assert "Fullest expert" in text and "worst 2.25 in layer 3" in text
    assert "Entropy of the routers" in text and "expert_overload_layer" not in text


def test_page_is_self_contained(tmp_path):
    page = _write(tmp_path / "run", [_line(1), _line(2)])
    assert "link" not in page.tags and "img" not in page.tags and "iframe" not in page.tags
    assert not [value for name, value in page.attributes if name in ("src", "href")]
    assert not re.search(r"https?://|@import|url\(", page.source)
    assert ("name", "viewport") in page.attributes and "prefers-color-scheme: dark" in page.source


ATTACK = "</script></pre><script>alert('x')</script><img src=x onerror=alert(1)>\"'&"


def test_nothing_from_the_files_becomes_markup(tmp_path):
    environment = {
        "hostname": ATTACK,
        "device_kinds": [ATTACK],
        "started": ATTACK,
        "versions": {"jax": ATTACK},
        "ran": {ATTACK: ATTACK, "attention": [{ATTACK: ATTACK}], "list": [ATTACK]},
    }
    config = "run:\n  name: " + json.dumps(ATTACK) + "\n# " + ATTACK + "\n"
    lines = [_line(1, **{ATTACK: 1.0, "text": ATTACK}), _line(2, **{ATTACK: 2.0})]
    page = _write(tmp_path / "run", lines, config, environment)
    assert "img" not in page.tags
    assert page.tags.count("script") == len(page.data) + 1
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert page.text.count("alert('x')") >= 8  # shown as text
    assert html.escape(ATTACK) in page.source


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("nothing", ""),
        ("torn", '{"step": 1, "loss": 2.0}\n{"step": 2, "lo'),
        ("null", '{"step": 1, "loss": null, "mfu": null}\n'),
        ("not finite", '{"step": 1, "loss": "NaN", "grad_norm": "Infinity"}\n{"step": 2, "loss": NaN}\n'),
        ("odd", '[]\n5\nnull\n{"loss": 1}\n{"step": null, "loss": 1}\n'),
        ("overflow", '{"step": 3, "loss": 1e999, "mfu": true}\n'),
        ("zero", '{"step": 0, "loss": 0.0, "grad_norm": 0, "learning_rate": 0}\n'),
        ("negative", '{"step": 1, "loss": -1.5}\n{"step": 2, "loss": -1e30}\n'),
        ("huge", '{"step": 1, "loss": 1' + "0" * 400 + "}\n"),
    ],
)
def test_page_is_whole_with_poor_metrics(tmp_path, name, content):
    (tmp_path / "metrics.jsonl").write_text(content)
    (tmp_path / "environment.json").write_text("[broken")
    (tmp_path / "config.yaml").write_text("a: [unclosed")
    page = _Page(write_report(tmp_path))
    assert tmp_path.name in page.text
    coordinates = re.findall(r' d="([^"]*)"', page.source)
    assert not [d for d in coordinates if "nan" in d or "inf" in d]


def test_page_without_any_file(tmp_path):
    page = _Page(write_report(tmp_path))
    assert tmp_path.name in page.text and "no metrics logged yet" in page.text


def test_single_point_is_a_dot(tmp_path):
    page = _write(tmp_path / "run", [_line(7)])
    assert "lone" in page.source and "h0.01" in page.source
    assert page.chart("train")["curves"][0]["values"] == [4.93]


def test_gap_breaks_the_line(tmp_path):
    page = _write(tmp_path / "run", [_line(s, loss="NaN" if s == 3 else 2.0 + s) for s in range(1, 6)])
    (path,) = re.findall(r'class="line first" d="([^"]*)"', page.source.split("</figure>")[0])
    assert path.count("M") == 2
    assert page.chart("train")["curves"][0]["values"] == [3.0, 4.0, None, 6.0, 7.0]


@pytest.mark.longer
def test_long_run_stays_small_and_keeps_its_peaks(tmp_path):
    rng = np.random.default_rng(0)
    noise = rng.normal(size=100_000)
    lines = [
        {"step": s, "loss": 3 + 0.1 * noise[s], "grad_norm": 99.5 if s == 54321 else 1.0, "mfu": 0.4}
        for s in range(100_000)
    ]
    page = _write(tmp_path / "run", lines, environment={"schedule": [[s, s * 1e-8] for s in range(100_000)]})
    assert len(page.source) < 2_000_000
    norms = page.chart("norm")["curves"][0]
    assert max(norms["values"]) == 99.5 and norms["steps"][norms["values"].index(99.5)] == 54321
    assert norms["steps"][0] == 0 and norms["steps"][-1] == 99_999


def test_downsample_keeps_extremes_in_order():
    values = np.sin(np.arange(10_000) / 7.0)
    values[1234], values[8765] = 50, -50
    thin = downsample(make_series(enumerate(values)), buckets=100)
    assert thin.steps.size <= 202 and np.all(np.diff(thin.steps) > 0)
    assert {1234.0, 8765.0, 0.0, 9999.0} <= set(thin.steps)
    assert np.array_equal(thin.values, values[thin.steps.astype(int)])


def test_series_of_a_file_with_evaluations(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 2, "loss": 1}\n{"step": 1, "loss": 2}\n{"step": 2, "eval_loss": "NaN"}\n')
    series = read_metrics(path)
    assert series["loss"].steps.tolist() == [1, 2] and series["loss"].last == 1
    assert series["eval_loss"].last is None and series["eval_loss"].values.size == 1


def test_smoothing_neither_lags_nor_shifts():
    line = make_series((s, 2.0 * s) for s in range(500))
    assert np.allclose(smooth(line).values, line.values)
    noisy = make_series((s, (-1.0) ** s if s != 300 else math.nan) for s in range(500))
    smoothed = smooth(noisy).values
    assert np.isnan(smoothed[300]) and np.nanmax(np.abs(smoothed[50:450])) < 0.2


def test_ticks_are_round_and_inside():
    assert linear_ticks(0, 10) == (0, 2, 4, 6, 8, 10)
    assert linear_ticks(2.1, 2.9) == (2.2, 2.4, 2.6, 2.8)
    assert log_ticks(0.5, 2000) == (1, 10, 100, 1000)
    assert log_ticks(0.15, 2.5) == pytest.approx((0.2, 0.5, 1, 2))
    assert step_axis(0, 3).ticks == (0, 1, 2, 3)
    rates = value_axis(np.array([0, 3e-4]), from_zero=True)
    assert [label for _, label in rates.labelled_ticks()] == ["0", "0.0001", "0.0002", "0.0003"]
    speeds = value_axis(np.array([1200.0, 1800.0]))
    assert [label for _, label in speeds.labelled_ticks()] == ["1.2k", "1.4k", "1.6k", "1.8k"]


def test_scale_follows_the_data():
    wide = np.array([0.01, 50.0])
    narrow = np.array([2.0, 11.0])
    assert value_axis(wide).log and not value_axis(narrow).log
    assert not value_axis(wide, from_zero=True).log and value_axis(narrow, "log").log
    assert not value_axis(np.array([0.0, 50.0])).log
    assert value_axis(narrow, from_zero=True).low == 0


def test_the_schedule_of_a_pipeline_is_drawn(tmp_path):
    spans = [[0, 0.0, 1.0, "F", 0, 0], [1, 1.0, 2.0, "F", 0, 0], [1, 2.0, 4.0, "B", 0, 0], [0, 4.0, 6.0, "B", 0, 1]]
    pipeline = {"schedule": "1f1b", "stages": 2, "bubble_of_work": 0.5, "spans": spans}
    _write(tmp_path / "run", [{"step": 1, "loss": 1.0}], environment={"ran": {"pipeline": pipeline}})
    page = _Page(write_report(tmp_path / "run"))
    assert page.tags.count("title") == 1 + len(spans)
    assert "backward, microbatch 0, chunk 1: 4.0 to 6.0" in page.text
    assert "stage 1" in page.text and "weight gradients" not in page.text
    assert page.attributes.count(("class", "idle")) == 2
    assert "spans" not in page.text, "drawn, not listed"
