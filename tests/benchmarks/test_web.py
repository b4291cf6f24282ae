"""Rows of the page's benchmark, and the arguments that it refuses."""

import sys

import pytest

from benchmarks.serving import web
from scripts.pages.export import run_table


def one(ids, prompt, token, logits):
    return {"ids": ids, "promptMs": prompt, "tokenMs": token, "logits": logits}


FOUND = {
    "page": [one([1, 2], 4.0, 1.0, [0.5, 0.0]), one([1, 2], 3.0, 2.0, [0.5, 0.0])],
    "graph": [one([1, 2], 9.0, 8.0, [0.5, 0.25]), one([1, 2], 12.0, 9.0, [0.5, 0.25])],
}


def test_rows_have_the_best_round_of_each_side():
    rows = web.model_rows(FOUND, {"page": 5000.0, "graph": 50.0})
    times = {(row["work"].split()[0], row["side"]): row["milliseconds"] for row in rows}
    assert times["prompt", "page"] == 3 and times["prompt", "graph"] == 9
    assert times["one", "page"] == 1 and times["one", "graph"] == 8
    assert {row["difference"] for row in rows if "difference" in row} == {0.25}


def test_other_tokens_are_no_result():
    other = {**FOUND, "graph": [one([1, 3], 9.0, 8.0, [0.5, 0.25])]}
    with pytest.raises(SystemExit, match="different tokens"):
        web.model_rows(other, {"page": 1.0, "graph": 1.0})


def test_rate_of_a_product():
    rows = web.product_rows((128, 256, 1024), {"page": [2.0, 1.0], "graph": [4.0], "difference": 0.0, "title": "4 x 8"})
    assert [round(row["gflops"], 2) for row in rows] == [67.11, 16.78]
    assert [row["variant"] for row in rows] == ["4 x 8", None]


def test_a_folder_without_onnxruntime_is_one_message(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["web.py", "--run", "x", "--onnxruntime", str(tmp_path)])
    with pytest.raises(SystemExit):
        web.main()
    assert "npm install onnxruntime-web" in capsys.readouterr().err


def test_a_table_has_a_line_for_each_work():
    common = {"onnxruntime": "1.0", "date": "2026-11-23", "commit": "0123456789", "chromium": "1.2", "threads": 1}
    common |= {"cores": 2, "load": 0.5, "parameters": 1000, "command": "c"}
    rows = [{**common, **row} for row in web.model_rows(FOUND, {"page": 5000.0, "graph": 50.0})]
    made = run_table(rows)
    assert "| ready | 50 ms | 5.0 s | 0.0 |" in made
    assert "| prompt of 64 tokens | 9 ms | 3 ms | 3.0 |" in made and "differ by at most 2e-01" in made
