"""`install` and `uninstall`: replace torch's FSDP2 functions by this library's."""

from __future__ import annotations

import inspect
import itertools
import sys
import threading
import warnings
from collections.abc import Mapping
from types import FunctionType, ModuleType, TracebackType
from typing import Any

from .._api import fully_shard
from .._module.forward_methods import register_fsdp_forward_method
from .._module.methods import share_comm_ctx
from .._torch.distributed import TORCHS_FUNCTIONS

PUBLIC = "torch.distributed.fsdp"
HOME = "torch.distributed.fsdp._fully_shard._fully_shard"  # not patched, because torch's `replicate` uses its names
IN_CHILD = "__mp_main__"  # the name of the parent's script in a process that multiprocessing has spawned
OWN_PACKAGE = __name__.partition(".")[0]

_OURS = {f.__name__: f for f in (fully_shard, register_fsdp_forward_method, share_comm_ctx)}
# By id of a function, so that its name does not matter: our replacements, and the torch functions that they replace.
_OURS_FOR: dict[int, Any] = {id(torchs): _OURS[name] for name, torchs in TORCHS_FUNCTIONS.items()}
_TORCHS_FOR: dict[int, Any] = {id(_OURS[name]): torchs for name, torchs in TORCHS_FUNCTIONS.items()}

Place = tuple[dict[str, Any], str]  # the names of a module, and one of them

_lock = threading.RLock()
_holders: set[Installation] = set()  # the installations that are active; our functions are installed if there is one
_replaced: list[Place] = []  # places where our functions have replaced torch's
_chosen: list[Place] = []  # places that had our functions before `install`, because code imported them from us


class Installation:
    """The result of `install`. As a context manager, it restores torch's functions at the end."""

    def __init__(self) -> None:
        self._entered = 0

    def __enter__(self) -> Installation:
        with _lock:
            self._entered += 1
            if self not in _holders:
                _hold(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with _lock:
            self._entered -= 1
            if not self._entered and self in _holders:
                _holders.remove(self)
                if not _holders:
                    _restore()


def install() -> Installation:
    """Replace torch's `fully_shard` by this library's everywhere, including in other libraries.

    `fully_shard`, `register_fsdp_forward_method` and `share_comm_ctx` are replaced by ours in `torch.distributed.fsdp`,
    and in each loaded module that has torch's function under any name. Modules that are imported later get ours from
    there. torch's classes are not replaced: our sharded modules are instances of torch's `FSDPModule`, our handles of
    its `UnshardHandle`, and the policies are torch's.

    You can call it more than once, from any thread, before or after `init_process_group`. Modules that torch has
    already sharded do not change. Only attributes of modules are replaced. Class attributes, default arguments,
    `functools.partial` objects and local variables of running functions keep torch's function.

    Returns:
        a context manager. ``with composable_shard.install(): ...`` restores torch's functions at its end, unless
        another installation is still active. Without ``with``, they stay replaced until `uninstall` is called.

    Warns:
        UserWarning: an attribute of `torch.distributed.fsdp` is neither torch's function nor ours; it is not replaced.

    Example:
        >>> composable_shard.install()
        >>> from accelerate import Accelerator  # its FSDP2 is this library now
    """
    made = Installation()
    with _lock:
        _hold(made)
    return made


def uninstall() -> None:
    """Restore torch's functions in every module, for all callers of `install`. A no-op if nothing is installed.

    This covers the names that `install` replaced and the names in modules that were imported since. That includes
    modules that were imported since and run ``from composable_shard import fully_shard``, because they cannot be
    distinguished (``import composable_shard as cs`` with ``cs.fully_shard`` is not affected). Sharded modules stay
    sharded.

    Warns:
        UserWarning: other code has replaced a name again since `install`; its function is not replaced.
    """
    with _lock:
        if _holders:
            _holders.clear()
            _restore()


def _hold(holder: Installation) -> None:
    if not _holders:
        _warn_of_others_before()
        _chosen[:] = _places_of(_TORCHS_FOR)
    _holders.add(holder)
    for names, name in _places_of(_OURS_FOR):  # a second call also finds names that were set since the first
        ours = _OURS_FOR.get(id(names.get(name)))
        if ours is not None:  # a module may be loaded under two names
            names[name] = ours
            _replaced.append((names, name))


def _restore() -> None:
    were_torchs, _replaced[:] = list(_replaced), []
    were_ours, _chosen[:] = {(id(names), name) for names, name in _chosen}, []
    for names, name in (*were_torchs, *_places_of(_TORCHS_FOR)):  # the former may belong to unloaded modules
        torchs = _TORCHS_FOR.get(id(names.get(name)))
        if torchs is not None and (id(names), name) not in were_ours:
            names[name] = torchs
    _warn_of_others_since(were_torchs)


def _places_of(functions: Mapping[int, Any]) -> list[Place]:
    """The places in loaded modules that refer to one of some functions, given by id; torch's public names are first.

    Read the `__dict__` of modules instead of their attributes, because an attribute of a lazy module imports others.
    """
    places: list[Place] = []
    for key, module in [(PUBLIC, sys.modules[PUBLIC]), *list(sys.modules.items())]:
        if issubclass(type(module), ModuleType) and key != HOME and key.partition(".")[0] != OWN_PACKAGE:
            own = object.__getattribute__(module, "__dict__")
            for names in (own, *_copied_from(own)) if key == IN_CHILD else (own,):
                places += [(names, name) for name, value in list(names.items()) if id(value) in functions]
    return places


def _copied_from(copy: dict[str, Any]) -> list[dict[str, Any]]:
    """The global namespaces of the functions of a script that multiprocessing has run again in a child process.

    multiprocessing keeps only a copy of these namespaces in ``__mp_main__``.
    """
    members = [vars(value).values() for value in list(copy.values()) if isinstance(value, type)]
    namespaces: dict[int, dict[str, Any]] = {}
    for value in itertools.chain(list(copy.values()), *members):
        function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        function = inspect.unwrap(function) if isinstance(function, FunctionType) else function
        if isinstance(function, FunctionType) and function.__globals__.get("__name__") == IN_CHILD:
            namespaces[id(function.__globals__)] = function.__globals__
    return list(namespaces.values())


def _warn_of_others_before() -> None:
    public = vars(sys.modules[PUBLIC])
    others = [
        f"{PUBLIC}.{name} is {_described(public.get(name))}"
        for name, torchs in TORCHS_FUNCTIONS.items()
        if public.get(name) not in (torchs, _OURS[name])
    ]
    if others:
        warnings.warn(
            f"composable_shard.install: {'; '.join(others)}, not torch's own function, so install() does not replace "
            "it, and calls of it do not use this library. Call install() before other code replaces it, or undo that "
            "replacement first",
            stacklevel=4,
        )


def _warn_of_others_since(places: list[Place]) -> None:
    others = [
        f"{names.get('__name__')}.{name} is {_described(names[name])} now"
        for names, name in places
        if name in names and id(names[name]) not in _OURS_FOR
    ]
    if others:
        warnings.warn(
            f"composable_shard.uninstall: {'; '.join(others)}, which other code has set since install(), so "
            "uninstall() does not replace it; that code can restore torch's function",
            stacklevel=4,
        )


def _described(value: object) -> str:
    kind, module = type(value).__name__, getattr(value, "__module__", None)
    return f"{module}.{getattr(value, '__qualname__', kind)}" if module else f"a {kind}"
