"""Text from tokens as they come: whole characters, spaces where they belong, stop strings wherever tokens cut them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Model
from tokenizers import decoders, models, pre_tokenizers

from jaxstack.data.load_tokenizer import SubwordTokenizer
from jaxstack.data.tokenizer import ByteTokenizer
from jaxstack.decoding.sampling import Sampling
from jaxstack.decoding.text_stream import TextGenerator, TextStream
from jaxstack.errors import ConfigError

BYTES = ByteTokenizer()


def word_tokenizer() -> SubwordTokenizer:
    """As those of Llama 2 and Gemma: words begin with a mark, unknown characters are bytes."""
    words = ["<unk>", "<s>", "▁", "▁Hello", "▁world", "▁the", "ly", ",", *(f"<0x{i:02X}>" for i in range(256))]
    model = Model(models.BPE({w: i for i, w in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.Metaspace()
    model.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return SubwordTokenizer(model, "file", 1)


def ids_of(*tokens: str) -> list[int]:
    vocabulary = word_tokenizer()._model.get_vocab()
    return [vocabulary[token] for token in tokens]


def pieces(stream: TextStream, ids) -> list[str]:
    found = []
    for token in ids:
        found.append(stream.push(int(token)))
        if stream.finish_reason is not None:
            return found
    return [*found, stream.finish()]


def test_a_character_comes_whole():
    found = pieces(TextStream(BYTES), BYTES.encode("aé→😀"))
    assert found == ["a", "", "é", "", "", "→", "", "", "", "😀", ""]


def test_bytes_that_are_no_character_are_marked_and_nothing_waits_for_ever():
    assert pieces(TextStream(BYTES), [0x61, 0xFF, 0x62, 0xE2, 0x82]) == ["a", "\ufffd", "b", "", "", "\ufffd"]


def test_words_keep_their_spaces_also_after_the_prompt():
    tokenizer = word_tokenizer()
    ids = ids_of("▁Hello", "▁world", ",", "▁the", "<0xC3>", "<0xA9>", "ly", "▁world")
    for cut in range(len(ids)):
        found = pieces(TextStream(tokenizer, ids[:cut]), ids[cut:])
        if cut != 5:  # there a character is cut between the prompt and the text
            assert tokenizer.decode(ids[:cut]) + "".join(found) == "Hello world, theély world"
    assert pieces(TextStream(tokenizer), ids) == ["Hello", " world", ",", " the", "", "é", "ly", " world", ""]


def test_a_long_text_of_words_is_that_of_all_its_tokens():
    tokenizer = word_tokenizer()
    random = np.random.default_rng(0)
    ids = random.choice(ids_of("▁Hello", "▁world", ",", "▁the", "ly"), 200).tolist()
    assert "".join(pieces(TextStream(tokenizer), ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("stop", "shown", "reason"),
    [
        (["\n\n"], "one two\nthree", "stop"),
        (["three"], "one two\n", "stop"),
        (["thirteen", "e\n"], "one two\nthre", "stop"),
        (["four", "two", "one two\nthree\n\nf"], "one ", "stop"),
        (["five"], "one two\nthree\n\nfour", "length"),
        ([], "one two\nthree\n\nfour", "length"),
        (["o"], "", "stop"),
    ],
)
def test_a_stop_string_ends_the_text_and_is_not_shown(stop, shown, reason):
    stream = TextStream(BYTES, stop=stop)
    assert "".join(pieces(stream, BYTES.encode("one two\nthree\n\nfour"))) == shown
    assert stream.finish_reason == reason


def test_what_may_begin_a_stop_string_waits_and_is_shown_when_it_does_not():
    assert pieces(TextStream(BYTES, stop=["END"]), BYTES.encode("aENENxEN")) == [
        "a", "", "", "EN", "", "ENx", "", "", "EN",
    ]  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.text("abé😀", max_size=12), st.lists(st.text("abé😀", min_size=1, max_size=3), max_size=3))
def test_the_text_ends_where_the_first_stop_string_is_complete(text, stop):
    stream = TextStream(BYTES, stop=stop)
    shown = "".join(pieces(stream, BYTES.encode(text)))
    ends = [n for n in range(len(text) + 1) if any(text[:n].endswith(s) for s in stop)]
    if not ends:
        assert (shown, stream.finish_reason) == (text, "length")
        return
    longest = max(len(s) for s in stop if text[: ends[0]].endswith(s))
    assert (shown, stream.finish_reason) == (text[: ends[0] - longest], "stop")


def test_a_stop_token_ends_the_text_with_what_was_held_back():
    stream = TextStream(BYTES, stop=["bc"], stop_tokens=[256])
    assert pieces(stream, [*b"ab", 256]) == ["a", "", "b"] and stream.finish_reason == "stop"


class Spelled:
    """In a decoder's place: each prompt goes on with given bytes."""

    def __init__(self, *texts: bytes):
        self.texts = texts
        self.steps = 0

    def generate(self, prompts, max_tokens, sampling, *, seed, stop_tokens):
        for step in range(max_tokens):
            self.steps += 1
            yield np.array([text[step] if step < len(text) else 256 for text in self.texts])


def test_texts_of_a_batch_end_apart_and_nothing_is_decoded_after_the_last():
    decoder = Spelled(b"one; two", b"three", "zwölf".encode())
    generator = TextGenerator(decoder, BYTES, opening=[256], stop_tokens=[256])  # pyright: ignore
    assert generator.generate(["", "", ""], 50, Sampling(), stop=[";"]) == ["one", "three", "zwölf"]
    assert decoder.steps == 7
    found = list(generator.stream([[256]] * 3, 5, Sampling(), stop=[";"]))
    assert [piece.finish_reason for piece in found if piece.finish_reason] == ["stop", "length", "length"]
    assert "".join(piece.text for piece in found if piece.row == 2) == "zwöl"
    with pytest.raises(ConfigError, match="at least one character"):
        generator.generate([""], 5, Sampling(), stop=[""])


@pytest.mark.parametrize("text", ["你好世界你好世界", "日本語のテキスト", "é日😀é日😀", " Hello 日本 world 😀,"])
@pytest.mark.parametrize("given", [0, 1, 2])
def test_characters_written_as_bytes_are_whole(text, given):
    """Byte fallback: one token a byte, however long the run of such tokens."""
    ids = ids_of("▁") + [i for c in text.encode() for i in ids_of(f"<0x{c:02X}>")]
    stream = TextStream(word_tokenizer(), ids[:1])
    assert "".join(stream.push(i) for i in ids[1:]) + stream.finish() == text
    mixed = [*ids_of("▁Hello"), *ids[1:], *ids_of("▁world")]
    stream = TextStream(word_tokenizer(), mixed[: 1 + given])
    before = text.encode()[:given].decode(errors="ignore")  # whole characters that are in the prompt
    found = "".join(stream.push(i) for i in mixed[1 + given :]) + stream.finish()
    assert found == text.removeprefix(before) + " world"
