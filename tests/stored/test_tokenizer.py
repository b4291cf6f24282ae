"""A run directory whose tokenizer is not the one of its checkpoints."""

import pytest

from jaxstack.data.tokenizer import ByteTokenizer, SyntheticTokenizer
from jaxstack.errors import JaxstackError
from jaxstack.stored.run_directory import check_tokenizer


def test_another_tokenizer_than_the_checkpoints_is_refused(tmp_path):
    folder = tmp_path / "tokenizer"
    trained = {"data": {"tokenizer": ByteTokenizer().hash}}
    check_tokenizer(folder, 7, trained)  # nothing is decoded without one
    ByteTokenizer().save(folder)
    for extra in (trained, {"data": None}, {"data": {"seed": 0}}, None):  # converted, or of somebody's own data
        check_tokenizer(folder, 7, extra)
    SyntheticTokenizer(257).save(folder)
    with pytest.raises(JaxstackError, match="is not the tokenizer of checkpoint 7"):
        check_tokenizer(folder, 7, trained)
