"""`python -m jaxstack.tune`: one message and exit code 2 for every mistake, and its subcommands."""

import pytest

from jaxstack.tune.__main__ import main, make_parser
from tests.tune.studies import write_config, write_study


@pytest.mark.parametrize(
    ("keys", "overrides", "said"),
    [
        ({"space": {"optimizer.lr": [1, 2]}}, [], "unknown key 'optimizer.lr'"),
        ({"space": {"optimizer.learning_rate": {"low": 2, "high": 1}}}, [], "must be less than high"),
        ({"trails": 1}, [], "did you mean 'trials'"),
        ({}, ["train.stps=3"], "did you mean 'steps'"),
        ({"sampler": "tpee"}, [], "did you mean 'tpe'"),
        ({"storage": "nowhere://x"}, [], "cannot open the study's storage"),
    ],
    ids=str,
)
def test_a_mistake_is_one_message_with_exit_code_2(tmp_path, capsys, keys, overrides, said):
    words = ["--config", str(write_config(tmp_path)), "--study", str(write_study(tmp_path, **keys)), *overrides]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("jaxstack tune: ") and said in error and len(error.strip().splitlines()) == 1


def test_missing_files(tmp_path, capsys):
    assert main(["--config", str(write_config(tmp_path)), "--study", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml does not exist" in capsys.readouterr().err
    assert main(["--config", str(tmp_path / "no.yaml"), "--study", str(write_study(tmp_path))]) == 2
    assert "no.yaml does not exist" in capsys.readouterr().err
    assert main(["learning-rate", "--config", str(tmp_path / "no.yaml")]) == 2
    assert main(["learning-rate", "--config", str(write_config(tmp_path)), "--low", "1", "--high", "0.1"]) == 2
    assert "--low (1.0) must be more than 0 and less than --high (0.1)" in capsys.readouterr().err


def test_the_first_word_chooses_the_parser():
    assert make_parser(["learning-rate"]).prog == "jaxstack tune learning-rate"
    assert make_parser([]).prog == "jaxstack tune"
    with pytest.raises(SystemExit) as stopped:
        main(["learning-rate", "--help"])
    assert stopped.value.code == 0
