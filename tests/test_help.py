"""Every command's help reads well: what it does, each option, and examples that can be copied and are right."""

import re

import pytest

from jaxstack.__main__ import COMMANDS, main
from tests.test_docs import check_command, commands


@pytest.mark.parametrize("name", COMMANDS)
def test_help_reads_well(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: jaxstack {name} ")
    assert max(map(len, text.splitlines())) <= 110
    _, _, examples = text.partition("\nexamples:\n")
    found = commands(examples)
    assert re.match(rf"  python -m jaxstack\.{name}\b", examples)
    for words in found:
        check_command(words)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_explained(name):
    parser = COMMANDS[name].load().make_parser()
    for action in parser._actions:
        if action.help is None and action.choices is None:
            shown = action.metavar or action.dest
            pytest.fail(f"jaxstack {name}: {shown} has no help")
        if action.option_strings and action.nargs != 0 and action.choices is None:
            assert action.metavar is not None, f"jaxstack {name}: {action.option_strings[0]} names no value"


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["prepare", "--source", "stdlib", "--output", ""], "--output"),
        (["convert", "", "--output", "a"], "SOURCE"),
        (["evaluate", "--run", "a", "--data", "b", ""], "--data"),
    ],
)
def test_an_empty_path_is_not_the_current_directory(arguments, option, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert f"{option} is empty" in capsys.readouterr().err
