"""Tokenizers: lossless round trips, document-start ids that text cannot reach, saving."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Model

from jaxstack.data.load_tokenizer import load_tokenizer, read_tokenizer_file, train_bpe
from jaxstack.data.tokenizer import ByteTokenizer, SyntheticTokenizer, chunks
from jaxstack.errors import ConfigError, JaxstackError

TEXTS = [
    "def f(x):\n    return x + 1\n" * 20,
    "the quick brown fox\u2026 na\u00efve caf\u00e9 \U0001f600 " * 20,
]
BPE = train_bpe(TEXTS, 300)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["byte", "bpe"])
@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=200))
def test_round_trip_of_any_text(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32 and (ids != tokenizer.document_start).all()
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert tokenizer.byte_lengths[ids].sum() == len(text.encode())


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["byte", "bpe"])
def test_lone_surrogates_become_replacement_characters(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"


def test_document_start_stands_for_no_text():
    for tokenizer in (ByteTokenizer(), BPE):
        assert tokenizer.document_start == tokenizer.vocab_size - 1
        assert tokenizer.decode([tokenizer.document_start, *tokenizer.encode("hi")]) == "hi"


def test_bpe_training_is_deterministic_and_compresses():
    again = train_bpe(TEXTS, 300)
    assert again.hash == BPE.hash and BPE.vocab_size == 300
    assert len(BPE.encode(TEXTS[0])) < len(TEXTS[0]) / 2


def test_a_long_text_is_cut_without_loss():
    text = "word " * 60_000 + "x" * 300_000 + "\n\n" + "line\n" * 50_000
    assert "".join(chunks(text)) == text
    assert len(chunks(text)) > 4
    assert BPE.decode(BPE.encode(text)) == text


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE, SyntheticTokenizer(77)], ids=lambda t: t.kind)
def test_save_and_load(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "t")
    loaded = load_tokenizer(tmp_path / "t")
    assert loaded.hash == tokenizer.hash and loaded.vocab_size == tokenizer.vocab_size
    assert loaded.document_start == tokenizer.document_start
    np.testing.assert_array_equal(loaded.encode("some text"), tokenizer.encode("some text"))


def test_a_changed_model_is_noticed(tmp_path):
    BPE.save(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace('"add_prefix_space":false', '"add_prefix_space":true'))
    with pytest.raises(JaxstackError, match="not the one that was saved"):
        load_tokenizer(tmp_path)


def test_load_errors_name_the_place(tmp_path):
    with pytest.raises(JaxstackError, match="no tokenizer in"):
        load_tokenizer(tmp_path)
    (tmp_path / "jaxstack_tokenizer.json").write_text('{"kind": "magic"}')
    with pytest.raises(JaxstackError, match="unknown kind of tokenizer 'magic'"):
        load_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="no tokenizer file"):
        read_tokenizer_file(str(tmp_path / "missing.json"))
    (tmp_path / "run" / "tokenizer").mkdir(parents=True)
    with pytest.raises(ConfigError, match="run/tokenizer; give that folder"):
        read_tokenizer_file(str(tmp_path / "run"))
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"bad\.json is not a tokenizer"):
        read_tokenizer_file(str(tmp_path / "bad.json"))


def byte_level_file(path, special):
    model = Model(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    from tokenizers import trainers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=280, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    model.train_from_iterator(TEXTS, trainer)
    model.enable_truncation(5)
    model.save(str(path))
    return model


def test_special_tokens_in_a_text_stay_text(tmp_path):
    model = byte_level_file(tmp_path / "t.json", ["<|endoftext|>", "<|other|>"])
    tokenizer = read_tokenizer_file(str(tmp_path / "t.json"))
    assert tokenizer.document_start == model.token_to_id("<|endoftext|>")
    text = "before <|endoftext|> and <|other|> after, longer than the truncation of the file"
    ids = tokenizer.encode(text)
    special = {model.token_to_id("<|endoftext|>"), model.token_to_id("<|other|>")}
    assert not special & set(ids.tolist())
    assert tokenizer.decode(ids) == text
    tokenizer.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").hash == tokenizer.hash


def test_document_start_can_be_named_or_is_added(tmp_path):
    model = byte_level_file(tmp_path / "t.json", ["<|other|>"])
    named = read_tokenizer_file(str(tmp_path / "t.json"), "<|other|>")
    assert named.document_start == model.token_to_id("<|other|>") and named.vocab_size == 280
    added = read_tokenizer_file(str(tmp_path / "t.json"))
    assert added.document_start == 280 and added.vocab_size == 281
    with pytest.raises(ConfigError, match=r"no special token '<\|othr\|>'; did you mean '<\|other\|>'"):
        read_tokenizer_file(str(tmp_path / "t.json"), "<|othr|>")


def test_the_bos_token_of_the_files_opens_documents(tmp_path):
    model = byte_level_file(tmp_path / "tokenizer.json", ["<|other|>", "<begin of sentence>", "</s>"])
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<begin of sentence>"}')
    found = read_tokenizer_file(str(tmp_path))
    assert (found.document_start, found.vocab_size) == (model.token_to_id("<begin of sentence>"), 280)


def test_the_eos_token_of_the_files_opens_documents_where_no_other_token_does(tmp_path):
    model = byte_level_file(tmp_path / "tokenizer.json", ["<|other|>", "<end of sentence>"])
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end of sentence>"}')
    assert read_tokenizer_file(str(tmp_path)).document_start == model.token_to_id("<end of sentence>")


def test_a_vocabulary_that_is_not_byte_level(tmp_path):
    vocabulary = [("<unk>", 0.0), ("<s>", 0.0), ("\u2581", -3.0)]
    vocabulary += [(w, -2.0) for w in ("\u2581hello", "\u2581world", "o", "w", "r", "l", "d")]
    model = Model(models.Unigram(vocabulary, unk_id=0, byte_fallback=False))
    model.normalizer = normalizers.NFKC()
    model.pre_tokenizer = pre_tokenizers.Metaspace()
    model.decoder = decoders.Metaspace()
    model.add_special_tokens([AddedToken("<s>", special=True)])
    model.save(str(tmp_path / "u.json"))
    tokenizer = read_tokenizer_file(str(tmp_path / "u.json"))
    assert tokenizer.document_start == 1
    ids = [1, *tokenizer.encode("hello world"), 1, *tokenizer.encode("world")]
    assert tokenizer.decode(ids) == "hello worldworld"


def test_ids_outside_of_the_vocabulary_are_refused():
    for tokenizer in (ByteTokenizer(), BPE):
        with pytest.raises(JaxstackError, match="outside of this tokenizer's vocabulary"):
            tokenizer.decode([tokenizer.vocab_size])
