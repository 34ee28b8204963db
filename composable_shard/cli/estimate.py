"""``estimate``: predict the peak memory of a training script or a model, by steps that run with fake tensors."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from .._plan.text import count
from ..errors import ComposableShardError, ShardConfigValueError
from .bits import add_bits, bits_of
from .program import NotFoundError, described, import_from_here, output_aside, run_program
from .terminal import Table, add_debug, in_bytes, in_seconds, say_error, show, size

if TYPE_CHECKING:
    from ..planner.off_device import Offloaded
    from ..planner.rehearsal import Rehearsal

NAME = "estimate"
DESCRIPTION = """\
Predict the peak memory of training on one of N devices, by category. Training steps run with fake tensors, which have
shapes but no memory, as rank 0 of N ranks whose other ranks do not exist. So no device is needed, and the model may be
larger than this machine.

WHAT is a training script with its arguments, or -m and a module. The script is not changed. It reads its data
and writes its logs, and stops after three optimizer steps. torch.save and checkpoints of this library and of
torch.distributed do nothing, and torch.compile does not compile.

Or WHAT is a model, as for `advise`: a named shape, a shape as text, a config.json, or package.module:function.
"""
EXAMPLE = """\
examples:
  python -m composable_shard estimate --devices 8 train.py --batch-size 4
  python -m composable_shard estimate --devices 8 --install -m my_package.train
  python -m composable_shard estimate --devices 64 --strategy zero3 --batch 2 llama3-8b

exit codes: 0 done, and it fits into --memory; 1 it does not fit; 2 the arguments are wrong, or the script failed.
"""
STRATEGIES = ("none", "ddp", "zero1", "zero2", "zero3", "hsdp", "hfsdp")
OFFLOADS: dict[str, dict[str, Any]] = {
    "none": {},
    "all": {"offload": True},  # shards, gradients and optimizer state on the host
    "optimizer": {"state": True},  # only the optimizer state on the host
    "disk": {"offload": True, "disk": True},
}


def add_command(commands: Any) -> None:
    """Add this command to a parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        NAME,
        usage="%(prog)s [-h] [options] WHAT [ARGUMENT ...]",
        help="predict the peak memory of a script or a model, without a device",
        description=DESCRIPTION,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("what", nargs=argparse.REMAINDER, metavar="WHAT", help="a script with its arguments, or a model")
    add("-m", dest="is_module", action="store_true", help="WHAT is a module, as for python -m")
    add("--devices", type=int, default=1, metavar="N", help="number of ranks (default: 1)")
    add("--memory", type=size, metavar="SIZE", help="memory of a device, such as 40GiB, to compare the peak with")
    add("--json", action="store_true", help="print one JSON object")
    add("--disk", type=size, metavar="SIZE", help="bytes per second of a disk, such as 2GB, to predict time of offload")
    scripts = parser.add_argument_group("options of scripts")
    scripts.add_argument("--steps", type=int, default=3, metavar="N", help="number of optimizer steps (default: 3)")
    scripts.add_argument("--install", action="store_true", help="replace FSDP2 with this library, as `run` does")
    models = parser.add_argument_group("options of models")
    add = models.add_argument
    add("--strategy", choices=STRATEGIES, default="zero3", help="sharding strategy (default: zero3)")
    add("--replicas", type=int, default=2, metavar="N", help="replicas of hsdp, or nodes of hfsdp (default: 2)")
    add(
        "--checkpointing",
        choices=("none", "selective", "full"),
        default="none",
        help="activation checkpointing of blocks (default: none)",
    )
    add("--offload", choices=OFFLOADS, default="none", help="what to store off the device (default: none)")
    add("--batch", type=int, default=1, metavar="N", help="sequences per step and device (default: 1)")
    add("--sequence", type=int, metavar="N", help="tokens per sequence")
    add("--precision", default="bfloat16-mixed", metavar="NAME", help="as for `advise` (default: bfloat16-mixed)")
    add("--optimizer", default="adamw", metavar="NAME", help="adamw (default), in_backward, or owned (Muon)")
    add_bits(models)
    add_debug(parser)
    parser.set_defaults(command=lambda parsed: _run(parsed, parser))


def _run(parsed: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if not parsed.what:
        parser.error("give a script, -m MODULE, or a model")
    is_program = parsed.is_module or parsed.what[0].endswith(".py")
    if not is_program and len(parsed.what) > 1:
        parser.error(
            f"{parsed.what[0]} is a model, which takes no arguments: {' '.join(parsed.what[1:])} "
            "(put options of this command before it)"
        )
    try:
        seen = _of_program(parsed) if is_program else _of_model(parsed)
    except Exception as error:
        ours = isinstance(error, (ComposableShardError, NotFoundError))
        say_error(parser, parsed, error, "" if ours else described(error))
        return 2
    fits = parsed.memory is None or seen.peak.total <= parsed.memory
    if parsed.json:
        print(json.dumps({**asdict(seen), "total": seen.peak.total, "fits": fits}))
    else:
        show(tables(seen, parsed.disk))
        if not fits:
            print(
                f"\nIt does not fit into {in_bytes(parsed.memory)}: {in_bytes(seen.peak.total - parsed.memory)} missing"
            )
    return 0 if fits else 1


def _of_program(parsed: argparse.Namespace) -> Rehearsal:
    from ..planner.rehearsal import rehearse

    if parsed.install:
        from .._integrations.install import install

        install()
    name, *passed_on = parsed.what
    with output_aside():
        return rehearse(lambda: run_program(name, passed_on, parsed.is_module), parsed.devices, parsed.steps)


def _of_model(parsed: argparse.Namespace) -> Rehearsal:
    from ..planner.precision import precision_of
    from ..planner.rehearsal import rehearse_source
    from ..planner.sources import source_of
    from ..planner.strategies import strategy_named

    if parsed.strategy == "none" and parsed.offload != "none":
        raise ShardConfigValueError(
            f"offload: '{parsed.offload}' needs sharded modules, but strategy 'none' shards nothing; use another "
            "strategy, such as 'zero3'"
        )
    import_from_here()
    precision = precision_of(parsed.precision, parsed.linear_format)
    source = source_of(parsed.what[0], parsed.sequence)
    strategy = strategy_named(parsed.strategy, parsed.devices, parsed.checkpointing, parsed.replicas)
    strategy = replace(strategy, **OFFLOADS[parsed.offload])
    return rehearse_source(source, strategy, precision, parsed.batch, parsed.optimizer, bits_of(parsed))


def tables(seen: Rehearsal, disk_bandwidth: int | None = None) -> list[Table]:
    """A rehearsal as tables. With a disk bandwidth in bytes per second, they contain the disk time of a step."""
    peak = seen.peak
    kinds = (
        ("parameters", peak.parameters),
        ("gradients", peak.gradients),
        ("optimizer", peak.optimizer),
        ("unsharded parameters and communication", peak.unsharded),
        ("activations and other tensors", peak.activations),
        ("total", peak.total),
    )
    rows = [(name, in_bytes(nbytes), f"{nbytes / max(1, peak.total):.0%}") for name, nbytes in kinds]
    phase = {"forward": "before the backward", "backward": "in the backward", "optimizer": "in the optimizer"}[
        seen.phase
    ]
    notes = [
        f"{count(seen.steps, 'step')} ran; the allocator of a device reserves more memory than tensors use: see advise",
        *(f"the output shape of {name} depends on values; the largest shape was assumed" for name in seen.guessed),
    ]
    if (seen.step, seen.phase) == (1, "forward"):
        notes.append(
            "the peak may come from the model before it is sharded; create it on the meta device to avoid this"
        )
    if seen.steps == 1:
        notes.append("the program has ended after one step; later steps have optimizer state and use more memory")
    return [
        Table(f"Peak memory of 1 of {count(seen.ranks, 'rank')}: {phase} of step {seen.step}", rows),
        *_offloaded(seen.offloaded, disk_bandwidth),
        Table("Notes", [(note,) for note in notes]),
    ]


def _offloaded(seen: Offloaded, bandwidth: int | None) -> list[Table]:
    rows = [("in host memory", in_bytes(seen.host))] if seen.host else []
    if seen.disk:
        rows += [("on disk", in_bytes(seen.disk)), ("read and written per step", in_bytes(seen.moved))]
    if seen.disk and bandwidth:
        rows += [(f"time of disk access at {in_bytes(bandwidth)}/s", in_seconds(seen.moved / bandwidth))]
    return [Table("Offloaded", rows)] if rows else []
