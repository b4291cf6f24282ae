"""The command `python -m jaxstack.plan --config FILE`: plan the layout of a run on a cluster, without its devices."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import fields

from jaxstack.cli import CommandParser, add_examples, fill_option_from_overrides, run_command
from jaxstack.distributed.cluster import on_first_process
from jaxstack.errors import ConfigError
from jaxstack.heartbeat import doing


def make_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        prog="jaxstack plan",
        description="Show how a configuration is laid out on a mesh: the devices, the bytes that each holds between "
        "steps, model FLOPs, and the schedule of a pipeline. Nothing is computed and no device is used. With "
        "--rehearse, compile the real train step for GPUs that are not present, and show whether its memory fits. With "
        "--cluster, search all layouts for the fastest ones that fit, and predict memory, time, cost and energy.",
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
    parser.add_argument(
        "--roofline",
        metavar="FILE.svg",
        help="draw the operators of the step on the roofline of --device, and list their FLOPs and bytes",
    )
    add_search_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return add_examples(
        parser,
        "plan --config configs/quickstart.yaml",
        "plan --config configs/llama3-8b-fsdp4.yaml --devices 8 --show-sharding parallel.fsdp=-1",
        "plan --config configs/llama3-8b-1m.yaml --rehearse",
        "plan --config configs/llama3-8b-fsdp4.yaml --roofline roofline.svg",
        'plan --config configs/llama3-8b-fsdp4.yaml --cluster "1 x 8 h200"',
        'plan --config configs/llama3-1b.yaml --cluster "1 x 1 h200" --tokens chinchilla',
    )


def add_search_arguments(parser: CommandParser) -> None:
    """Add the command-line options of the layout search on a cluster to a parser."""
    group = parser.add_argument_group("search", "layouts ranked by their predicted time; needs --cluster")
    group.add_argument(
        "--cluster",
        metavar="TEXT",
        help="hosts x GPUs of each and their kind, such as '8 x 8 h200'; kinds: a100, gb200, h100, h200, l40s, or the "
        "path of a YAML file",
    )
    group.add_argument("--top", type=int, default=10, metavar="N", help="layouts to show (10)")
    group.add_argument(
        "--tokens", metavar="N", help="tokens to train on, or chinchilla (20 per parameter): days, cost, energy"
    )
    group.add_argument("--price", type=float, metavar="P", help="price of one GPU for an hour, in any currency")
    group.add_argument("--max-days", type=float, metavar="D", help="refuse if --tokens takes longer")
    group.add_argument("--max-cost", type=float, metavar="C", help="refuse if --tokens costs more")
    group.add_argument(
        "--policy",
        choices=("fastest", "tensor-first"),
        default="fastest",
        help="tensor-first: Megatron-LM's rule, the smallest tensor x pipeline that fits, tensor first",
    )
    group.add_argument(
        "--only",
        metavar="SETTINGS",
        help="try a single value of these settings, such as zero=0,remat=full,microbatch_size=4; names: degrees, zero, "
        "sequence, schedule, chunks, microbatches, remat, fp8, microbatch_size (sequences of a microbatch in each "
        "replica), and virtual_stage_layers (layers of a virtual stage)",
    )
    group.add_argument("--fp8", action="store_true", help="try FP8 recipes too, which change the numerics")
    group.add_argument(
        "--verify", type=int, default=0, metavar="N", help="compile the first N layouts for their memory (minutes)"
    )
    group.add_argument("--output", metavar="FILE", help="write the first layout as a configuration for jaxstack train")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `python -m jaxstack.plan` with the arguments `argv`; return its exit code."""
    parser = make_parser()
    args = fill_option_from_overrides(parser, parser.parse_intermixed_args(argv), "config", lambda word: True)

    def body() -> None:
        _check_arguments(args)
        from jaxstack.plan.cluster_search import SearchOptions, load_search_config, search_cluster
        from jaxstack.plan.draw import describe_plan, draw_plan, write_roofline
        from jaxstack.plan.rehearsal import rehearse
        from jaxstack.run_config import load_config, print_note

        config = (load_config if args.cluster is None else load_search_config)(args.config, args.overrides)
        if config.parallel.workers > 1:
            if args.output is not None:
                raise ConfigError(
                    f"--output cannot write a run of several workers (parallel.workers={config.parallel.workers}); "
                    "leave it out, and put the degrees of the first layout into the file."
                )
            print_note(f"the plan is that of one of {config.parallel.workers} workers, with its devices alone")
            config = config.one_worker
        if args.cluster is not None:
            options = SearchOptions(**{field.name: getattr(args, field.name) for field in fields(SearchOptions)})
            with doing("searching layouts"):
                result = search_cluster(config, options)
            print(json.dumps(result.describe(), indent=1) if args.json else result.draw())
            return
        with doing("planning"):
            found = describe_plan(config, args.devices)
        if args.rehearse:
            with doing("compiling the step"):
                found["rehearsal"] = rehearse(config, args.devices, args.device)
        if args.roofline is not None:
            found["roofline"] = write_roofline(config, args.devices, args.device, args.roofline)
        print(json.dumps(found, indent=1) if args.json else draw_plan(found, args.show_sharding))

    return run_command("jaxstack plan", on_first_process(body))


def _check_arguments(args: argparse.Namespace) -> None:
    """Check that the command-line options do not contradict each other.

    Raises:
      ConfigError: a value is out of range, or an option of the search is given without --cluster.
    """
    if args.devices is not None and args.devices < 1:
        raise ConfigError(f"--devices must be at least 1; found {args.devices}.")
    for name in ("price", "max_days", "max_cost"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(
                f"--{name.replace('_', '-')} must be a positive number; found {value:g}. Leave it out for no "
                f"{'price' if name == 'price' else 'limit'}."
            )
    for name in ("output", "roofline"):
        written = getattr(args, name)
        for given in (args.config, *(args.cluster or "").split()):
            if written is not None and given is not None and os.path.realpath(written) == os.path.realpath(given):
                raise ConfigError(f"--{name} {written} would overwrite {given}, which is read: give it another name.")
    if args.top < 1 or args.verify < 0:
        raise ConfigError(f"--top ({args.top}) must be at least 1 and --verify ({args.verify}) at least 0.")
    used = [
        name for name in ("tokens", "price", "max_days", "max_cost", "output", "verify", "only") if getattr(args, name)
    ]
    if args.cluster is None and (used or args.fp8 or args.policy != "fastest"):
        option = used[0] if used else "fp8" if args.fp8 else "policy"
        raise ConfigError(f"--{option.replace('_', '-')} belongs to a search: add --cluster, such as '8 x 8 h200'.")
    if args.cluster is not None and (args.rehearse or args.devices or args.show_sharding or args.roofline):
        raise ConfigError(
            "--cluster searches layouts; --devices, --rehearse, --roofline and --show-sharding describe the one of the "
            "file: use --verify N to compile the first layouts, or leave --cluster out."
        )


if __name__ == "__main__":
    sys.exit(main())
