"""The compressors' bits per byte."""

import gzip
import lzma
import os

import pytest

from jaxstack.evaluation import compression_baselines


def test_bits_per_byte_are_those_of_the_compressors():
    raw = b"the same words again and again, and then some more. " * 100
    found = compression_baselines(raw)
    assert found["gzip -9"] == pytest.approx(8 * len(gzip.compress(raw, 9)) / len(raw))
    assert found["xz -9"] == pytest.approx(8 * len(lzma.compress(raw, preset=9)) / len(raw))


def test_noise_does_not_compress_and_nothing_has_no_rate():
    assert compression_baselines(os.urandom(10_000))["gzip -9"] > 8
    assert compression_baselines(b"") == {}
