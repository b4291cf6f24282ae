"""The server under load: mixed requests, cancellations, malformed bodies and slow readers, of which nothing stays."""

import json

import pytest

from benchmarks.serving.soak import soak
from tests.word_models import make_byte_model

pytest.importorskip("uvicorn")
pytest.importorskip("llguidance")

SETTINGS = ("engine.slots=8", "engine.queue=8", "engine.pages=120", "engine.chunk=64", "parallel.tensor=1")
"""Few places and pages, so that requests are refused and preempted."""


@pytest.mark.exhaustive
def test_a_server_under_load_answers_all_and_keeps_nothing(tmp_path):
    """`benchmarks/serving/soak.py` does the same for ten minutes."""
    model = make_byte_model("llama", tmp_path / "llama")
    config = model / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 512}))
    row, failures = soak(str(model), 40, 20, 200, settings=SETTINGS)
    assert failures == []
    kinds = ("whole", "stream", "cancelled", "slow", "malformed", "cut_off", "embeddings")
    assert all(row[kind] > 0 for kind in kinds) and row["status_200"] > 0 and row["status_400"] > 0
