"""The command `python -m jaxstack.plan --config FILE`: lay out a configuration on a cluster without using it."""

import json
import sys
from collections.abc import Sequence

from jaxstack.cli import CommandParser, add_examples, required_option, run_command
from jaxstack.errors import ConfigError


def make_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        prog="jaxstack plan",
        description="Show how a configuration is laid out on a mesh: the devices, the bytes that each holds between "
        "steps, model FLOPs, and the schedule of a pipeline. Nothing is computed and no device is used. With "
        "--rehearse, compile the real train step for GPUs that are not present, and show whether its memory fits.",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file; see configs/")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="values that replace the file's")
    parser.add_argument(
        "--devices", type=int, metavar="N", help="devices of the cluster (default: product of the degrees)"
    )
    parser.add_argument(
        "--show-sharding",
        action="store_true",
        help="also list every parameter, and draw which device holds which shard",
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="compile the train step (minutes) and show its memory and kernels"
    )
    parser.add_argument("--device", choices=("h200",), default="h200", help="kind of GPU to compile for")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return add_examples(
        parser,
        "plan --config configs/quickstart.yaml",
        "plan --config configs/llama3-8b-fsdp4.yaml --devices 8 --show-sharding parallel.fsdp=-1",
        "plan --config configs/llama3-8b-1m.yaml --rehearse",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = make_parser()
    args = required_option(parser, parser.parse_intermixed_args(argv), "config", lambda word: True)

    def body() -> None:
        if args.devices is not None and args.devices < 1:
            raise ConfigError(f"--devices must be at least 1; found {args.devices}.")
        from jaxstack.plan.describe import describe_plan
        from jaxstack.plan.draw import draw_plan
        from jaxstack.plan.rehearsal import rehearse
        from jaxstack.run_config import load_config

        config = load_config(args.config, args.overrides)
        found = describe_plan(config, args.devices)
        if args.rehearse:
            found["rehearsal"] = rehearse(config, args.devices, args.device)
        print(json.dumps(found, indent=1) if args.json else draw_plan(found, args.show_sharding))

    return run_command("jaxstack plan", body)


if __name__ == "__main__":
    sys.exit(main())
