"""`install`: torch's names for FSDP2 lead to this library."""

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
from .._module.methods import share_comm_ctx
from .._module.module import register_fsdp_forward_method
from .._torch.distributed import TORCHS_FUNCTIONS

PUBLIC = "torch.distributed.fsdp"
HOME = "torch.distributed.fsdp._fully_shard._fully_shard"  # its own names are those that torch's `replicate` uses
IN_CHILD = "__mp_main__"  # how a process that multiprocessing has spawned calls the script of its parent
OWN_PACKAGE = __name__.partition(".")[0]

_OURS = {f.__name__: f for f in (fully_shard, register_fsdp_forward_method, share_comm_ctx)}
# By the id of a function, which no name of it changes: what takes its place, and what gives the place back.
_OURS_FOR: dict[int, Any] = {id(torchs): _OURS[name] for name, torchs in TORCHS_FUNCTIONS.items()}
_TORCHS_FOR: dict[int, Any] = {id(_OURS[name]): torchs for name, torchs in TORCHS_FUNCTIONS.items()}

Place = tuple[dict[str, Any], str]  # the names of a module, and one of them

_lock = threading.RLock()
_holders: set[Installation] = set()  # by whom ours are wanted in torch's places; empty: they are not installed
_replaced: list[Place] = []  # where torch's were
_chosen: list[Place] = []  # where ours were before: somebody has taken them from this library


class Installation:
    """What `install` returns; as a context, it restores torch's functions when it is left."""

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
    """Let every call of torch's `fully_shard` be one of this library, also those in libraries that know nothing of it.

    In `torch.distributed.fsdp`, and in each loaded module that holds torch's function under any name,
    `fully_shard`, `register_fsdp_forward_method` and `share_comm_ctx` are replaced by ours. Modules that are imported
    later get ours from there. torch's classes need nothing: our sharded modules are instances of torch's `FSDPModule`,
    our handles of its `UnshardHandle`, and the policies are its own.

    It may be called more than once, from any thread, and before or after `init_process_group`. Modules that torch has
    sharded already stay torch's. What is no attribute of a module cannot be found, and keeps torch's function: class
    attributes, default arguments, `functools.partial` objects, and local variables of functions that run.

    Returns:
        a context: ``with composable_shard.install(): ...`` restores torch's functions at its end, unless somebody else
        has called `install` too and not left it yet. Whoever drops it keeps them replaced until `uninstall`.

    Warns:
        UserWarning: a name of `torch.distributed.fsdp` holds somebody else's function, which is left there.

    Example:
        >>> composable_shard.install()
        >>> from accelerate import Accelerator  # its FSDP2 is this library now
    """
    made = Installation()
    with _lock:
        _hold(made)
    return made


def uninstall() -> None:
    """Give torch's functions back to every module that holds ours for them, whoever has called `install`.

    These are the names that `install` replaced, and the names of modules imported since. A module that was imported
    since and took our function by name from `composable_shard` itself cannot be told from those: it gets torch's as
    well (``import composable_shard as cs`` and ``cs.fully_shard`` do not). Where nothing is installed this does
    nothing. Modules that are sharded stay so.

    Warns:
        UserWarning: a name that was replaced holds somebody else's function now, which is left there.
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
    for names, name in _places_of(_OURS_FOR):  # a later call finds those that came past torch's names
        ours = _OURS_FOR.get(id(names.get(name)))
        if ours is not None:  # a module may be loaded under two names
            names[name] = ours
            _replaced.append((names, name))


def _restore() -> None:
    were_torchs, _replaced[:] = list(_replaced), []
    were_ours, _chosen[:] = {(id(names), name) for names, name in _chosen}, []
    for names, name in (*were_torchs, *_places_of(_TORCHS_FOR)):  # the first may be of modules that were unloaded
        torchs = _TORCHS_FOR.get(id(names.get(name)))
        if torchs is not None and (id(names), name) not in were_ours:
            names[name] = torchs
    _warn_of_others_since(were_torchs)


def _places_of(functions: Mapping[int, Any]) -> list[Place]:
    """Where loaded modules hold one of some functions, which are given by id; torch's public names come first.

    Modules are not asked for their attributes, which would load those that are loaded by that.
    """
    places: list[Place] = []
    for key, module in [(PUBLIC, sys.modules[PUBLIC]), *list(sys.modules.items())]:
        if issubclass(type(module), ModuleType) and key != HOME and key.partition(".")[0] != OWN_PACKAGE:
            own = object.__getattribute__(module, "__dict__")
            for names in (own, *_copied_from(own)) if key == IN_CHILD else (own,):
                places += [(names, name) for name, value in list(names.items()) if id(value) in functions]
    return places


def _copied_from(copy: dict[str, Any]) -> list[dict[str, Any]]:
    """What the functions of a script see in a child: multiprocessing has run it there, and kept a copy of its names."""
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
            f"composable_shard.install: {'; '.join(others)}, not torch's own, and is left there: calls of it do not "
            "come to this library. Call install() before it is replaced, or undo that first",
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
            f"composable_shard.uninstall: {'; '.join(others)}, which somebody has put there since install(), and is "
            "left there; whoever did can put torch's function back",
            stacklevel=4,
        )


def _described(value: object) -> str:
    kind, module = type(value).__name__, getattr(value, "__module__", None)
    return f"{module}.{getattr(value, '__qualname__', kind)}" if module else f"a {kind}"
