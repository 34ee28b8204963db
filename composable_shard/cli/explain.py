"""``explain``: show where the time of a planned step goes and what to change, or where ranks diverged."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from .._plan.plan import ShardPlan
from .._plan.record import Record
from ..errors import ComposableShardError, ShardConfigValueError
from .terminal import Table, add_debug, draw, printable, say_error, size

NAME = "explain"
DESCRIPTION = """\
Explain a plan: where the time of a training step goes, which gathers and reductions are exposed and why, and what to
change, with the gain of each change. Everything is simulated. No device and no model is needed.

PLAN is a file that a training script writes, and so is the record of a step:

  model.set_prefetch_policy(cs.PrefetchPolicy.auto())  # measures times; or call cs.watch(model), and write a record
  ...  # some steps
  Path("plan.json").write_text(cs.make_plan(model).to_json())
  Path("record.json").write_text(cs.last_record(model).to_json())

PLAN may also be a folder of ledgers. If the environment variable COMPOSABLE_SHARD_FAULTS names a folder, ranks that
cannot continue together (RankMismatchError, PeerLostError) write their last actions there. The actions of all ranks are
compared: where they diverged, what each rank did there, and which ranks wrote nothing.
"""
EXAMPLE = """\
examples:
  python -m composable_shard explain plan.json
  python -m composable_shard explain plan.json --record record.json --budget 2GiB
  python -m composable_shard explain plan.json --machine h100 --plot step.png
  COMPOSABLE_SHARD_FAULTS=faults torchrun --nproc-per-node 8 train.py; python -m composable_shard explain faults

exit codes: 0 done; 2 the arguments or files are wrong.
"""
T = TypeVar("T")


def add_command(commands: Any) -> None:
    """Add this command to a parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        NAME,
        help="find exposed communication, or the action at which ranks diverged",
        description=DESCRIPTION,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "plan",
        metavar="PLAN",
        type=Path,
        help="a file with the output of make_plan(model).to_json(), or a folder of ledgers",
    )
    add("--record", metavar="FILE", type=Path, help="a file with the output of last_record(model).to_json()")
    add("--machine", metavar="NAME", help="use the links of a known machine, or of a file written by measure-links")
    add("--budget", metavar="SIZE", type=size, help="memory limit for changes, such as 2GiB; the best plan is shown")
    add("--plot", metavar="FILE", type=Path, help="draw where the time goes")
    add("--json", action="store_true", help="print one JSON object, also for errors")
    add_debug(parser)
    parser.set_defaults(command=lambda parsed: _run(parsed, parser))


def _run(parsed: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from .. import report

    if parsed.plan.is_dir():
        return _run_on_folder(parsed, parser)
    try:
        plan = _read(parsed.plan, ShardPlan.from_json)
        record = None if parsed.record is None else _read(parsed.record, Record.from_json)
        explanation = _explained(plan, record, parsed)
        if parsed.plot is not None:
            report.time(explanation.plan, parsed.plot, None if parsed.machine else record)
    except (ComposableShardError, OSError, ImportError) as error:
        say_error(parser, parsed, error)
        return 2
    if parsed.json:
        print(json.dumps(explanation.as_dict()))
    elif not draw(_tables(explanation.sections)):
        print(printable(str(explanation)))
    return 0


def _run_on_folder(parsed: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from ..report._explain_text import explanation_text
    from ..report._ledgers import explain_ledgers

    try:
        if any(each is not None for each in (parsed.record, parsed.machine, parsed.budget, parsed.plot)):
            raise ShardConfigValueError(f"{parsed.plan}: is a folder of ledgers, so options of plans are not allowed")
        explanation = explain_ledgers(parsed.plan)
    except (ComposableShardError, OSError) as error:
        say_error(parser, parsed, error)
        return 2
    sections = [*explanation.sections()]
    if parsed.json:
        print(json.dumps(explanation.as_dict()))
    elif not draw(_tables(sections)):
        print(printable(explanation_text(sections)))
    return 0


def _read(path: Path, made_of: Callable[[str], T]) -> T:
    """Read a file.

    Raises:
        ShardConfigValueError: the file cannot be read, or has other content. The message begins with its path.
    """
    try:
        return made_of(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ShardConfigValueError(
            f"{path}: cannot be read ({error.strerror}); --help shows how a script writes it"
        ) from None
    except (ShardConfigValueError, UnicodeDecodeError) as error:
        raise ShardConfigValueError(f"{path}: {error}") from None


def _explained(plan: ShardPlan, record: Record | None, parsed: argparse.Namespace) -> Any:
    from .. import report
    from ..planner.advise import machine_of
    from ..planner.timing import on_links
    from ..report._explain import with_times

    if parsed.machine is None:
        return report.explain(plan, record, budget=parsed.budget)
    machine = machine_of(parsed.machine)
    explanation = report.explain(on_links(with_times(plan, record), machine), budget=parsed.budget)
    return replace(explanation, times_from=f"measured compute, links of {machine.name}")


def _tables(sections: Sequence[Any]) -> list[Table]:
    """Convert sections to tables. A section without a table gets one row per sentence."""
    return [
        Table(
            each.title,
            each.rows or [(line,) for line in each.lines],
            each.heads,
            [number for number in range(len(each.heads)) if number not in each.left],
            note="\n".join(each.lines) if each.rows else "",
        )
        for each in sections
    ]
