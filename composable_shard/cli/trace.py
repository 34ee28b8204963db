"""``trace``: write one step of a training script as a trace, figures and text."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from ..errors import ComposableShardError
from .program import NotFoundError, described, output_aside, run_program
from .terminal import add_debug, printable, say_error

NAME = "trace"
DESCRIPTION = """\
Run an unchanged training script to the end of one of its steps, and write what its sharded models did in that step: a
trace for ui.perfetto.dev or chrome://tracing (step.json), figures of memory and time (memory.png and time.png, which
need matplotlib), the plan and the record, which `explain` reads, and the explanation, which is also printed.

Under a launcher all ranks run the step, and rank 0 writes. The script is stopped after the step. Its output goes to
stderr.
"""
EXAMPLE = """\
examples:
  torchrun --nproc-per-node 2 -m composable_shard trace --out trace train.py --lr 3e-4
  torchrun --nproc-per-node 8 -m composable_shard trace --install --step 20 -m my_package.train

exit codes: 0 done; 2 the arguments are wrong, or the script failed or ended too early.
"""


def add_command(commands: Any) -> None:
    """Add this command to a parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        NAME,
        usage="%(prog)s [-h] [options] SCRIPT [ARGUMENT ...]",
        help="write one step of a training script as a trace, figures and text",
        description=DESCRIPTION,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("script", nargs=argparse.REMAINDER, metavar="SCRIPT", help="a script with its arguments")
    add("-m", dest="is_module", action="store_true", help="SCRIPT is a module, as for python -m")
    add("--step", type=int, default=5, metavar="N", help="the step, at least 2 (default: 5)")
    add("--out", type=Path, default=Path("trace"), metavar="DIR", help="folder for the files (default: trace)")
    add("--install", action="store_true", help="replace FSDP2 with this library, as `run` does")
    add("--json", action="store_true", help="print one JSON object")
    add_debug(parser)
    parser.set_defaults(command=lambda parsed: _run(parsed, parser))


def _run(parsed: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from ..report._capture import capture

    if not parsed.script:
        parser.error("give a SCRIPT, or -m MODULE")
    if parsed.install:
        from .._integrations.install import install

        install()
    name, *passed_on = parsed.script
    writes = os.environ.get("RANK", "0") == "0"
    folder = parsed.out.absolute()  # the script may change the directory
    try:
        with output_aside():
            models = capture(lambda: run_program(name, passed_on, parsed.is_module), folder, parsed.step, writes)
    except Exception as error:
        ours = isinstance(error, (ComposableShardError, NotFoundError))
        say_error(parser, parsed, error, "" if ours else described(error))
        return 2
    if parsed.json and writes:
        written = [{"model": each.model, "folder": str(each.folder), "files": each.files} for each in models]
        print(json.dumps({"step": parsed.step, "models": written}))
        return 0
    for each in models:
        print(f"{each.model}, step {parsed.step}: {', '.join(each.files)} in {each.folder}\n\n{printable(each.text)}")
    return 0
