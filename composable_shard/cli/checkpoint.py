"""``checkpoint``: a directory of checkpoints looked at, checked, laid out anew, thinned out or exported."""

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
from .._errors import CheckpointError, ComposableShardError
from ..checkpoint._convert import export_safetensors, reshard
from ..checkpoint._describe import Info, TensorInfo, describe, grouped
from ..checkpoint._format.manifest import DTYPES
from .terminal import add_debug, aligned, count, in_bytes, printable, progress, say_error, size

NAME = "checkpoint"
DESCRIPTION = """\
Look at, check or rewrite checkpoints that composable_shard.checkpoint.save has made. DIR is the directory that save
was given, or one checkpoint in it. No process group, device or model is needed, and nothing that a checkpoint holds
is executed.
"""
EXIT_CODES = """\
exit codes: 0 it is done, and what was read is whole; 1 the checkpoint is damaged, unsafe or not there, or a file could
not be written; 2 the arguments are wrong.
"""
_OUT = "directory of checkpoints to commit the new one into"
_Answer = tuple[dict[str, Any], str]  # what --json prints, and what is printed without
_Action = Callable[[argparse.Namespace], _Answer]


def add_command(commands: Any) -> None:
    """Let a parser know of this command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        NAME,
        help="look at, check, rewrite or export checkpoints",
        description=DESCRIPTION,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    _add(actions, "verify", _verify, "read all files and compare them with their checksums")
    info = _add(actions, "info", _info, "say what a checkpoint holds")
    info.add_argument("--tensors", action="store_true", help="list every tensor, not those of all layers as one")
    consolidate = _add(actions, "consolidate", _consolidate, "write a checkpoint anew, as one file")
    consolidate.add_argument("out", metavar="OUT", type=Path, help=_OUT)
    again = _add(actions, "reshard", _reshard, "write a checkpoint anew, in the files of another number of ranks")
    again.add_argument("out", metavar="OUT", type=Path, help=_OUT)
    again.add_argument("--ranks", metavar="N", type=int, required=True, help="how many ranks")
    prune = _add(actions, "prune", _prune, "remove all but the newest checkpoints, and what saves cut off have left")
    prune.add_argument("--keep", metavar="N", type=int, required=True, help="how many stay; the latest always does")
    export = _add(actions, "export", _export, "write a module's weights for other programs, without the model")
    export.add_argument("out", metavar="OUT", type=Path, help="a directory that does not exist")
    export.add_argument("--format", choices=["safetensors"], default="safetensors", help="Hugging Face's layout")
    export.add_argument("--name", help='of the module in the state; by default "model", or the only one')
    export.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="of floating-point tensors")
    export.add_argument("--max-shard-size", metavar="SIZE", type=size, default=size("5GB"), help="of a file (5GB)")


def _add(
    actions: Any, name: str, action: Callable[[argparse.Namespace], _Answer], text: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=f"{text.capitalize()}.")
    parser.add_argument("directory", metavar="DIR", type=Path, help="directory of checkpoints, or one of them")
    if name != "prune":
        parser.add_argument("--step", type=int, help="which checkpoint; by default the latest")
    parser.add_argument("--json", action="store_true", help="print one object of JSON, of errors as well")
    add_debug(parser)
    parser.set_defaults(command=lambda parsed: _run(action, parsed, parser))
    return parser


def _run(action: _Action, parsed: argparse.Namespace, parser: Any) -> int:
    try:
        if not parsed.directory.is_dir():
            raise NotADirectoryError(f"{parsed.directory} is not a directory")
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
    return answer, f"{whole.path} is whole: step {whole.step}, {count(whole.files, 'file')} of {in_bytes(whole.bytes)}"


def _info(parsed: argparse.Namespace) -> _Answer:
    info = describe(parsed.directory, parsed.step)
    tensors = info.tensors if parsed.tensors else tuple(grouped(info.tensors))
    answer = {**asdict(info), "tensors": [asdict(each) for each in tensors]}
    return answer, printable("\n".join(_described(info, tensors)))


def _consolidate(parsed: argparse.Namespace) -> _Answer:
    return _rewritten(parsed, 1)


def _reshard(parsed: argparse.Namespace) -> _Answer:
    return _rewritten(parsed, parsed.ranks)


def _rewritten(parsed: argparse.Namespace, ranks: int) -> _Answer:
    with _bar("write") as bar:
        path = reshard(parsed.directory, parsed.out, ranks=ranks, step=parsed.step, progress=bar)
    return {"path": str(path), "files": ranks}, f"{path}: {count(ranks, 'file')}"


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
        yield f"{name} is of a save that has not ended, and does not count"
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
