"""The order of rows, resuming, mixtures, held-out passes, the cache."""

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest

from jaxstack.data.augmentations.fill_in_the_middle import FillInTheMiddle
from jaxstack.data.augmentations.token_dropout import TokenDropout
from jaxstack.data.batch_source import peek
from jaxstack.data.config import DataConfig, SourceConfig, TokenizerConfig
from jaxstack.data.loader import open_data
from jaxstack.data.read_batches import ParallelBatches, TrainingBatches
from jaxstack.data.tokenize_documents import token_file
from jaxstack.errors import ConfigError, JaxstackError

LENGTH = 32


def take(iterator, count):
    return list(itertools.islice(iterator, count))


def changed(config, **values):
    return config.model_copy(update=values)


def assert_batches_equal(left, right):
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            np.testing.assert_array_equal(a[key], b[key])


@pytest.fixture
def data(byte_config):
    opened = open_data(byte_config, sequence_length=LENGTH, seed=7)
    yield opened
    opened.close()


@pytest.mark.longer
def test_text_is_tokenized_alike_by_several_processes(byte_config, tmp_path, monkeypatch):
    started = []

    class Pool(ProcessPoolExecutor):
        def __init__(self, workers, **options):
            started.append(workers)
            super().__init__(workers, **options)

    monkeypatch.setattr("jaxstack.data.build_shards.ProcessPoolExecutor", Pool)
    monkeypatch.setattr("jaxstack.data.tokenization_plan.UNIT_BYTES", 2000)
    config = changed(byte_config, cache_dir=str(tmp_path))
    several = open_data(config, sequence_length=LENGTH, seed=7, workers=2)
    assert started and set(started) == {2}
    alone = open_data(changed(config, cache_dir=str(tmp_path / "alone")), sequence_length=LENGTH, seed=7)
    assert several.fingerprint == alone.fingerprint and several.train_tokens == alone.train_tokens


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_global_batches_do_not_depend_on_the_number_of_hosts(data, hosts):
    expected = take(data.batches(global_batch_size=8, rows=range(8), start=3), 5)
    rows = np.arange(8).reshape(hosts, -1)
    parts = [take(data.batches(global_batch_size=8, rows=r, start=3), 5) for r in rows]
    joined = [{k: np.concatenate([p[i][k] for p in parts]) for k in expected[0]} for i in range(5)]
    assert_batches_equal(joined, expected)


def test_any_rows_in_any_order(data):
    whole = next(data.batches(global_batch_size=8, rows=range(8), start=0))
    some = next(data.batches(global_batch_size=8, rows=[6, 1, 3], start=0))
    assert_batches_equal([some], [{k: v[[6, 1, 3]] for k, v in whole.items()}])


@pytest.mark.parametrize("start", [1, 13, 400])
def test_resuming_at_any_batch_is_exact(data, start):
    iterator = data.batches(global_batch_size=4, rows=range(4), start=0)
    for _ in range(start):
        next(iterator)
    assert_batches_equal(take(data.batches(global_batch_size=4, rows=range(4), start=start), 3), take(iterator, 3))


def test_sample_numbers_do_not_depend_on_the_batch_size(data):
    small = take(data.batches(global_batch_size=3, rows=range(3), start=0), 8)
    large = take(data.batches(global_batch_size=8, rows=range(8), start=0), 3)
    tokens = [np.concatenate([b["tokens"] for b in batches]) for batches in (small, large)]
    np.testing.assert_array_equal(*tokens)


@pytest.mark.longer
def test_an_epoch_reads_every_row_once_and_the_next_in_another_order(data):
    rows = data.rows_per_epoch[0]
    batches = take(data.batches(global_batch_size=1, rows=[0], start=0), 2 * rows)
    labels = [b["labels"].tobytes() for b in batches]
    assert sorted(labels[:rows]) == sorted(labels[rows:]) and labels[:rows] != labels[rows:]
    learnt = sum((b["labels"] != -100).sum() for b in batches[:rows])
    assert learnt == data.train_tokens - 1


def test_the_seed_decides_the_order(byte_config, data):
    same = open_data(byte_config, sequence_length=LENGTH, seed=7)
    other = open_data(byte_config, sequence_length=LENGTH, seed=8)
    ask = {"global_batch_size": 4, "rows": range(4), "start": 0}
    first = take(data.batches(**ask), 2)
    assert_batches_equal(take(same.batches(**ask), 2), first)
    assert any((a["tokens"] != b["tokens"]).any() for a, b in zip(take(other.batches(**ask), 2), first, strict=True))


def test_without_shuffle_rows_follow_the_stream(byte_config):
    data = open_data(changed(byte_config, shuffle=False), sequence_length=LENGTH, seed=7)
    tokens = np.concatenate([b["tokens"] for b in take(data.batches(global_batch_size=4, rows=range(4), start=0), 3)])
    np.testing.assert_array_equal(tokens.ravel()[:-1], data._train[0].read(0, 12 * LENGTH)[:-1])


def test_without_packing_documents_are_not_kept_apart(byte_config):
    data = open_data(changed(byte_config, packing=False), sequence_length=LENGTH, seed=7)
    assert sorted(next(data.batches(global_batch_size=2, rows=[0], start=0))) == ["labels", "tokens"]


@pytest.mark.longer
def test_an_epoch_smaller_than_a_batch_repeats(tmp_path, cache):
    (tmp_path / "a.txt").write_text("tiny text " * 10)
    config = DataConfig(
        sources=(SourceConfig(path=str(tmp_path / "a.txt")),), held_out_fraction=0,
        tokenizer=TokenizerConfig(name="byte"), cache_dir=str(cache),
    )  # fmt: skip
    data = open_data(config, sequence_length=40, seed=0)
    assert data.rows_per_epoch == (3,)
    assert next(data.batches(global_batch_size=16, rows=range(16), start=2))["tokens"].shape == (16, 40)
    assert list(data.held_out_batches(batch_size=2, rows=[0])) == [] and data.held_out_bytes() == b""


def test_mixtures_keep_their_weights_at_every_stretch(byte_config, corpus, other_corpus):
    sources = (SourceConfig(path=str(corpus), weight=1.0), SourceConfig(path=str(other_corpus), weight=3.0))
    data = open_data(changed(byte_config, sources=sources), sequence_length=LENGTH, seed=7)
    chosen = np.array([data._order[i][0] for i in range(4000)])
    for stretch in (slice(0, 100), slice(1000, 1400), slice(0, 4000)):
        assert abs(chosen[stretch].mean() - 0.75) < 0.02
    assert len({data._order[i] for i in range(400)}) == 400
    alone = open_data(changed(byte_config, sources=sources[:1]), sequence_length=LENGTH, seed=7)
    first = [row for source, row in (data._order[i] for i in range(400)) if source == 0]
    assert first == [alone._order[i][1] for i in range(len(first))]


@pytest.mark.parametrize("batch_size", [1, 5, 64])
@pytest.mark.parametrize("max_tokens", [None, 1, 100, 700])
def test_held_out_tokens_are_predicted_once_and_match_the_bytes(data, batch_size, max_tokens):
    batches = list(data.held_out_batches(batch_size=batch_size, rows=range(batch_size), max_tokens=max_tokens))
    labels = np.concatenate([b["labels"] for b in batches]).ravel()
    labels = labels[labels != -100]
    assert len(labels) == (max_tokens or data.held_out_tokens)
    assert data.tokenizer.decode_bytes(labels) == data.held_out_bytes(max_tokens)
    assert all(b["tokens"].shape == (batch_size, LENGTH) for b in batches)
    assert len(data.held_out_bytes()) > 100


def test_held_out_rows_of_several_hosts_make_up_the_whole(data):
    whole = list(data.held_out_batches(batch_size=4, rows=range(4)))
    halves = [list(data.held_out_batches(batch_size=4, rows=r)) for r in ([0, 1], [2, 3])]
    joined = [{k: np.concatenate([a[k], b[k]]) for k in a} for a, b in zip(*halves, strict=True)]
    assert_batches_equal(joined, whole)


def test_held_out_sources_and_limits(byte_config, other_corpus):
    held_out = (SourceConfig(path=str(other_corpus)),)
    data = open_data(changed(byte_config, held_out=held_out), sequence_length=LENGTH, seed=7)
    raw = data.held_out_bytes()
    assert len(raw) == sum(p.stat().st_size for p in other_corpus.iterdir())
    limited = open_data(changed(byte_config, held_out=held_out, held_out_max_bytes=999), sequence_length=LENGTH, seed=7)
    assert limited.held_out_bytes() == raw[: len(limited.held_out_bytes())]
    assert 900 < len(limited.held_out_bytes()) <= 999


def test_held_out_limits_are_shared_between_sources(byte_config, corpus, other_corpus):
    sources = (SourceConfig(path=str(corpus)), SourceConfig(path=str(other_corpus)))
    data = open_data(changed(byte_config, sources=sources), sequence_length=LENGTH, seed=7)
    assert len(data._held_out) == 2
    limits = data._held_out_limits(101)
    assert sum(limits) == 101 and min(limits) > 20


def test_the_fingerprint_is_json_and_tells_differences(byte_config, corpus, other_corpus):
    def fingerprint(length=LENGTH, seed=7, **values):
        data = open_data(changed(byte_config, **values), sequence_length=length, seed=seed)
        return json.loads(json.dumps(data.fingerprint))

    base = fingerprint()
    assert fingerprint() == base
    for other in (
        fingerprint(length=16),
        fingerprint(seed=8),
        fingerprint(packing=False),
        fingerprint(shuffle=False),
        fingerprint(sources=(SourceConfig(path=str(other_corpus)),)),
        fingerprint(held_out=(SourceConfig(path=str(other_corpus)),)),
        fingerprint(tokenizer=TokenizerConfig(name="bpe", vocab_size=300)),
    ):
        assert other != base


def test_bpe_is_trained_once_and_reused(byte_config):
    config = changed(byte_config, tokenizer=TokenizerConfig(name="bpe", vocab_size=320))
    said = []
    first = open_data(config, sequence_length=LENGTH, seed=0, report=said.append)
    assert any("training a BPE" in s for s in said) and any("tokenizing" in s for s in said)
    said.clear()
    second = open_data(config, sequence_length=LENGTH, seed=0, report=said.append)
    assert said == [] and second.fingerprint == first.fingerprint
    assert first.tokenizer.vocab_size == 320
    batch = next(first.batches(global_batch_size=2, rows=[0, 1], start=0))
    assert batch["tokens"].max() < 320


def test_prepared_directories_bring_their_tokenizer(byte_config, corpus, tmp_path):
    from jaxstack.data.build_shards import prepare_tokens
    from jaxstack.data.tokenizer import ByteTokenizer

    prepare_tokens([SourceConfig(path=str(corpus))], tmp_path / "p", ByteTokenizer(), 0.05)
    source = (SourceConfig(path=str(tmp_path / "p")),)
    data = open_data(DataConfig(sources=source), sequence_length=LENGTH, seed=7)
    raw = open_data(byte_config, sequence_length=LENGTH, seed=7)
    assert data.held_out_bytes() == raw.held_out_bytes() and data.train_tokens == raw.train_tokens
    with pytest.raises(ConfigError, match="prepared with a byte tokenizer of 257 ids, the configuration asks for bpe"):
        open_data(DataConfig(sources=source, tokenizer=TokenizerConfig(name="bpe")), sequence_length=LENGTH, seed=7)
    whole = DataConfig(sources=source, held_out=source)
    assert open_data(whole, sequence_length=LENGTH, seed=7).held_out_bytes() == raw.held_out_bytes()


def test_synthetic_ids_are_uniform_and_need_no_files(tmp_path):
    config = DataConfig(
        sources=(SourceConfig(path="synthetic"),), tokenizer=TokenizerConfig(vocab_size=300),
        cache_dir=str(tmp_path / "none"),
    )  # fmt: skip
    data = open_data(config, sequence_length=512, seed=1)
    batch = next(data.batches(global_batch_size=64, rows=range(64), start=0))
    counts = np.bincount(batch["tokens"].ravel(), minlength=300)
    assert counts[299] == 0 and counts[:299].min() > 60 and counts.max() < 170
    assert (batch["segment_ids"] == 1).all() and not (tmp_path / "none").exists()
    np.testing.assert_array_equal(batch["labels"][:, :-1], batch["tokens"][:, 1:])
    assert data.held_out_tokens > 0


def test_too_little_text_names_the_numbers(tmp_path, cache):
    (tmp_path / "a.txt").write_text("x" * 50)
    config = DataConfig(
        sources=(SourceConfig(path=str(tmp_path / "a.txt")),), tokenizer=TokenizerConfig(name="byte"),
        cache_dir=str(cache), held_out_fraction=0.2,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"has 41 training tokens, one row of sequence_length 64 needs 65"):
        open_data(config, sequence_length=64, seed=0)
    said = []
    data = open_data(config, sequence_length=32, seed=0, report=said.append)
    assert data.held_out_bytes() == b"x" * 10 and "held out are only 10 tokens" in said[-1]


def test_wrong_rows_and_starts_are_refused(data):
    for rows in ([], [4], [-1]):
        with pytest.raises(ConfigError, match="rows must lie in"):
            data.batches(global_batch_size=4, rows=rows, start=0)
    with pytest.raises(ConfigError, match="start is -1"):
        data.batches(global_batch_size=4, rows=[0], start=-1)


def test_damaged_cache_is_named(byte_config, tmp_path):
    config = changed(byte_config, cache_dir=str(tmp_path))
    open_data(config, sequence_length=LENGTH, seed=0)
    shard = next(tmp_path.glob("tokens/*/train-00001.bin"))
    os.truncate(shard, 11)
    with pytest.raises(JaxstackError, match=r"train-00001\.bin has 11 bytes"):
        open_data(config, sequence_length=LENGTH, seed=0)


def test_an_interrupted_cache_is_finished(byte_config, tmp_path, monkeypatch):
    config = changed(byte_config, cache_dir=str(tmp_path))
    monkeypatch.setattr("jaxstack.data.build_shards._Builder._write_held_out", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        open_data(config, sequence_length=LENGTH, seed=0)
    monkeypatch.undo()
    said = []
    data = open_data(config, sequence_length=LENGTH, seed=7, report=said.append)
    assert any("shards are kept" in s for s in said)
    assert data.fingerprint == open_data(byte_config, sequence_length=LENGTH, seed=7).fingerprint


def test_the_cache_is_private_and_refused_where_it_cannot_be(byte_config, tmp_path):
    open_data(changed(byte_config, cache_dir=str(tmp_path / "c")), sequence_length=LENGTH, seed=0)
    assert (tmp_path / "c").stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot make the data cache"):
        open_data(changed(byte_config, cache_dir=str(tmp_path / "file" / "c")), sequence_length=LENGTH, seed=0)


def test_two_openers_at_once_write_once(byte_config, tmp_path):
    config = changed(byte_config, cache_dir=str(tmp_path))
    said = []
    opened = []
    threads = [
        threading.Thread(target=lambda: opened.append(open_data(config, sequence_length=8, seed=0, report=said.append)))
        for _ in range(3)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(opened) == 3 and len([s for s in said if s.startswith("tokenizing")]) == 1


def test_closing_the_iterator_ends_its_threads(data):
    before = threading.active_count()
    iterator = data.batches(global_batch_size=4, rows=range(4), start=0)
    next(iterator)
    assert threading.active_count() > before
    iterator.close()
    end = time.monotonic() + 10
    while threading.active_count() > before:
        assert time.monotonic() < end
        time.sleep(0.001)


def test_a_peek_starts_no_worker(data):
    before = threading.active_count()
    ask = {"global_batch_size": 4, "rows": [1, 3]}
    first = peek(data, start=5, **ask)
    assert threading.active_count() == before
    assert_batches_equal([first], [next(data.batches(start=5, **ask))])


@pytest.mark.parametrize("threads", [1, 3, 16])
@pytest.mark.parametrize("start", [0, 7])
def test_batches_are_those_of_a_serial_reader_for_any_number_of_threads(byte_config, threads, start):
    config = changed(byte_config, read_threads=threads, read_ahead=5, augmentations=(FillInTheMiddle(),))
    data = open_data(config, sequence_length=LENGTH, seed=7)
    ask = {"global_batch_size": 4, "rows": [0, 2]}
    serial = [data.batch(k, **ask) for k in range(start, start + 12)]
    assert_batches_equal(take(data.batches(start=start, **ask), 12), serial)


@pytest.mark.exhaustive
@pytest.mark.longer
@pytest.mark.parametrize("processes", [2, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_batches_are_those_of_a_serial_reader_for_any_number_of_processes(byte_config, processes):
    config = changed(byte_config, read_processes=processes, read_threads=2, augmentations=(TokenDropout(),))
    data = open_data(config, sequence_length=LENGTH, seed=7)
    ask = {"global_batch_size": 4, "rows": range(4)}
    iterator = data.batches(start=5, **ask)
    assert_batches_equal(take(iterator, 9), [data.batch(k, **ask) for k in range(5, 14)])
    iterator.close()
    held_out = list(data.held_out_batches(batch_size=4, rows=range(4)))
    alone = open_data(byte_config, sequence_length=LENGTH, seed=7)
    assert_batches_equal(held_out, list(alone.held_out_batches(batch_size=4, rows=range(4))))


def test_a_slow_batch_delays_no_other_and_keeps_the_order(data, monkeypatch):
    stalled = threading.Event()
    read = []
    whole = TrainingBatches.__getitem__

    def slow(self, number):
        if number == 3:
            stalled.wait(10)
        read.append(number)
        return whole(self, number)

    monkeypatch.setattr(TrainingBatches, "__getitem__", slow)
    ask = {"global_batch_size": 4, "rows": range(4)}
    iterator = data.batches(start=0, **ask)
    first = take(iterator, 3)
    end = time.monotonic() + 10
    while len(read) < 3 + 31:  # all of read_ahead but the one that stalls
        assert time.monotonic() < end
        time.sleep(0.001)
    stalled.set()
    found = first + take(iterator, 37)
    assert_batches_equal(found, [data.batch(k, **ask) for k in range(40)])


def test_a_slow_function_is_called_for_many_steps_at_once():
    together = threading.Barrier(6, timeout=10)

    def read(step):
        if step < 10:
            together.wait()  # passes only if six calls are under way
        return {"x": np.full((4, 2), step)}

    source = ParallelBatches(read, threads=6, ahead=6)
    iterator = source.batches(global_batch_size=4, rows=[1, 3], start=4)
    found = take(iterator, 20)
    iterator.close()
    assert [int(batch["x"][0, 0]) for batch in found] == list(range(4, 24)) and found[0]["x"].shape == (2, 2)
    assert source.batch(12, global_batch_size=4, rows=[0])["x"].tolist() == [[12, 12]]


def test_a_program_ends_with_an_open_iterator_and_opens_no_socket(byte_config):
    program = f"""
import os
from jaxstack.data.augmentations.fill_in_the_middle import FillInTheMiddle
from jaxstack.data.augmentations.token_dropout import TokenDropout
from jaxstack.data.batch_source import peek
from jaxstack.data.config import DataConfig, SourceConfig, TokenizerConfig
from jaxstack.data.loader import open_data
from jaxstack.data.read_batches import ParallelBatches, TrainingBatches
config = DataConfig(sources=(SourceConfig(path={byte_config.sources[0].path!r}),), shard_tokens=10_000,
    tokenizer=TokenizerConfig(name="byte"), cache_dir={byte_config.cache_dir!r})
iterator = open_data(config, sequence_length=32, seed=0).batches(global_batch_size=4, rows=range(4), start=0)
next(iterator)
def target(fd):
    try:
        return os.readlink(f"/proc/self/fd/{{fd}}")
    except FileNotFoundError:  # the reader's threads close files meanwhile
        return ""
print("sockets", sum(target(fd).startswith("socket:") for fd in os.listdir("/proc/self/fd")))
"""
    environment = {**os.environ, "ENABLE_PYGRAIN_PROMETHEUS_TELEMETRY": "true"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.strip() == "sockets 0"


@pytest.mark.longer
def test_the_default_corpus(cache):
    said = []
    data = open_data(DataConfig(cache_dir=str(cache)), sequence_length=256, seed=0, report=said.append)
    assert data.tokenizer.vocab_size == 4096 and data.train_tokens > 2_000_000
    raw = data.held_out_bytes()
    assert 200_000 < len(raw) < 1_500_000 and len(raw) / data.held_out_tokens > 3
    assert b"def " in raw
    batch = next(data.batches(global_batch_size=8, rows=range(8), start=0))
    assert "self" in data.tokenizer.decode(batch["tokens"].ravel())


def test_token_files_have_the_unit_name(tmp_path):
    assert token_file(tmp_path / "unit-000001", "train").name == "unit-000001.train.bin"
