"""Bad words are forbidden as vLLM does it, in each engine, and nothing else is."""

from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxstack.data.load_tokenizer import read_tokenizer_file
from jaxstack.decoding.decoder import Decoder
from jaxstack.decoding.requests import ConstraintFailed
from jaxstack.decoding.sampling import Sampling
from jaxstack.errors import ConfigError
from jaxstack.serve.word_limits import AllowedTokens, BadWords, WithoutWords
from tests.serve.test_engine import expected, forward, prompts
from tests.serve.test_scores import ENGINES
from tests.serve.tiny import open_tiny


def forbidden(words: BadWords, tokens: list[int], count: int = 300) -> set[int]:
    mask = np.full(-(-count // 32), -1, np.int32)
    words.forbid_after(tokens, mask)
    return {token for token in range(count) if not mask.view(np.uint32)[token // 32] >> token % 32 & 1}


def test_a_word_is_forbidden_at_the_beginning_and_after_a_space(tmp_path):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {text: i for i, text in enumerate([*letters, "fo", "foo", "Ġfoo"])}
    model = Tokenizer(models.BPE(ids, [("f", "o"), ("fo", "o"), ("Ġ", "foo")]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    model.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    model.add_special_tokens(["<|endoftext|>"])
    model.save(str(tmp_path / "tokenizer.json"))
    tokenizer = read_tokenizer_file(str(tmp_path / "tokenizer.json"))
    for given in ("foo", "  foo"):
        assert forbidden(BadWords([given], tokenizer), []) == {ids["foo"], ids["Ġfoo"]}
    words = BadWords(["foob", "a", "fooba"], tokenizer)
    assert forbidden(words, []) == forbidden(words, [ids["b"], ids["o"]]) == {ids["a"]}
    assert forbidden(words, [ids["x"], ids["foo"]]) == forbidden(words, [ids["Ġfoo"]]) == {ids["a"], ids["b"]}
    assert forbidden(BadWords([" "], tokenizer), []) == {ids["Ġ"]}
    nothing = cast(Any, SimpleNamespace(encode=lambda text: np.zeros(0, np.int32)))
    with pytest.raises(ConfigError, match="the word 'x' of bad_words with no token; leave it out"):
        BadWords(["x"], nothing)


def test_an_answer_to_which_nothing_is_left_ends_with_an_error():
    letters = cast(Any, SimpleNamespace(encode=lambda text: np.frombuffer(text.encode("latin-1"), np.uint8)))
    constraint = WithoutWords(BadWords(["ab", "aa"], letters), AllowedTokens([97, 98]))
    mask = np.zeros(9, np.int32)
    constraint.fill_mask(mask)
    assert constraint.accept(97)
    constraint.fill_mask(mask)
    with pytest.raises(ConstraintFailed, match="bad_words forbid all tokens"):
        constraint.accept(97)


def without(decoder: Decoder, prompt: list[int], count: int, words: list[bytes]) -> list[int]:
    """The greedy answer by whole forward passes, of which none of the words is a part."""
    model = decoder.module.merge(decoder.params, decoder.non_params)
    answer: list[int] = []
    for number in range(count):
        ids = np.zeros((1, 128), np.int32)
        ids[0, : len(prompt) + number] = [*prompt, *answer]
        with jax.set_mesh(decoder.rules.mesh):
            logits = np.array(forward(model, ids)[0, len(prompt) + number - 1])
        for token in np.argsort(-logits).tolist():
            if not any([*answer, token][-len(word) :] == [*word] for word in words):
                break
        answer.append(token)
    return answer


@pytest.mark.longer
def test_answers_without_bad_words_are_those_of_the_likeliest_other_tokens():
    """Beside an answer that may have them all; with a seed, words that are never written change nothing."""
    decoder = open_tiny()
    letters = cast(Any, SimpleNamespace(encode=lambda text: np.frombuffer(text.encode("latin-1"), np.uint8)))
    asked = prompts([9, 5])
    plain = expected(decoder, asked[0], 12, Sampling(0), 0)
    words = [bytes(plain[2:4]), bytes(plain[6:7]), bytes(plain[7:10])]
    bad = BadWords([word.decode("latin-1") for word in words], letters)
    never = BadWords(["\xfe\xff\xfe\xff\xfe"], letters)
    with ENGINES["ngram"](decoder) as engine:
        limited = engine.submit(asked[0], 12, Sampling(0), constraint=WithoutWords(bad, None))
        free = engine.submit(asked[0], 12, Sampling(0))
        pair = [
            engine.submit(asked[1], 12, Sampling(0.9), seed=4, constraint=constraint)
            for constraint in (None, WithoutWords(never, None))
        ]
        answers = [request.result() for request in (limited, free, *pair)]
    assert answers[0] == without(decoder, asked[0], 12, words) != plain and answers[1] == plain
    assert answers[2] == answers[3]
