"""Forecasts of mixtures of experts: rows as the sublayer lays them out, and times beside the measured ones."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxstack.cost_model.cluster import cluster_of_devices, parse_cluster
from jaxstack.cost_model.forecast import LayoutModel, forecast
from jaxstack.cost_model.layouts import layout_table_of
from jaxstack.cost_model.routed_experts import RoutedExperts
from jaxstack.models.moe.exchange import count_buffer_rows
from jaxstack.run_config import load_config
from pallas_kernels.fp8.blockwise import BLOCK
from pallas_kernels.grouped_gemm.groups import aligned_rows

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
MIXTURES = ("qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v2-lite", "qwen3-next-80b-a3b")


def measured_rows():
    """Return the newest measured steps of ours of each work of a mixture of experts."""
    found = {}
    for script in ("train_step", "planner"):
        for line in (RESULTS / f"{script}.jsonl").read_text().splitlines():
            row = json.loads(line)
            if row["implementation"] == "jaxstack" and "milliseconds" in row and row["work"].startswith(MIXTURES):
                found[row["work"], row.get("variant"), row["devices"]] = row
    return list(found.values())


ROWS = measured_rows()


def config_of(*overrides):
    return load_config(None, ["train.sequence_length=4096", *overrides], report=lambda _: None)


def routed(config):
    layouts = layout_table_of(config)
    model = LayoutModel(config, parse_cluster(f"{int(layouts['expert'][0])} h200"))
    return RoutedExperts(model.shape, layouts, model.time.tokens)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['work']}, {row.get('variant')}".replace(" ", "_"))
def test_steps_within_ten_percent_of_the_measured_ones(row):
    config = load_config(None, row["overrides"], report=lambda _: None)
    cluster = cluster_of_devices(row["device"], row["devices"], one_host=True)
    assert cluster is not None
    assert 1e3 * forecast(config, cluster).step_seconds == pytest.approx(row["milliseconds"], rel=0.1)


def test_rows_of_steps_were_found():
    assert len(ROWS) >= 19
    assert any("precision.fp8=current" in row["overrides"] for row in ROWS)
    assert any("parallel.expert=2" in row["overrides"] for row in ROWS)


@pytest.mark.parametrize("devices", [1, 2])
def test_stored_rows_are_those_of_the_sublayer(devices):
    config = config_of("model.preset=qwen3-30b-a3b", "train.global_batch_size=4", f"parallel.expert={devices}")
    moe = config.model.moe
    assert moe is not None
    assignments = 4 * 4096 // devices * moe.num_experts_per_tok
    slots = devices * count_buffer_rows(assignments, devices, moe.exchange_factor, assignments)
    rows = assignments if devices == 1 else slots
    expected = aligned_rows(rows, moe.num_experts // devices, BLOCK)
    assert routed(config).stored[0] == pytest.approx(expected, abs=BLOCK)


def test_computed_rows_are_those_of_random_routing():
    config = config_of("model.preset=qwen3-30b-a3b", "train.global_batch_size=4")
    assignments = 4 * 4096 * 8
    sizes = np.random.default_rng(0).multinomial(assignments, np.full(128, 1 / 128), size=20)
    computed = (-(-sizes // BLOCK) * BLOCK).sum(axis=1).mean()
    assert routed(config).computed[0] == pytest.approx(computed, rel=0.005)


def test_widths_are_padded_for_fp8():
    plain = routed(config_of("model.preset=qwen3-30b-a3b", "train.global_batch_size=4"))
    padded = routed(config_of("model.preset=gpt-oss-20b", "train.global_batch_size=4"))
    assert plain.padded == 1
    assert padded.padded == (2944 / 2880) ** 2
    assert padded.weight_bytes - plain.weight_bytes == 8
