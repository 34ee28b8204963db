"""Run a script or a module that was passed to a command, as Python itself would run it."""

from __future__ import annotations

import builtins
import contextlib
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader, SourcelessFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

# Packages whose frames surround those of a script, or of the packages that contain a module.
_AROUND = {"composable_shard", "importlib", "_frozen_importlib", "_frozen_importlib_external", "pkgutil", "zipimport"}


class NotFoundError(Exception):
    """There is no such script or module. The message gives the reason."""


def run_program(name: str, passed_on: Sequence[str], is_module: bool = False) -> None:
    """Run a script, or a module, as the main program of this process.

    Args:
        name: the path of a file, or of a directory or archive with ``__main__.py``; or the full name of a module.
        passed_on: arguments of the program.
        is_module: whether `name` is a module.

    Raises:
        NotFoundError: there is no such program.
        BaseException: any error of the program. Its traceback is shown without the frames around those of the program.
    """
    try:
        module, code = _find(name, passed_on, is_module)
        sys.modules["__main__"] = module
        exec(code, vars(module))
    except NotFoundError:
        raise
    except BaseException as error:
        _hide_our_frames(error)
        raise


@contextlib.contextmanager
def output_aside() -> Iterator[None]:
    """Context that redirects the output of a program to stderr, so that the output of a command can be parsed."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def described(error: BaseException) -> str:
    """Describe an exception of a program, with the last line of its traceback that is in no package."""
    home, place, trace = str(Path(__file__).parents[1]), "", error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if "site-packages" not in name and not name.startswith(("<", home, sys.base_prefix)):
            place = f"{name}:{trace.tb_lineno}: "
        trace = trace.tb_next
    return f"{place}{type(error).__name__}: {error}"


def import_from_here() -> None:
    """Make modules in the current directory importable, as ``python -m`` does and an entry point does not."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())


def _find(name: str, passed_on: Sequence[str], is_module: bool) -> tuple[ModuleType, CodeType]:
    """The main module that Python would make, and its code. Sets `sys.argv` and `sys.path` as Python would."""
    if not is_module:
        sys.argv[:] = [name, *passed_on]
        return _script(name)
    _set_first_path(os.getcwd())
    sys.argv[:] = ["-m", *passed_on]  # the value that packages around the module see
    module, code = _module(name, find_spec)
    sys.argv[0] = module.__file__ or name
    return module, code


def _hide_our_frames(error: BaseException) -> None:
    """If an exception is not caught, print its traceback without the frames around those of the script."""
    shown = error.__traceback__
    while shown is not None and str(shown.tb_frame.f_globals.get("__name__")).partition(".")[0] in _AROUND:
        shown = shown.tb_next
    show = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
        if value is error:
            value, traceback = value.with_traceback(shown), shown
        show(kind, value, traceback)

    sys.excepthook = hook


def _script(path: str) -> tuple[ModuleType, CodeType]:
    """The main module that Python would run for a path, and its code."""
    file = os.path.join(os.getcwd(), path)
    if pkgutil.get_importer(file) is not None:  # a directory or an archive
        if PathFinder.find_spec("__main__", [file]) is None:
            raise NotFoundError(f"can't find __main__.py in {path!r}")
        _set_first_path(file)
        return _module("__main__", lambda name: PathFinder.find_spec(name, [file]))
    try:
        compiled = path.endswith(".pyc")
        loader: Any = (SourcelessFileLoader if compiled else SourceFileLoader)("__main__", file)
        content = loader.get_data(file)
    except OSError as error:
        raise NotFoundError(f"can't open file {path!r}: {error.strerror}") from None
    _set_first_path(os.path.dirname(os.path.realpath(file)))
    code = loader.get_code("__main__") if compiled else loader.source_to_code(content, file)
    return _main_module(None, loader, file), code


def _module(name: str, find: Callable[[str], ModuleSpec | None]) -> tuple[ModuleType, CodeType]:
    """The main module that Python would run for ``-m name``, and its code."""
    if not all(name.split(".")):
        raise NotFoundError(f"{name!r} is not the full name of a module")
    try:
        spec = find(name)
    except ModuleNotFoundError as error:
        if f"{name}.".startswith(f"{error.name}."):  # the module, or a package around it
            raise NotFoundError(f"no module named {name}: {error}") from None
        raise
    if spec is not None and spec.submodule_search_locations is not None and not name.endswith(".__main__"):
        return _module(f"{name}.__main__", find)
    if spec is None or spec.loader is None:
        raise NotFoundError(f"no module named {name}")
    code = spec.loader.get_code(name)  # type: ignore[attr-defined]
    if code is None:
        raise NotFoundError(f"{name} contains no Python code")
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
    """Set where Python looks for modules first, and replace the directory of this program."""
    if not sys.flags.safe_path:
        sys.path[0] = path
