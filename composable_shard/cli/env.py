"""``env``: print versions, devices and supported features for a bug report."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from ..planner.environment import Device, Environment, environment
from .terminal import Table, in_bytes, show

NAME = "env"
DESCRIPTION = """\
Print the information for a bug report: versions, how torch was built, the platform, devices and their memory, backends
of torch.distributed, environment variables that affect the library, and which features work here or fall back. Optional
packages are not imported. Values that look like secrets are hidden; check the rest before you publish it.
"""
EXAMPLE = """\
examples:
  python -m composable_shard env > env.txt
  python -m composable_shard env --json

exit code: 0.
"""


def add_command(commands: Any) -> None:
    """Add this command to a parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        NAME,
        help="print versions, devices and supported features for a bug report",
        description=DESCRIPTION,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(command=_run)


def _run(parsed: argparse.Namespace) -> int:
    seen = environment()
    if parsed.json:
        print(json.dumps(seen.as_json(), indent=2))
    else:
        show(tables(seen))
    return 0


def tables(seen: Environment) -> list[Table]:
    """An environment as tables."""
    backends = [(name, "available" if has else "not in this build of torch") for name, has in seen.backends.items()]
    return [
        Table("Versions", _pairs(seen.versions)),
        Table("Build of torch", _pairs(seen.torch_build)),
        Table("Platform", [*_pairs(seen.platform), *_pairs(seen.tools)]),
        Table("Devices", [_device(device) for device in seen.devices], ("type", "name", "memory", "free")),
        Table("Backends of torch.distributed", backends),
        Table("Environment variables", _pairs(seen.variables) or [("none that affect the library", "")]),
        Table("What works here", [(each.what, each.state, each.why) for each in seen.support]),
    ]


def _pairs(values: Mapping[str, str | None]) -> list[tuple[str, str]]:
    return [(name, "not found" if value is None else value) for name, value in values.items()]


def _device(device: Device) -> tuple[str, str, str, str]:
    sizes = ("unknown" if size is None else in_bytes(size) for size in (device.memory, device.free))
    memory, free = sizes
    return device.kind, device.name, memory, free
