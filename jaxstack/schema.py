"""The command `python -m jaxstack.schema`: print the JSON schema of configuration files, for editors."""

import json
import sys
from collections.abc import Sequence

from jaxstack.cli import CommandParser, add_examples, run_command


def make_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        prog="jaxstack schema",
        description="Print the JSON schema of configuration files. Editors use it to complete keys and show mistakes.",
    )
    return add_examples(parser, "schema > jaxstack.schema.json")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `python -m jaxstack.schema` with the arguments `argv`; return its exit code."""
    make_parser().parse_args(argv)

    def body() -> None:
        from jaxstack.run_config import config_schema

        print(json.dumps(config_schema(), indent=1, sort_keys=True))

    return run_command("jaxstack schema", body)


if __name__ == "__main__":
    sys.exit(main())
