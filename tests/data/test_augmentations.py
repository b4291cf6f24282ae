"""Augmentations: what they keep, what they change, and that they depend on the seed and the position only."""

import itertools

import numpy as np
import pytest

from jaxstack.data.augmentations.base import Augmenter, Vocabulary, join_documents, split_row
from jaxstack.data.augmentations.document_order import RandomDocumentOrder
from jaxstack.data.augmentations.fill_in_the_middle import FillInTheMiddle
from jaxstack.data.augmentations.images import RandomCrop, RandomFlip, augment_images
from jaxstack.data.augmentations.span_corruption import SpanCorruption
from jaxstack.data.augmentations.token_dropout import TokenDropout
from jaxstack.data.config import DataConfig, SourceConfig
from jaxstack.data.loader import open_data
from jaxstack.data.token_rows import IGNORE, make_batch
from jaxstack.errors import ConfigError
from jaxstack.trainer import numpy_batches

START = 256
IDS = Vocabulary(START, 257)


def row_of(*documents, length=64, packing=True):
    """A row of these documents (ids without the start), the first of which continues one of the row before."""
    ids = [*documents[0], *itertools.chain.from_iterable([START, *one] for one in documents[1:])]
    padded = np.full(length + 1, -1, np.int32)
    padded[: len(ids)] = ids[: length + 1]
    return {name: array[0] for name, array in make_batch([padded], START, packing).items()}


def augment(row, *chosen, seed=0, sample=0, packing=True):
    return Augmenter.make(chosen, IDS, seed, packing=packing, chats=False)(row, sample)


def texts(row):
    return [list(tokens) for tokens, labels in split_row(row, START) if (labels != IGNORE).any()]


PACKED = row_of(range(10), range(20, 32), range(40, 55), range(60, 69))
CUT = row_of(range(10), range(20, 80))


@pytest.mark.parametrize("row", [PACKED, CUT, row_of(range(5), range(9), packing=False)], ids=["packed", "cut", "flat"])
def test_splitting_and_joining_gives_the_same_row(row):
    again = join_documents(split_row(row, START), row, START)
    assert again.keys() == row.keys()
    targets = row["labels"] != IGNORE  # padding may have other segments
    for name, array in again.items():
        np.testing.assert_array_equal(array[targets], row[name][targets])
        assert array.dtype == np.int32


@pytest.mark.parametrize("order", ["PSM", "SPM"])
def test_fill_in_the_middle_gives_every_document_back(order):
    chosen = FillInTheMiddle(rate=1.0, spm_rate=float(order == "SPM"))
    places = set()
    for sample in range(50):
        row = augment(PACKED, chosen, sample=sample)
        found = texts(row)
        assert len(found) == 4
        for before, after in zip(texts(PACKED), found, strict=True):
            opening, body = ([START], after[1:]) if before[0] == START else ([], after)
            if after[-1] != row["tokens"][-1]:  # the row has no room for three more ids of the last document
                assert len(after) == len(before) + 3
            first = body.index(258)
            second = body.index(259)
            assert body[0] == 257
            if order == "PSM":
                prefix = body[1:first]
                suffix = body[first + 1 : second]
                middle = body[second + 1 :]
            else:
                assert first == 1
                prefix = []
                suffix = body[2:second]
                middle = body[second + 1 :]
            known = [*opening, *prefix, *middle, *suffix]
            if order == "PSM":
                assert known == before
            else:
                assert sorted(known) == sorted(before)
            places.add(len(prefix) if order == "PSM" else len(suffix))
    assert len(places) > 8


def test_fill_in_the_middle_predicts_the_next_token_and_the_end():
    row = augment(row_of([], range(30, 50)), FillInTheMiddle(rate=1.0))
    tokens, labels = split_row(row, START)[0]
    np.testing.assert_array_equal(labels[:-1], tokens[1:])
    assert labels[-1] == IGNORE  # the row's padding follows: its end is not known
    row = augment(row_of([], range(30, 50), [1]), FillInTheMiddle(rate=1.0))
    tokens, labels = split_row(row, START)[0]
    np.testing.assert_array_equal(labels, [*tokens[1:], START])
    np.testing.assert_array_equal(row["positions"][: len(tokens)], np.arange(len(tokens)))


def test_fill_in_the_middle_takes_its_share_and_the_configured_sentinels():
    row = row_of([], *[range(10)] * 400, length=4600)
    tokens = augment(row, FillInTheMiddle(rate=0.3, sentinel_ids=(1001, 1002, 1003)))["tokens"]
    assert 90 < (tokens == 1003).sum() < 150 and tokens.max() == 1003


def test_span_corruption_can_be_undone():
    body = list(range(100))
    row = augment(row_of([], body, length=128), SpanCorruption(noise_density=0.2))
    tokens, labels = (list(x) for x in split_row(row, START)[0])
    cut = len(labels) - int(np.argmax(np.array(labels)[::-1] == IGNORE))  # the first target is predicted before it
    inputs = tokens[1 : cut + 1]
    targets = tokens[cut + 1 :]
    spans = {}
    current = []
    for one in targets:
        if one >= 257:
            current = spans[one] = []
        else:
            current.append(one)
    restored = [x for one in inputs for x in (spans.pop(one) if one >= 257 else [one])]
    assert restored == body[: len(restored)] and not spans
    assert len(tokens) <= 101 and len(restored) > 85
    noisy = sum(one < 257 for one in targets)
    assert abs(noisy / len(restored) - 0.2) < 0.02
    assert abs(noisy / sum(one >= 257 for one in targets) - 3) < 0.5
    assert labels[cut:] == [*tokens[cut + 1 :], START]


@pytest.mark.parametrize("sentinels", [1, 7, 100])
def test_span_corruption_fits_documents_of_any_length(sentinels):
    for count in (1, 7, 8, 9, 30, 57):
        row = row_of(range(5), range(100, 100 + count), [7], length=72)
        for sample in range(5):
            changed = augment(row, SpanCorruption(sentinels=sentinels, noise_density=0.5, mean_span=1.0), sample=sample)
            found = texts(changed)
            assert len(found) == 3 and len(found[1]) <= count + 1 and found[2] == [START, 7]
            assert changed["tokens"].max() <= max(START, 256 + sentinels)


def test_token_dropout_changes_its_share_of_inputs_only():
    row = row_of([], *[range(99)] * 100, length=9000)
    changed = augment(row, TokenDropout(rate=0.2))
    different = changed["tokens"] != row["tokens"]
    assert 0.18 < different.mean() < 0.21
    assert not different[row["tokens"] == START].any() and (changed["tokens"][different] != START).all()
    for name in ("labels", "segment_ids", "positions"):
        np.testing.assert_array_equal(changed[name], row[name])
    assert set(augment(row, TokenDropout(rate=0.2, replacement_id=300))["tokens"][different]) == {300}


def test_document_order_is_a_permutation_that_keeps_every_label():
    orders = set()
    for sample in range(200):
        row = augment(PACKED, RandomDocumentOrder(), sample=sample)
        assert sorted(texts(row)) == sorted(texts(PACKED))
        pairs = [sorted(zip(x["tokens"], x["labels"], strict=True)) for x in (row, PACKED)]
        assert pairs[0] == pairs[1]
        np.testing.assert_array_equal(np.flatnonzero(np.diff(row["segment_ids"])) + 1, np.flatnonzero(
            row["positions"][1:] == 0) + 1)  # fmt: skip
        orders.add(tuple(one[-1] for one in texts(row)))
    assert len(orders) == 24


def test_randomness_depends_on_seed_and_sample_only():
    chosen = (FillInTheMiddle(), TokenDropout(), RandomDocumentOrder())

    def at(seed, sample):
        return augment(PACKED, *chosen, seed=seed, sample=sample)["tokens"].tobytes()

    assert at(3, 5) == at(3, 5) != at(3, 6) != at(4, 6)
    assert len({at(0, sample) for sample in range(50)}) == 50


def test_several_augmentations_have_different_sentinels():
    augmenter = Augmenter.make((FillInTheMiddle(), SpanCorruption(sentinels=10)), IDS, 0, packing=True, chats=False)
    assert [one.largest_id for one in augmenter.augmentations] == [259, 269] and augmenter.vocab_size == 270
    assert Augmenter.make((), IDS, 0, packing=True, chats=False).vocab_size == 257


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="document_order needs data.packing=true"):
        augment(PACKED, RandomDocumentOrder(), packing=False)
    with pytest.raises(ConfigError, match="fill_in_the_middle rewrites whole documents, but a source has format chat"):
        Augmenter.make((FillInTheMiddle(),), IDS, 0, packing=True, chats=True)


def test_training_rows_are_augmented_and_held_out_rows_are_not(byte_config):
    plain = open_data(byte_config, sequence_length=32, seed=7)
    chosen = {"augmentations": (TokenDropout(rate=0.5),)}
    data = open_data(byte_config.model_copy(update=chosen), sequence_length=32, seed=7)
    ask = {"global_batch_size": 4, "rows": range(4)}
    before = plain.batch(3, **ask)
    after = data.batch(3, **ask)
    assert (before["tokens"] != after["tokens"]).mean() > 0.3
    np.testing.assert_array_equal(before["labels"], after["labels"])
    rows = [next(x.held_out_batches(batch_size=4, rows=range(4)))["tokens"] for x in (plain, data)]
    np.testing.assert_array_equal(*rows)
    assert data.fingerprint != plain.fingerprint and data.fingerprint["augmentations"][0]["rate"] == 0.5
    part = data.batch(3, global_batch_size=4, rows=[2])
    np.testing.assert_array_equal(part["tokens"][0], after["tokens"][2])


def test_the_configuration_chooses_augmentations_by_name():
    config = DataConfig.model_validate({
        "sources": (SourceConfig(),), "augmentations": ({"name": "fill_in_the_middle", "rate": 0.9},),
    })  # fmt: skip
    assert config.augmentations == (FillInTheMiddle(rate=0.9),)


def test_crops_shift_images_and_flips_mirror_them():
    image = np.arange(1, 5 * 6 * 2 + 1, dtype=np.float32).reshape(5, 6, 2)
    random = np.random.default_rng(0)
    seen = set()
    for _ in range(300):
        cropped = RandomCrop(padding=1).apply(image, random)
        assert cropped.shape == image.shape
        seen.add(cropped.tobytes())
    wide = np.pad(image, ((1, 1), (1, 1), (0, 0)))
    assert seen == {wide[a : a + 5, b : b + 6].tobytes() for a in range(3) for b in range(3)}
    np.testing.assert_array_equal(RandomFlip(rate=1.0).apply(image, random), image[:, ::-1])
    np.testing.assert_array_equal(RandomFlip(axis="vertical", rate=1.0).apply(image, random), image[::-1])
    flipped = [RandomFlip(rate=0.25).apply(image, random) is not image for _ in range(1000)]
    assert 200 < sum(flipped) < 300


def test_augmented_images_depend_on_seed_and_step_only():
    rows = {"image": np.random.default_rng(0).normal(size=(20, 8, 8, 1)), "label": np.arange(20)}
    batches = numpy_batches(rows, 6)
    chosen = [RandomCrop(padding=2), RandomFlip()]
    first, again = (augment_images(batches, chosen, seed=1)(9) for _ in range(2))
    np.testing.assert_array_equal(first["image"], again["image"])
    np.testing.assert_array_equal(first["label"], batches(9)["label"])
    assert (first["image"] != batches(9)["image"]).any()
    assert (first["image"] != augment_images(batches, chosen, seed=2)(9)["image"]).any()
