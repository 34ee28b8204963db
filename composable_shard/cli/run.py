"""``run``: a script or a module that is not changed, with this library in the place of torch's FSDP2."""

from __future__ import annotations

import argparse
import builtins
import multiprocessing
import os
import pkgutil
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader, SourcelessFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from .._integrations.install import install

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
# Packages of the frames that are around those of a script, or of the packages that a module is in.
_AROUND = {"composable_shard", "importlib", "_frozen_importlib", "_frozen_importlib_external", "pkgutil", "zipimport"}


class _NotFoundError(Exception):
    """There is no such script or module; the message says why."""


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
        module, code = _find(parsed)
        sys.modules["__main__"] = module
        exec(code, vars(module))
    except _NotFoundError as error:
        sys.stderr.write(f"{parser.prog}: {error}\n")
        return 2
    except BaseException as error:
        _hide_our_frames(error)
        raise
    return 0


def _keep_importable() -> None:
    """See that child processes, which get `sys.path`, find this library without the place that the script's takes."""
    home = Path(__file__).parents[1]
    others = 0 if sys.flags.safe_path else 1
    spec = PathFinder.find_spec(_KEY, sys.path[others:])
    if spec is None or spec.origin != str(home / "__init__.py"):  # a checkout that is the current directory
        sys.path.insert(others, str(home.parent))


def _find(parsed: argparse.Namespace) -> tuple[ModuleType, CodeType]:
    """The main module that Python would make, and its code; `sys.argv` and `sys.path` are as it would have them."""
    if parsed.module is None:
        sys.argv[:] = [parsed.script, *parsed.passed_on]
        return _script(parsed.script)
    _set_first_path(os.getcwd())
    sys.argv[:] = ["-m", *parsed.passed_on]  # which packages around the module see
    module, code = _module(parsed.module, find_spec)
    sys.argv[0] = module.__file__ or parsed.module
    return module, code


def _hide_our_frames(error: BaseException) -> None:
    """Have an exception that nobody catches shown without the frames around the script's."""
    shown = error.__traceback__
    while shown is not None and str(shown.tb_frame.f_globals.get("__name__")).partition(".")[0] in _AROUND:
        shown = shown.tb_next
    show = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
        if value is error:
            value, traceback = value.with_traceback(shown), shown
        show(kind, value, traceback)

    sys.excepthook = hook


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


def _script(path: str) -> tuple[ModuleType, CodeType]:
    """What Python would run for a path that it is given, as its main module."""
    file = os.path.join(os.getcwd(), path)
    if pkgutil.get_importer(file) is not None:  # a directory or an archive
        if PathFinder.find_spec("__main__", [file]) is None:
            raise _NotFoundError(f"can't find __main__.py in {path!r}")
        _set_first_path(file)
        return _module("__main__", lambda name: PathFinder.find_spec(name, [file]))
    try:
        compiled = path.endswith(".pyc")
        loader: Any = (SourcelessFileLoader if compiled else SourceFileLoader)("__main__", file)
        content = loader.get_data(file)
    except OSError as error:
        raise _NotFoundError(f"can't open file {path!r}: {error.strerror}") from None
    _set_first_path(os.path.dirname(os.path.realpath(file)))
    code = loader.get_code("__main__") if compiled else loader.source_to_code(content, file)
    return _main_module(None, loader, file), code


def _module(name: str, find: Callable[[str], ModuleSpec | None]) -> tuple[ModuleType, CodeType]:
    """What Python would run for ``-m name``."""
    if not all(name.split(".")):
        raise _NotFoundError(f"{name!r} is not the full name of a module")
    try:
        spec = find(name)
    except ModuleNotFoundError as error:
        if f"{name}.".startswith(f"{error.name}."):  # it, or a package around it
            raise _NotFoundError(f"no module named {name}: {error}") from None
        raise
    if spec is not None and spec.submodule_search_locations is not None and not name.endswith(".__main__"):
        return _module(f"{name}.__main__", find)
    if spec is None or spec.loader is None:
        raise _NotFoundError(f"no module named {name}")
    code = spec.loader.get_code(name)  # type: ignore[attr-defined]
    if code is None:
        raise _NotFoundError(f"{name} holds no Python code")
    return _main_module(spec, spec.loader, spec.origin), code


def _main_module(spec: ModuleSpec | None, loader: Any, file: str | None) -> ModuleType:
    module = ModuleType("__main__")
    package, cached = (None, None) if spec is None else (spec.parent, spec.cached)
    vars(module).update(
        __spec__=spec, __loader__=loader, __file__=file, __package__=package, __cached__=cached, __builtins__=builtins
    )
    vars(module)["__annotations__"] = {}
    return module


def _set_first_path(path: str) -> None:
    """Where Python looks for modules first: what belongs to this program makes room for what belongs to the script."""
    if not sys.flags.safe_path:
        sys.path[0] = path
