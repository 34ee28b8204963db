"""``estimate``: the peak memory of a training script, or of a model, by steps that run with fake tensors."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from .._errors import ComposableShardError, ShardConfigValueError
from .bits import add_bits, bits_of
from .program import NotFoundError, described, import_from_here, output_aside, run_program
from .terminal import Table, add_debug, count, in_bytes, in_seconds, say_error, show, size

if TYPE_CHECKING:
    from ..planner.off_device import Offloaded
    from ..planner.rehearsal import Rehearsal

NAME = "estimate"
DESCRIPTION = """\
Say how much memory a training takes on one of N devices at most, and for what. Steps of it run with fake tensors, which
have shapes and no memory, as rank 0 of N ranks of which the others do not exist. So no device is needed, and the model
may be larger than this machine.

WHAT is a training script, which is not changed, with its arguments; or -m and a module. The script runs until its
optimizer has stepped three times, outside of which it does all that it does: it reads its data and writes its logs.
torch.save and checkpoints of this library and of torch.distributed do nothing, and torch.compile does not compile.

Or WHAT is a model, as `advise` takes it: a named shape, a shape in words, a config.json, or package.module:function.
"""
EXAMPLE = """\
examples:
  python -m composable_shard estimate --devices 8 train.py --batch-size 4
  python -m composable_shard estimate --devices 8 --install -m my_package.train
  python -m composable_shard estimate --devices 64 --strategy zero3 --batch 2 llama3-8b

exit codes: 0 done, and fits into --memory; 1 it does not fit; 2 the arguments are wrong, or the script has failed.
"""
STRATEGIES = ("none", "ddp", "zero1", "zero2", "zero3", "hsdp")
OFFLOADS: dict[str, dict[str, Any]] = {
    "none": {},
    "all": {"offload": True},  # shards, gradients and optimizer, on the host
    "optimizer": {"state": True},  # on the host, alone
    "disk": {"offload": True, "disk": True},
}


def add_command(commands: Any) -> None:
    """Let a parser know of this command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        NAME,
        usage="%(prog)s [-h] [options] WHAT [ARGUMENT ...]",
        help="the peak memory of a training script or a model, without a device",
        description=DESCRIPTION,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("what", nargs=argparse.REMAINDER, metavar="WHAT", help="a script with its arguments, or a model")
    add("-m", dest="is_module", action="store_true", help="WHAT is a module, as for python -m")
    add("--devices", type=int, default=1, metavar="N", help="how many ranks train (default: 1)")
    add("--memory", type=size, metavar="SIZE", help="of a device, such as 40GiB, into which it shall fit")
    add("--json", action="store_true", help="print one object of JSON")
    add("--disk", type=size, metavar="SIZE", help="bytes a second of a disk, such as 2GB, for seconds of what is there")
    scripts = parser.add_argument_group("of scripts")
    scripts.add_argument("--steps", type=int, default=3, metavar="N", help="of the optimizer (default: 3)")
    scripts.add_argument("--install", action="store_true", help="this library in the place of FSDP2, as `run` does")
    models = parser.add_argument_group("of models")
    add = models.add_argument
    add("--strategy", choices=STRATEGIES, default="zero3", help="how it is sharded (default: zero3)")
    add("--replicas", type=int, default=2, metavar="N", help="of hsdp (default: 2)")
    add("--checkpointing", choices=("none", "selective", "full"), default="none", help="of blocks (default: none)")
    add("--offload", choices=OFFLOADS, default="none", help="what is not on the device (default: none)")
    add("--batch", type=int, default=1, metavar="N", help="sequences of a step for each device (default: 1)")
    add("--sequence", type=int, metavar="N", help="tokens of a sequence")
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
            f"{parsed.what[0]} is a model, and takes no arguments: {' '.join(parsed.what[1:])} "
            "(options of this command stand before it)"
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
                f"\nIt does not fit into {in_bytes(parsed.memory)}: {in_bytes(seen.peak.total - parsed.memory)} more."
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
            f"offload: '{parsed.offload}' is a policy of sharded modules, and strategy 'none' shards nothing; "
            "take another one, such as 'zero3'"
        )
    import_from_here()
    precision, source = precision_of(parsed.precision), source_of(parsed.what[0], parsed.sequence)
    strategy = strategy_named(parsed.strategy, parsed.devices, parsed.checkpointing, parsed.replicas)
    strategy = replace(strategy, **OFFLOADS[parsed.offload])
    return rehearse_source(source, strategy, precision, parsed.batch, parsed.optimizer, bits_of(parsed))


def tables(seen: Rehearsal, disk_bandwidth: int | None = None) -> list[Table]:
    """A rehearsal in words; with bytes a second of a disk, also how long a step is at it."""
    peak = seen.peak
    kinds = (
        ("parameters", peak.parameters),
        ("gradients", peak.gradients),
        ("optimizer", peak.optimizer),
        ("gathered parameters and communication", peak.unsharded),
        ("activations, and the rest", peak.activations),
        ("together", peak.total),
    )
    rows = [(name, in_bytes(nbytes), f"{nbytes / max(1, peak.total):.0%}") for name, nbytes in kinds]
    phase = {"forward": "before the backward", "backward": "in the backward", "optimizer": "in the optimizer"}[
        seen.phase
    ]
    notes = [
        f"{count(seen.steps, 'step')} ran; an allocator of a device reserves more than tensors take: see advise",
        *(f"{name} depends on values, and was taken to be as large as it can be" for name in seen.guessed),
    ]
    if (seen.step, seen.phase) == (1, "forward"):
        notes.append("a model that is whole before it is sharded may be the most; make it on meta, and it is not")
    if seen.steps == 1:
        notes.append("the program has ended itself; a second step begins with the optimizer's state and takes more")
    return [
        Table(f"Peak memory of 1 of {count(seen.ranks, 'rank')}: {phase} of step {seen.step}", rows),
        *_offloaded(seen.offloaded, disk_bandwidth),
        Table("Notes", [(note,) for note in notes]),
    ]


def _offloaded(seen: Offloaded, bandwidth: int | None) -> list[Table]:
    rows = [("in the memory of the host", in_bytes(seen.host))] if seen.host else []
    if seen.disk:
        rows += [("on disk", in_bytes(seen.disk)), ("read and written in a step", in_bytes(seen.moved))]
    if seen.disk and bandwidth:
        rows += [(f"which takes, at {in_bytes(bandwidth)} a second", in_seconds(seen.moved / bandwidth))]
    return [Table("Beside the device", rows)] if rows else []
