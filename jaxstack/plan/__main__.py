"""The command `python -m jaxstack.plan --config FILE`: lay out a configuration on a cluster without using it."""

import argparse
import json
import sys
from collections.abc import Sequence

from jaxstack.cli import add_examples, run_command
from jaxstack.errors import ConfigError


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="jaxstack plan",
        description="Show how a configuration is laid out on a mesh: the devices, the bytes that each holds between "
        "steps, model FLOPs, and the schedule of a pipeline. Nothing is computed and no device is used. With "
        "--rehearse, compile the real train step for GPUs that are not present, and show whether its memory fits.",
    )
    parser.add_argument("--config", metavar="FILE", required=True, help="YAML file; see configs/")
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
    parser.add_argument(
        "--roofline",
        metavar="FILE.svg",
        help="draw the operators of the step on the roofline of --device, and list their FLOPs and bytes",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return add_examples(
        parser,
        "plan --config configs/quickstart.yaml",
        "plan --config configs/llama3-8b-fsdp4.yaml --devices 8 --show-sharding parallel.fsdp=-1",
        "plan --config configs/llama3-8b-1m.yaml --rehearse",
        "plan --config configs/llama3-8b-fsdp4.yaml --roofline roofline.svg",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = make_parser().parse_intermixed_args(argv)

    def body() -> None:
        if args.devices is not None and args.devices < 1:
            raise ConfigError(f"--devices must be at least 1; found {args.devices}.")
        from jaxstack.plan.describe import describe_plan
        from jaxstack.plan.draw import draw_plan
        from jaxstack.plan.rehearsal import rehearse
        from jaxstack.plan.write_roofline import write_roofline
        from jaxstack.run_config import load_config

        config = load_config(args.config, args.overrides)
        found = describe_plan(config, args.devices)
        if args.rehearse:
            found["rehearsal"] = rehearse(config, args.devices, args.device)
        if args.roofline is not None:
            found["roofline"] = write_roofline(config, args.devices, args.device, args.roofline)
        print(json.dumps(found, indent=1) if args.json else draw_plan(found, args.show_sharding))

    return run_command("jaxstack plan", body)


if __name__ == "__main__":
    sys.exit(main())
