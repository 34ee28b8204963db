"""``run``: a script or a module that is not changed, with this library in the place of torch's FSDP2."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from .._integrations.install import install
from .program import NotFoundError, run_program

NAME = "run"
DESCRIPTION = """\
Run a script, or a module, as Python alone would, after composable_shard.install(): wherever it, or a library that
it uses, calls torch's fully_shard, this library shards. The script is not changed.

Processes that it starts with multiprocessing get install(), too; those that it starts by a command line do not.
"""
EXAMPLE = """\
examples:
  python -m composable_shard run train.py --lr 3e-4
  torchrun --nproc-per-node 8 -m composable_shard run train.py --lr 3e-4
  torchrun --nproc-per-node 8 -m composable_shard run -m my_package.train --lr 3e-4
  accelerate launch --config_file fsdp2.yaml -m composable_shard run train.py
"""

_KEY = "composable_shard"  # in the configuration that processes of multiprocessing hand on


def add_command(commands: Any) -> None:
    """Let a parser know of this command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        NAME,
        usage="%(prog)s [-h] (SCRIPT | -m MODULE) [ARGUMENT ...]",
        help="run a script that uses torch's FSDP2, with this library in its place",
        description=DESCRIPTION,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("script", nargs="?", metavar="SCRIPT", help="a file, or a directory or zip with __main__.py")
    parser.add_argument("-m", dest="module", metavar="MODULE", help="a module, as for python -m")
    parser.set_defaults(command=lambda parsed: _run(parsed, parser))


def split(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """Of a command line that begins with this command's name: what is for the command, and what for the script."""
    for at, word in enumerate(given[1:], start=1):
        if word == "-m":
            return list(given[: at + 2]), list(given[at + 2 :])
        if word.startswith("-m") or not word.startswith("-"):
            return list(given[: at + 1]), list(given[at + 1 :])
    return list(given), []


def _run(parsed: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if parsed.script is None and parsed.module is None:
        parser.error("give a SCRIPT, or -m MODULE")
    install()
    _keep_importable()
    multiprocessing.current_process()._config[_KEY] = _InstallInChild()  # type: ignore[attr-defined]
    try:
        run_program(parsed.module or parsed.script, parsed.passed_on, parsed.module is not None)
    except NotFoundError as error:
        sys.stderr.write(f"{parser.prog}: {error}\n")
        return 2
    return 0


def _keep_importable() -> None:
    """See that child processes, which get `sys.path`, find this library without the place that the script's takes."""
    home = Path(__file__).parents[1]
    others = 0 if sys.flags.safe_path else 1
    spec = PathFinder.find_spec(_KEY, sys.path[others:])
    if spec is None or spec.origin != str(home / "__init__.py"):  # a checkout that is the current directory
        sys.path.insert(others, str(home.parent))


class _InstallInChild:
    """Kept among what a process of multiprocessing hands on to those that it starts; these install when they load it.

    Spawned processes import the script again before, so what its first level does with torch's functions beyond
    importing them is done with torch's own.
    """

    def __reduce__(self) -> tuple[Callable[[], _InstallInChild], tuple[()]]:
        return _install_in_child, ()


def _install_in_child() -> _InstallInChild:
    install()
    return _InstallInChild()
