"""The entry point of the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from . import advise, checkpoint, env, estimate, explain, measure_links, run, trace

COMMANDS = (
    run,
    advise,
    estimate,
    explain,
    trace,
    checkpoint,
    env,
    measure_links,
)  # each has `add_command`, which sets `command`: a function that takes the parsed arguments


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: arguments without the program's name. Default: those of this process.

    Returns:
        the exit code.

    Raises:
        SystemExit: the arguments are wrong (code 2), or ask for help (0); or a script that was run has exited.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    passed_on: list[str] = []
    if given[:1] == [run.NAME]:
        given, passed_on = run.split(given)
    parsed = _parser().parse_args(given, argparse.Namespace(passed_on=passed_on))
    code: int = parsed.command(parsed)
    return code


def _parser() -> argparse.ArgumentParser:
    started_as = Path(sys.argv[0]).name if sys.argv else ""
    program = "composable-shard" if started_as.startswith("composable-shard") else "python -m composable_shard"
    parser = argparse.ArgumentParser(prog=program, description="Tools for sharded training with PyTorch.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for each in COMMANDS:
        each.add_command(commands)
    return parser
