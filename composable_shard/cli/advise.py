"""``advise``: which strategy for a model, some devices and a network, before anything runs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from .._errors import ComposableShardError
from .bits import add_bits, bits_of
from .program import described, import_from_here
from .terminal import Table, add_debug, draw, say_error, size

NAME = "advise"
DESCRIPTION = """\
Say which strategy to take for a model on some devices: memory by kind, time of a step and what does not fit, for every
strategy there is. No device is needed and nothing is allocated: a step of the model is traced with fake tensors.

MODEL is a named shape (llama3-8b, gpt2-124m, ...), a shape in words, the path of a Hugging Face config.json, or the
import path of a function that makes your model (package.module:function).
"""
EXAMPLE = """\
examples:
  python -m composable_shard advise llama3-8b --devices 8 --machine h100 --batch 2
  python -m composable_shard advise layers=12,width=768,heads=12,vocabulary=50304,sequence=1024 --devices 4
  python -m composable_shard advise my_package.models:build --sequence 2048 --devices 16 --machine machine.json

exit codes: 0 a strategy fits; 1 none does; 2 the arguments are wrong.
"""


def add_command(commands: Any) -> None:
    """Let a parser know of this command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        NAME,
        help="which strategy for a model, some devices and a network",
        description=DESCRIPTION,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a shape, a config.json, or package.module:function")
    add("--devices", type=int, required=True, metavar="N", help="how many there are")
    add("--machine", default="h100", metavar="NAME", help="a known one, or a file of measure-links (default: h100)")
    add("--memory", type=size, metavar="SIZE", help="of a device, such as 40GiB, in the place of the machine's")
    add(
        "--host-memory",
        type=size,
        metavar="SIZE",
        help="of the host for each device: offload must fit, or goes to disk",
    )
    add("--intra-node", type=size, metavar="SIZE", help="bytes a second between devices of a node, such as 300GB")
    add("--inter-node", type=size, metavar="SIZE", help="bytes a second of a device to other nodes, such as 25GB")
    add("--disk", type=size, metavar="SIZE", help="bytes a second of a disk for each device, such as 2GB")
    add("--batch", type=int, default=1, metavar="N", help="sequences of a step for each device (default: 1)")
    add("--sequence", type=int, metavar="N", help="tokens of a sequence")
    add(
        "--precision", default="bfloat16-mixed", metavar="NAME", help="float32, bfloat16-mixed (default), bfloat16, ..."
    )
    add("--tensor", type=_integers, default=(1,), metavar="N,N", help="ranks of tensor parallelism to try (default: 1)")
    add("--adapters", type=int, default=0, metavar="RANK", help="train adapters of this rank alone (LoRA)")
    add("--optimizer", default="adamw", metavar="NAME", help="adamw (default), in_backward, or owned (Muon)")
    add_bits(parser)
    add("--all", action="store_true", help="show every strategy, not the first dozen")
    add("--emit", type=Path, metavar="FILE", help="write the lines that shard a model so")
    add("--plot", type=Path, metavar="FILE", help="draw memory by kind, and time against bandwidth")
    add("--json", action="store_true", help="print one object of JSON, of errors as well")
    add_debug(parser)
    parser.set_defaults(command=lambda parsed: _run(parsed, parser))


def _run(parsed: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from ..planner import text
    from ..planner.advise import advise
    from ..planner.picture import draw as draw_picture

    import_from_here()
    try:
        advice = advise(
            parsed.model,
            devices=parsed.devices,
            machine=parsed.machine,
            memory_per_device=parsed.memory,
            host_memory_per_device=parsed.host_memory,
            intra_node=parsed.intra_node,
            inter_node=parsed.inter_node,
            disk_bandwidth=parsed.disk,
            batch=parsed.batch,
            sequence=parsed.sequence,
            precision=parsed.precision,
            tensor=parsed.tensor,
            adapters=parsed.adapters,
            optimizer=parsed.optimizer,
            comm_policy=bits_of(parsed),
        )
        if parsed.emit and advice.recommended is not None:
            parsed.emit.write_text(text.script(advice, advice.recommended))
        if parsed.plot:
            draw_picture(advice, parsed.plot)
    except Exception as error:  # a model of the user's may raise anything
        ours = isinstance(error, (ComposableShardError, OSError, ImportError))
        say_error(parser, parsed, error, "" if ours else described(error))
        return 2
    if parsed.json:
        print(json.dumps(text.as_json(advice)))
    else:
        _print(advice, None if parsed.all else 12)
    return 0 if advice.recommended is not None else 1


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
