"""``advise``: compare sharding strategies for a model, a number of devices and a network, before a run."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ComposableShardError
from .bits import add_bits, bits_of
from .program import described, import_from_here
from .terminal import Table, add_debug, draw, say_error, size

if TYPE_CHECKING:
    from ..planner import Machine

NAME = "advise"
DESCRIPTION = """\
Recommend a sharding strategy for a model and a number of devices. Print memory by category, step time and missing
memory of every strategy. No device is needed and nothing is allocated: a step of the model is traced with fake tensors.

MODEL is a named shape (llama3-8b, gpt2-124m, ...), a shape as text (layers=...,width=...), the path of a Hugging Face
config.json, or the import path of a function that makes your model (package.module:function).
"""
EXAMPLE = """\
examples:
  python -m composable_shard advise llama3-8b --devices 8 --machine h100 --batch 2
  python -m composable_shard advise llama3-8b --devices 8 --linear-format float8_tensorwise --compile-blocks
  python -m composable_shard advise layers=12,width=768,heads=12,vocabulary=50304,sequence=1024 --devices 4
  python -m composable_shard advise my_package.models:build --sequence 2048 --devices 16 --machine machine.json

exit codes: 0 a strategy fits; 1 no strategy fits; 2 the arguments are wrong.
"""


def add_command(commands: Any) -> None:
    """Add this command to a parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        NAME,
        help="compare sharding strategies for a model, a number of devices and a network",
        description=DESCRIPTION,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a shape, a config.json, or package.module:function")
    add("--devices", type=int, required=True, metavar="N", help="number of devices")
    add(
        "--machine",
        default="h100",
        metavar="NAME",
        help="a known machine, or a file written by measure-links (default: h100)",
    )
    add("--memory", type=size, metavar="SIZE", help="memory of a device, such as 40GiB (default: that of the machine)")
    add(
        "--host-memory",
        type=size,
        metavar="SIZE",
        help="host memory per device; offload that does not fit into it uses the disk",
    )
    add("--intra-node", type=size, metavar="SIZE", help="bytes per second between devices of a node, such as 300GB")
    add("--inter-node", type=size, metavar="SIZE", help="bytes per second of a device to other nodes, such as 25GB")
    add("--disk", type=size, metavar="SIZE", help="bytes per second of a disk for each device, such as 2GB")
    add("--batch", type=int, default=1, metavar="N", help="sequences per step and device (default: 1)")
    add("--sequence", type=int, metavar="N", help="tokens per sequence")
    add(
        "--precision", default="bfloat16-mixed", metavar="NAME", help="float32, bfloat16-mixed (default), bfloat16, ..."
    )
    add("--tensor", type=_integers, default=(1,), metavar="N,N", help="ranks of tensor parallelism to try (default: 1)")
    add("--adapters", type=int, default=0, metavar="RANK", help="train only adapters of this rank (LoRA)")
    add("--optimizer", default="adamw", metavar="NAME", help="adamw (default), in_backward, or owned (Muon)")
    add_bits(parser)
    add("--compile-blocks", action="store_true", help="predict blocks that torch.compile has compiled")
    add("--all", action="store_true", help="show every strategy instead of the first 12")
    add("--emit", type=Path, metavar="FILE", help="write the code that shards a model by the recommended strategy")
    add("--plot", type=Path, metavar="FILE", help="draw memory by category, and step time over bandwidth")
    add("--json", action="store_true", help="print one JSON object, also for errors")
    add_debug(parser)
    parser.set_defaults(command=lambda parsed: _run(parsed, parser))


def _run(parsed: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from ..planner import text
    from ..planner.advise import advise, machine_of
    from ..planner.picture import draw as draw_picture

    import_from_here()
    try:
        advice = advise(
            parsed.model,
            devices=parsed.devices,
            machine=_adjusted(machine_of(parsed.machine), parsed),
            batch=parsed.batch,
            sequence=parsed.sequence,
            precision=parsed.precision,
            tensor=parsed.tensor,
            adapters=parsed.adapters,
            optimizer=parsed.optimizer,
            comm_policy=bits_of(parsed),
            linear_format=parsed.linear_format,
            compile_blocks=parsed.compile_blocks,
        )
        if parsed.emit and advice.recommended is not None:
            parsed.emit.write_text(text.script(advice, advice.recommended))
        if parsed.plot:
            draw_picture(advice, parsed.plot)
    except Exception as error:  # the user's model may raise any error
        ours = isinstance(error, (ComposableShardError, OSError, ImportError))
        say_error(parser, parsed, error, "" if ours else described(error))
        return 2
    if parsed.json:
        print(json.dumps(text.as_json(advice)))
    else:
        _print(advice, None if parsed.all else 12)
    return 0 if advice.recommended is not None else 1


def _adjusted(machine: Machine, parsed: argparse.Namespace) -> Machine:
    given = {"memory": parsed.memory, "host_memory": parsed.host_memory, "disk_bandwidth": parsed.disk}
    for name in ("intra_node", "inter_node"):
        bandwidth = getattr(parsed, name)
        given[name] = None if bandwidth is None else replace(getattr(machine, name), bandwidth=bandwidth)
    return replace(machine, **{name: value for name, value in given.items() if value is not None})


def _print(advice: Any, most: int | None) -> None:
    from ..planner import text

    numbers = range(2, len(text.HEAD))
    styles = [_style(advice, estimate) for estimate in text.shown(advice, most)]
    if draw([Table(text.title(advice), text.rows(advice, most), text.HEAD, numbers, styles, text.NOTE)]):
        print(advice.reason)
    else:
        print(text.text(advice, most))


def _style(advice: Any, estimate: Any) -> str:
    if estimate is advice.recommended:
        return "bold green"
    return "" if estimate.fits else "dim"


def _integers(given: str) -> tuple[int, ...]:
    return tuple(int(each) for each in given.split(","))
