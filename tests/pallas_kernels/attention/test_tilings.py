"""Block sizes out of tables: which row wins, whose table stands first, and what a broken one says."""

import dataclasses
import json

import pytest

from pallas_kernels import lowering_platform
from pallas_kernels.attention import tiling_tables, tilings
from pallas_kernels.attention.masks import Mask
from pallas_kernels.attention.mosaic import HEAD_DIMS
from pallas_kernels.attention.tiling_tables import SHIPPED, VARIABLE, Row, load, merge, save
from pallas_kernels.attention.tilings import choose_tiling, kernels, mask_kind


@dataclasses.dataclass(frozen=True)
class Small:
    """Two kernels instead of those that there are."""

    forward_keys: int = tilings._block(128, 64)
    forward_stages: int = tilings._block(2, 3)
    backward_queries: int = tilings._block(64, 32)


@pytest.fixture
def shipped(monkeypatch, tmp_path):
    """Writes rows as the shipped table of two small kernels; no user's table."""
    monkeypatch.setattr(tilings, "Tiling", Small)
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def write(*rows):
        monkeypatch.setattr(tiling_tables, "SHIPPED", tmp_path / "shipped.json")
        save(tmp_path / "shipped.json", rows)

    return write


def forward(head_dim, keys, device="H200", **more):
    return Row(device, "forward", head_dim, {"keys": keys, "stages": 3}, **more)


def keys(head_dim=128, mask="causal", length=4096, device="NVIDIA H200"):
    return choose_tiling(head_dim, mask, length, device).forward_keys


def test_fields_are_grouped_by_kernel(shipped):
    assert kernels() == {"forward": {"keys": (128, 64), "stages": (2, 3)}, "backward": {"queries": (64, 32)}}


def test_defaults_where_no_row_has_room(shipped):
    shipped(forward(64, 16))
    assert choose_tiling(128, "causal", 4096, "NVIDIA H200") == Small()
    assert choose_tiling(64, "causal", 4096, "NVIDIA H200") == Small(16, 3, 64), "each kernel has rows of its own"


def test_the_nearest_wider_head_dim(shipped):
    shipped(forward(64, 1), forward(128, 2), forward(256, 3))
    assert [keys(h) for h in (32, 64, 80, 128, 192, 256, 300)] == [1, 1, 2, 2, 3, 3, 128]


@pytest.mark.parametrize(
    ("head_dim", "mask", "queries"),
    [
        (192, "causal", 64),
        (192, "full", 0),
        (256, "causal", 64),
        (256, "full", 64),
        (256, "windowed", 0),
        (256, "packed", 0),
    ],
)
def test_wide_heads_have_one_backward_kernel_where_it_was_faster(head_dim, mask, queries, monkeypatch, tmp_path):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert choose_tiling(head_dim, mask, 4096, "NVIDIA H200").fused_queries == queries


def test_device_then_mask_then_length(shipped):
    shipped(
        forward(128, 1),
        forward(128, 2, device="H100"),
        forward(128, 3, mask="causal", length=4096),
        forward(128, 4, mask="causal", length=32768),
        forward(128, 5, mask="packed"),
    )
    assert keys() == 3 and keys(length=100_000) == 4 and keys(length=16384) == 4
    assert keys(mask="packed") == 5
    assert keys(mask="full") == 1, "a row for any mask rather than one for another"
    assert keys(device="NVIDIA H100 80GB HBM3", mask="full") == 2
    assert keys(device="") == 3, "of an unknown device the best row of another"


def test_a_users_rows_stand_first_and_are_read_again_when_they_change(shipped, tmp_path, monkeypatch):
    shipped(forward(128, 1, mask="causal", length=4096))
    save(tmp_path / "cache" / "jaxstack" / "tilings.json", [forward(128, 2, mask="causal", length=1024)])
    assert keys() == 2, "also where the shipped row's length is nearer"
    assert keys(mask="full") == 2
    mine = tmp_path / "mine.json"
    monkeypatch.setenv(VARIABLE, str(mine))
    with pytest.raises(ValueError, match=r"JAXSTACK_TILINGS names .*mine.json, which is not a file.*kernels.tune"):
        keys()
    save(mine, [forward(128, 3)])
    assert keys() == 1, "a row for this mask rather than a user's for any"
    save(mine, [forward(128, 44, mask="causal")])
    assert keys() == 44


def test_rows_of_other_versions_are_passed_over(shipped):
    other = Row("H200", "forward", 128, {"keys": 7, "warps": 4})
    shipped(other, Row("H200", "sideways", 128, {"keys": 7}), forward(128, 5))
    assert keys() == 5


@pytest.mark.parametrize(
    "text",
    ["{", "{}7", '[{"device": "H200"}]', '[{"device": "H200", "kernel": "forward", "head_dim": 64, "blocks": 3}]'],
)
def test_a_broken_table_says_where(text, tmp_path):
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"broken.json"):
        load(path)


def test_sizes_must_be_numbers(tmp_path):
    path = tmp_path / "table.json"
    save(path, [forward(128, "64")])
    with pytest.raises(ValueError, match="are numbers, got"):
        load(path)


def test_merging_replaces_rows_of_the_same_key(tmp_path):
    old = [forward(128, 1), forward(128, 2, mask="causal"), forward(64, 3)]
    merged = merge(old, [forward(128, 9, measured="1 ms"), forward(128, 8, mask="causal", length=4096)])
    assert [(row.head_dim, row.mask, row.length, row.blocks["keys"]) for row in merged] == [
        (64, None, None, 3),
        (128, None, None, 9),
        (128, "causal", None, 2),
        (128, "causal", 4096, 8),
    ]
    path = tmp_path / "deep" / "table.json"
    save(path, merged)
    assert list(map(dataclasses.asdict, load(path))) == list(map(dataclasses.asdict, merged))
    assert path.parent.stat().st_mode & 0o77 == 0, "closed to others"
    assert len(path.read_text().splitlines()) == len(merged) + 2, "one row a line"


def test_the_shipped_table_is_of_this_version():
    names = {kernel: set(blocks) for kernel, blocks in kernels().items()}
    for row in load(SHIPPED):
        assert set(row.blocks) == names[row.kernel], row
        assert row.mask in (None, "causal", "full", "windowed", "packed"), row
    assert len({row.key for row in load(SHIPPED)}) == len(json.loads(SHIPPED.read_text())), "no key twice"
    wide = max(HEAD_DIMS)
    assert all(any(row.kernel == name and row.head_dim >= wide for row in load(SHIPPED)) for name in names)


def test_the_kinds_of_masks():
    assert mask_kind(Mask(), False) == "causal" and mask_kind(Mask(causal=False), False) == "full"
    assert mask_kind(Mask(window=4), False) == "windowed" and mask_kind(Mask(window=4), True) == "packed"


def test_the_device_is_unknown_where_it_is_only_declared():
    from pallas_kernels.target import device_kind

    assert device_kind() == "cpu"
    with lowering_platform("cuda"):
        assert device_kind() == ""
