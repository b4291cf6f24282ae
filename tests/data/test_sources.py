"""Sources of every format, and the errors that name what to do."""

import dataclasses
import gzip
import json
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from jaxstack.data.build_shards import BuildOptions, prepare_tokens
from jaxstack.data.config import SourceConfig
from jaxstack.data.prepared_folders import is_prepared
from jaxstack.data.shards import describe_altered_inputs, open_split
from jaxstack.data.tokenization_plan import make_plan, source_files
from jaxstack.data.tokenize_documents import UnitResult, read_split_documents
from jaxstack.data.tokenizer import ByteTokenizer
from jaxstack.errors import ConfigError

TEXTS = ["first text\n", "second, with \u00fcmlaut", "third\nof three lines\n"]


def documents(path, tmp_path, fraction=0.0, split="train", **options):
    """The texts that a source gives, read back from its shards."""
    source = SourceConfig(path=str(path), **options)
    folder = tmp_path / "out"
    index = prepare_tokens([source], folder, ByteTokenizer(), fraction, BuildOptions(shard_tokens=1024))
    stream = open_split(folder, index, split)
    ids = stream.read(0, stream.tokens)
    assert not ids.size or ids[0] == 256
    return [ByteTokenizer().decode(d) for d in np.split(ids, np.flatnonzero(ids == 256))[1:]], index


def jsonl(key="text"):
    return "".join(json.dumps({key: t, "id": i}) + "\n" for i, t in enumerate(TEXTS)).encode()


def write_format(folder, name):
    path = folder / name
    if name.endswith(".parquet"):
        pq.write_table(pa.table({"text": TEXTS, "n": [1, 2, 3]}), path, row_group_size=2)
    else:
        pack = {"gz": gzip.compress, "zst": zstandard.compress}.get(name.rsplit(".", 1)[-1], lambda b: b)
        path.write_bytes(pack(jsonl()))
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.ndjson"])
def test_formats_give_the_same_documents(name, tmp_path):
    assert documents(write_format(tmp_path, name), tmp_path)[0] == TEXTS


def test_directories_and_globs_read_text_in_sorted_order(tmp_path):
    root = tmp_path / "in"
    for name in (
        "b/two.md",
        "a/one.txt",
        "c.py",
        "a/deep/zero.txt",
        ".hidden/no.txt",
        "b/__pycache__/no.txt",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / "picture.png").write_bytes(b"\x89PNG\0\0")
    found, index = documents(root, tmp_path)
    assert found == ["a/deep/zero.txt", "a/one.txt", "b/two.md", "c.py"] and index["skipped_files"] == 1
    assert [f.name.split("/in/")[1] for f in source_files(SourceConfig(path=f"{root}/a/**/*.txt"))] == [
        "a/deep/zero.txt",
        "a/one.txt",
    ]


def test_urls_are_read_through_fsspec(tmp_path):
    import fsspec

    system = fsspec.filesystem("memory")
    system.pipe("/corpus/a.jsonl", jsonl())
    system.pipe("/corpus/b.txt", b"plain")
    assert documents("memory://corpus/a.jsonl", tmp_path)[0] == TEXTS
    assert documents("memory://corpus/*.txt", tmp_path / "2")[0] == ["plain"]
    assert documents("memory://corpus", tmp_path / "3")[0] == [*TEXTS, "plain"]
    with pytest.raises(ConfigError, match="matches no file"):
        source_files(SourceConfig(path="memory://corpus/none.txt"))
    with pytest.raises(ConfigError, match="cannot list the data source 'nosuch://x'"):
        source_files(SourceConfig(path="nosuch://x"))


def test_invalid_utf8_is_replaced_and_counted(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9 and na\xefve \xef\xbf\xbd")
    found, index = documents(path, tmp_path)
    assert found == ["caf\ufffd and na\ufffdve \ufffd"] and index["replaced_characters"] == 2


def test_byte_order_marks_are_left_out(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbftext")
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + jsonl())
    assert documents(tmp_path / "a.txt", tmp_path)[0] == ["text"]
    assert documents(tmp_path / "b.jsonl", tmp_path / "2")[0] == TEXTS


def test_empty_and_null_texts_are_left_out(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": ""}\n\n{"text": null}\n{"text": "x"}\n')
    found, index = documents(path, tmp_path)
    assert found == ["x"] and index["splits"]["train"]["documents"] == 1
    assert index["empty_documents"] == 2
    table = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["x", None, ""]}), table)
    found, index = documents(table, tmp_path / "table")
    assert found == ["x"] and index["empty_documents"] == 2


@pytest.mark.parametrize("name, way_out", [("a.csv", "convert to jsonl"), ("a.json.gz", "set format=jsonl")])
def test_records_that_are_read_as_text_are_told(name, way_out, tmp_path):
    content = b'{"text": "x"}\n' if ".json" in name else b"id,text\n1,x\n"
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    (note,) = describe_altered_inputs(documents(tmp_path / name, tmp_path / "auto")[1])
    assert note.startswith(f"1 {name[1:].removesuffix('.gz')} file was read as plain text") and way_out in note
    assert describe_altered_inputs(documents(tmp_path / name, tmp_path / "text", format="text")[1]) == []


def test_text_in_utf_16_is_called_so(tmp_path):
    path = tmp_path / "wide.txt"
    path.write_text("a text of some length", encoding="utf-16")
    with pytest.raises(ConfigError, match=r"wide\.txt is UTF-16; convert it: iconv"):
        documents(path, tmp_path)
    records = path.with_suffix(".jsonl")
    records.write_text('{"text": "a"}\n', encoding="utf-16")
    with pytest.raises(ConfigError, match=r"wide\.jsonl is UTF-16"):
        documents(records, tmp_path)
    (tmp_path / "in").mkdir()
    path.rename(tmp_path / "in" / "wide.txt")
    (tmp_path / "in" / "plain.txt").write_text("plain")
    found, index = documents(tmp_path / "in", tmp_path)
    assert found == ["plain"] and index["skipped_files"] == 1


def test_a_link_that_leads_nowhere_is_called_so(tmp_path):
    link = tmp_path / "corpus.txt"
    link.symlink_to(tmp_path / "gone.txt")
    for place in (link, tmp_path):
        with pytest.raises(ConfigError, match=r"corpus\.txt is a link to .*gone\.txt, which does not exist"):
            documents(place, tmp_path)


def test_pipes_are_told_and_left_out_of_folders(tmp_path):
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(ConfigError, match=r"a\.txt' is a pipe or a device"):
        documents(tmp_path / "a.txt", tmp_path)
    (tmp_path / "b.txt").write_text("text")
    assert documents(tmp_path, tmp_path)[0] == ["text"]


def test_linked_folders_are_read_once(tmp_path):
    data = tmp_path / "data"
    (data / "inner").mkdir(parents=True)
    (tmp_path / "other" / "deep").mkdir(parents=True)
    (data / "a.txt").write_text("one")
    (data / "inner" / "b.txt").write_text("two")
    (tmp_path / "other" / "c.txt").write_text("three")
    (tmp_path / "other" / "deep" / "d.txt").write_text("four")
    for name, target in {"part": "other", "again": "other", "around": ".", "in": "data/inner"}.items():
        (data / name).symlink_to(tmp_path / target)
    (tmp_path / "other" / "back").symlink_to(data)
    assert sorted(documents(data, tmp_path)[0]) == ["four", "one", "three", "two"]
    for number, pattern in enumerate(("**/*.txt", "**")):
        assert sorted(documents(data / pattern, tmp_path / str(number))[0]) == ["four", "one", "three", "two"], pattern
    assert sorted(documents(data / "*" / "**" / "[bc].txt", tmp_path / "several")[0]) == ["three", "two"]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_a_pointer_of_git_lfs_is_no_text(name, tmp_path):
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 12345\n")
    with pytest.raises(ConfigError, match=r"a\.\w+.* is a pointer of Git LFS in place of the file: git lfs pull"):
        documents(tmp_path, tmp_path / "out")


def test_a_glob_below_a_directory_with_brackets(tmp_path):
    for name in ("part[1]", "part1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(name)
    assert documents(tmp_path / "part[1]" / "*.txt", tmp_path / "out")[0] == ["part[1]"]
    assert documents(tmp_path / "part[1]*" / "*.txt", tmp_path / "all")[0] == ["part1"]


def test_a_parquet_column_is_found_by_its_whole_name(tmp_path):
    table = pa.table({"text": pa.array([{"x": "wrong"}] * 4), "text.x": pa.array(["right"] * 4)})
    pq.write_table(table, tmp_path / "d.parquet")
    assert documents(tmp_path / "d.parquet", tmp_path, text_key="text.x")[0] == ["right"] * 4


def test_a_zst_file_with_a_long_window_is_read(tmp_path):
    settings = zstandard.ZstdCompressionParameters.from_level(3, window_log=28)
    packer = zstandard.ZstdCompressor(compression_params=settings).compressobj()
    (tmp_path / "d.jsonl.zst").write_bytes(packer.compress(jsonl()) + packer.flush())
    assert documents(tmp_path / "d.jsonl.zst", tmp_path)[0] == TEXTS


def test_text_keys(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl("body"))
    assert documents(path, tmp_path, text_key="body")[0] == TEXTS
    with pytest.raises(ConfigError, match=r"line 1 has no key 'text'; its keys: 'body', 'id'"):
        documents(path, tmp_path / "2")
    with pytest.raises(ConfigError, match="'id' is int, not a string"):
        documents(path, tmp_path / "3", text_key="id")
    table = write_format(tmp_path, "a.parquet")
    with pytest.raises(ConfigError, match=r"no column 'body'; its columns: 'text', 'n'"):
        documents(table, tmp_path / "4", text_key="body")
    with pytest.raises(ConfigError, match=r"column 'n' holds int64"):
        documents(table, tmp_path / "5", text_key="n")


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
@pytest.mark.parametrize("damage", ["cut off", "not of this format"])
def test_broken_files_are_named(name, damage, tmp_path):
    path = write_format(tmp_path, name)
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) - 9] if damage == "cut off" else b"this is not it" * 20)
    with pytest.raises(ConfigError, match=f"{name}.*(broken|whole|cannot read)"):  # exit code 2: not tried again
        documents(path, tmp_path)


def test_broken_json_names_the_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl() + b"{broken\n")
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 4 is not JSON: .* at character 2$"):
        documents(path, tmp_path)
    path.write_bytes(jsonl() + b'{"text": "abc"\n')
    with pytest.raises(ConfigError, match=r"line 4 is not JSON: .*; the line is cut off$"):
        documents(path, tmp_path / "3")
    path.write_bytes(b"[1]\n")
    with pytest.raises(ConfigError, match="JSON list, not an object"):
        documents(path, tmp_path / "2")


def test_a_missing_path_names_the_nearest(tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "text.txt").write_text("x")
    for path in (f"{tmp_path}/corpsu/text.txt", f"{tmp_path}/corpsu/*.txt"):
        with pytest.raises(ConfigError, match=f"nearest existing path is {tmp_path}; did you mean '{tmp_path}/corpus'"):
            make_plan([SourceConfig(path=path)], 0.0)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no files"):
        make_plan([SourceConfig(path=str(tmp_path / "empty"))], 0.0)


def test_a_binary_file_named_as_text_is_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\0\1\2")
    with pytest.raises(ConfigError, match="is not text"):
        documents(tmp_path / "a.txt", tmp_path)


@pytest.mark.parametrize("name", ["long.txt", "long.jsonl"])
@pytest.mark.parametrize("fraction", [0.0, 0.1])
def test_long_files_are_cut_without_loss(name, fraction, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxstack.data.tokenization_plan.UNIT_BYTES", 2000)
    lines = [f"line {i} \u00e9\u00e9\u00e9 " + "x" * (i % 50) for i in range(1000)]
    path = tmp_path / name
    text = "\n".join(lines)
    path.write_text(text if name == "long.txt" else "".join(json.dumps({"text": t}) + "\n" for t in lines))
    assert len(make_plan([SourceConfig(path=str(path))], fraction).units) > 10
    train, _ = documents(path, tmp_path, fraction)
    held_out, _ = documents(path, tmp_path, fraction, "held_out")
    if name == "long.txt":
        assert "".join(train + held_out) == text and len(train) == 1 and len(held_out) == (fraction > 0)
        assert 0.89 < len(train[0]) / len(text) <= 1 and (fraction or train == [text])
    else:
        assert sorted(train + held_out) == sorted(lines)
        assert (len(held_out) > 50) == (fraction > 0)


def test_a_single_document_is_split_inside(tmp_path):
    path = tmp_path / "one.txt"
    path.write_text("".join(f"line {i}\n" for i in range(500)))
    train, index = documents(path, tmp_path, 0.1)
    held_out, _ = documents(path, tmp_path, 0.1, "held_out")
    assert train[0] + held_out[0] == path.read_text() and held_out[0].startswith("line ")
    assert index["sources"][0]["split"] == "inside documents"


def test_equal_texts_never_stand_on_both_sides(corpus, tmp_path):
    folder = tmp_path / "twice"
    for i, p in enumerate(sorted(corpus.iterdir())):
        (folder / str(i)).mkdir(parents=True)
        for name in ("a.txt", "b.txt"):
            (folder / str(i) / name).write_bytes(p.read_bytes())
    train, _ = documents(folder, tmp_path, 0.2)
    held_out, _ = documents(folder, tmp_path, 0.2, "held_out")
    assert held_out and not set(train) & set(held_out) and len(train) + len(held_out) == 480


def test_the_standard_library_is_its_sources_and_documentation():
    names = [f.name for f in source_files(SourceConfig())]
    assert names[-1] == "pydoc_data/topics" and names[:-1] == sorted(names[:-1])
    assert "argparse.py" in names and "json/decoder.py" in names
    assert not [n for n in names if n.startswith("test/") or "site-packages" in n or "__pycache__" in n]


def test_prepared_directories_and_synthetic_are_no_text(corpus, tmp_path):
    documents(corpus, tmp_path)
    with pytest.raises(ConfigError, match="holds prepared token shards"):
        make_plan([SourceConfig(path=str(tmp_path / "out"))], 0.0)
    with pytest.raises(ConfigError, match="needs no preparation"):
        make_plan([SourceConfig(path="synthetic")], 0.0)


def test_each_kind_of_file_of_the_standard_library_holds_out_the_same_share():
    plan = make_plan((SourceConfig(),), 0.05)
    assert plan.sources[0]["split"] == "inside documents"
    sizes = {}
    for unit in plan.units:
        for piece in unit.pieces:
            alone = dataclasses.replace(unit, pieces=(piece,))
            for split, text, _, _ in read_split_documents(alone, UnitResult("")):
                parts = piece.file.name.split("/")
                found = sizes.setdefault(parts[0] if len(parts) > 1 else "top", {"train": 0, "held_out": 0})
                found[split] += len(text)
    large = {kind: found for kind, found in sizes.items() if sum(found.values()) > 100_000}
    assert {"top", "encodings", "asyncio", "pydoc_data"} <= large.keys()
    shares = {kind: found["held_out"] / sum(found.values()) for kind, found in large.items()}
    assert all(0.04 < share < 0.055 for share in shares.values()), shares


def test_a_folder_of_texts_may_hold_an_index_of_something_else(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("text")
    for content, prepared in (('{"x": 1}', False), ("[1]", False), ('{"format": "jaxstack tok', True)):
        (tmp_path / "in" / "index.json").write_text(content)
        assert is_prepared(str(tmp_path / "in")) == prepared
    assert documents(tmp_path / "in", tmp_path)[0] == ["text", content]
