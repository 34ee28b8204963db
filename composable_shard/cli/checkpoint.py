"""``checkpoint``: inspect, verify, prune or export a directory of checkpoints."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from .. import checkpoint
from .._plan.text import count
from ..checkpoint._convert import export_safetensors
from ..checkpoint._describe import Info, TensorInfo, describe, grouped
from ..checkpoint._format.manifest import DTYPES
from ..checkpoint._places import directory_of
from ..errors import CheckpointError, ComposableShardError
from .terminal import add_debug, aligned, in_bytes, printable, progress, say_error, size

NAME = "checkpoint"
DESCRIPTION = """\
Inspect, verify, prune or export checkpoints of composable_shard.checkpoint.save. DIR is the directory that save was
given, or one checkpoint in it. No process group, device or model is needed, and nothing that a checkpoint contains is
executed.
"""
EXIT_CODES = """\
exit codes: 0 done, and the files that were read are intact; 1 the checkpoint is damaged, unsafe or missing, or a file
could not be written; 2 the arguments are wrong.
"""
_Answer = tuple[dict[str, Any], str]  # the output with --json, and the output without
_Action = Callable[[argparse.Namespace], _Answer]


def add_command(commands: Any) -> None:
    """Add this command to a parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        NAME,
        help="inspect, verify, prune or export checkpoints",
        description=DESCRIPTION,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    _add(actions, "verify", _verify, "read all files and compare them with their checksums")
    info = _add(actions, "info", _info, "show the content of a checkpoint")
    info.add_argument("--tensors", action="store_true", help="list every tensor, instead of one line for all layers")
    prune = _add(actions, "prune", _prune, "remove all except the newest checkpoints, and files of interrupted saves")
    prune.add_argument("--keep", metavar="N", type=int, required=True, help="number to keep; the latest is always kept")
    export = _add(actions, "export", _export, "write the weights of a module as safetensors, in Hugging Face's layout")
    export.add_argument("out", metavar="OUT", help="a directory or URL that does not exist yet")
    export.add_argument("--name", help='name of the module in the state (default: "model", or the only one)')
    export.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="dtype of floating-point tensors")
    export.add_argument(
        "--max-shard-size", metavar="SIZE", type=size, default=size("5GB"), help="largest size of a file (default: 5GB)"
    )


def _add(
    actions: Any, name: str, action: Callable[[argparse.Namespace], _Answer], text: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=f"{text.capitalize()}.")
    parser.add_argument("directory", metavar="DIR", help="directory or URL of checkpoints, or one of them")
    if name != "prune":
        parser.add_argument("--step", type=int, help="step of the checkpoint (default: the latest)")
    parser.add_argument("--json", action="store_true", help="print one JSON object, also for errors")
    add_debug(parser)
    parser.set_defaults(command=lambda parsed: _run(action, parsed, parser))
    return parser


def _run(action: _Action, parsed: argparse.Namespace, parser: Any) -> int:
    try:
        directory = directory_of(parsed.directory)
        if isinstance(directory, Path) and not directory.is_dir():
            raise NotADirectoryError(f"{directory} is not a directory")
        answer, text = action(parsed)
    except (ComposableShardError, OSError) as error:
        damaged = isinstance(error, CheckpointError) or not isinstance(error, ComposableShardError | NotADirectoryError)
        say_error(parser, parsed, error)
        return 1 if damaged else 2
    print(json.dumps(answer) if parsed.json else text)
    return 0


# ------------------------------------------------------------------------------------------------------- actions


def _verify(parsed: argparse.Namespace) -> _Answer:
    with _bar("verify") as bar:
        whole = checkpoint.verify(parsed.directory, step=parsed.step, progress=bar)
    answer = {**asdict(whole), "path": str(whole.path)}
    return answer, f"{whole.path} is intact: step {whole.step}, {count(whole.files, 'file')} of {in_bytes(whole.bytes)}"


def _info(parsed: argparse.Namespace) -> _Answer:
    info = describe(parsed.directory, parsed.step)
    tensors = info.tensors if parsed.tensors else tuple(grouped(info.tensors))
    answer = {**asdict(info), "tensors": [asdict(each) for each in tensors]}
    return answer, printable("\n".join(_described(info, tensors)))


def _prune(parsed: argparse.Namespace) -> _Answer:
    removed = [str(path) for path in checkpoint.prune(parsed.directory, keep=parsed.keep)]
    return {"removed": removed}, "\n".join(f"removed {path}" for path in removed) or "nothing to remove"


def _export(parsed: argparse.Namespace) -> _Answer:
    with _bar("write") as bar:
        made = export_safetensors(
            parsed.directory,
            parsed.out,
            name=parsed.name,
            dtype=None if parsed.dtype is None else DTYPES[parsed.dtype],
            shard_bytes=parsed.max_shard_size,
            step=parsed.step,
            progress=bar,
        )
    sizes = f"{count(made.tensors, 'tensor')} of {in_bytes(made.bytes)} in {count(len(made.files), 'file')}"
    return {**asdict(made), "path": str(made.path)}, f"{made.path}: {sizes}"


# ---------------------------------------------------------------------------------------------------------- text


def _described(info: Info, tensors: tuple[TensorInfo, ...]) -> Iterator[str]:
    files = f"{count(len(info.files), 'file')} of {in_bytes(sum(info.files.values()))}"
    yield f"{info.path}: step {info.step}, saved by {count(info.ranks, 'rank')}, {files}, checksums {info.checksums}"
    if info.committed:
        yield f"steps here: {', '.join(map(str, info.committed))}; the latest is {info.latest}"
    for name in info.partial:
        yield f"{name} is from a save that did not finish, and is ignored"
    yield ""
    yield from aligned([[name, in_bytes(size)] for name, size in info.files.items()])
    yield ""
    for entry in info.entries:
        yield f"{entry.name}: {entry.kind}, {count(len(entry.tensors), 'tensor')}, {in_bytes(entry.bytes)}"
        if entry.value not in ({}, []):
            yield f"  {_short(json.dumps(entry.value))}"
    yield ""
    yield from aligned([_row(each) for each in tensors])


def _row(tensor: TensorInfo) -> list[str]:
    ties = f"also {', '.join(tensor.ties)}" if tensor.ties else ""
    pieces = count(tensor.pieces, "piece") if tensor.pieces != 1 else ""
    copies = f"{tensor.count} x" if tensor.count > 1 else ""
    return [tensor.name, copies, tensor.dtype, str(tensor.shape), in_bytes(tensor.bytes), pieces, ties]


def _short(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:297]}..."


@contextmanager
def _bar(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar of bytes."""
    with progress(of_bytes=True) as bar:
        yield None if bar is None else partial(bar, what)
