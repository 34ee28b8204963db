"""Notes for torch errors that name no tensor: weights read while they are sharded, and buffers on the meta device."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType, TracebackType
from typing import Any

import torch
from torch import nn

from .._group.param import ShardedParam
from .._plan.text import first_names
from .state import ShardState, state_of, states_below

_WORDS = "got mixed torch.Tensor and DTensor"  # torch's message for an operator that was given both
_NAMED = 3  # number of weights or buffers that a note names
_TITLE = "sharded at this point:"
_EXPLAINING = "_explaining_sharded_reads"  # attribute of a function: the function that adds notes to its errors
_RUNS_LATER = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def explain_sharded_read(
    error: BaseException, params: Iterable[ShardedParam], call: CodeType, method: str = ""
) -> None:
    """Add a note to the error of an operator that got an unexpected `DTensor`: which weights were sharded, what to do.

    The note is about the innermost module in the traceback that has sharded weights: first its own weights, then those
    of its submodules. No note is added in three cases:

    - The error is another one, or has such a note.
    - There is no such module.
    - The error passed through the call of another sharded module. Its weights were unsharded during that call, and are
      sharded again now.

    Args:
        error: any error that has just ended the call of a sharded module, or of a method of it. Its traceback begins
            with the frame of that call.
        params: the parameters to name.
        call: the code that calls sharded modules.
        method: name of the method, if the module's forward was not running.
    """
    if _WORDS not in str(error) or error.__traceback__ is None or _was_seen(error.__traceback__, call):
        return
    if any(note.startswith(_TITLE) for note in getattr(error, "__notes__", ())):
        return
    names = {id(param.sharded): param.fqn for param in params}
    for reader in reversed(list(_modules(error.__traceback__))):
        if read := _within(reader, names, recurse=False) or _within(reader, names, recurse=True):
            error.add_note(_note(read, reader, method))
            return


def explaining_methods(cls: type[nn.Module], call: CodeType) -> dict[str, ExplainingMethod]:
    """Descriptors for the methods of a class that users may call instead of forward.

    Generators and coroutines are left out: they run after the call.

    Args:
        cls: the class of a module that is being sharded.
        call: the code that calls sharded modules.
    """
    public = {name: inspect.getattr_static(cls, name) for name in dir(cls) if not name.startswith("_")}
    return {name: ExplainingMethod(name, call) for name, method in public.items() if _may_read(method, name)}


def _may_read(method: Any, name: str) -> bool:
    if not isinstance(method, FunctionType) or name == "forward" or method.__code__.co_flags & _RUNS_LATER:
        return False
    return not (method.__module__ or "").startswith("torch.")  # a class that `exec` defines may have no module


class ExplainingMethod:
    """A descriptor for a method of the users' class; errors about sharded weights get a note.

    It looks the method up in that class each time, because users patch classes.

    Args:
        name: the method's name.
        call: the code that calls sharded modules.
    """

    def __init__(self, name: str, call: CodeType) -> None:
        self._name, self._call = name, call
        self._owner: type = object

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner = owner

    def __get__(self, module: nn.Module | None, kind: type) -> Any:
        if module is None:
            return getattr(super(self._owner, kind), self._name)
        method = getattr(super(self._owner, module), self._name)
        if torch.compiler.is_compiling() or type(method) is not MethodType:
            return method
        function = method.__func__
        if not _may_read(function, self._name):
            return method
        explaining = function.__dict__.get(_EXPLAINING)
        if explaining is None or explaining.__wrapped__ is not function:  # `functools.wraps` copies attributes
            explaining = function.__dict__[_EXPLAINING] = _explained(function, self._call)
        return MethodType(explaining, module)


def _explained(function: Callable[..., Any], call: CodeType) -> Callable[..., Any]:
    @functools.wraps(function)
    def method(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            state: ShardState | None = state_of(args[0])
            if state is not None and not state.open_calls:
                params = [param for each in states_below(args[0]) for param in each.declaration.params]
                explain_sharded_read(error, params, call, function.__name__)
            raise

    return method


def unexplained(method: Any) -> Any:
    """The function of a class's author, if this is the result of an `ExplainingMethod`; else the argument."""
    wrapped = getattr(method, "__wrapped__", None)
    return wrapped if isinstance(wrapped, FunctionType) and wrapped.__dict__.get(_EXPLAINING) is method else method


def explain_meta_buffers(error: BaseException, module: nn.Module, is_root: bool) -> None:
    """Add a note that names the root's buffers on the meta device, if they may be the reason for the error.

    Args:
        error: any error that has just ended the call of a sharded module.
        module: that module.
        is_root: whether the module is the root. If not, nothing is done, because only the root knows full names.
    """
    if not is_root or "meta" not in str(error):
        return
    if names := [name for name, buffer in module.named_buffers() if buffer.is_meta]:
        error.add_note(
            f"still on the meta device: {first_names(names, _NAMED)} (buffers). A load only fills tensors that are "
            "in the files, so it skips buffers that are not persistent: compute their values as the model's "
            "constructor does. model.to_empty(device=...) allocates them; call it before the load, because it discards "
            "the values of all weights"
        )


def _within(reader: nn.Module, names: Mapping[int, str], recurse: bool) -> list[str]:
    """The names of those parameters of a module whose ids are in `names`."""
    return [names[id(param)] for param in reader.parameters(recurse) if id(param) in names]


def _was_seen(trace: TracebackType, call: CodeType) -> bool:
    """Whether the error passed through the call of another, inner sharded module."""
    within = trace.tb_next
    while within is not None and within.tb_frame.f_code is not call:
        within = within.tb_next
    return within is not None


def _modules(trace: TracebackType | None) -> Iterator[nn.Module]:
    """The modules whose methods a traceback goes through, from the outermost to the innermost."""
    while trace is not None:
        if isinstance(owner := trace.tb_frame.f_locals.get("self"), nn.Module):
            yield owner
        trace = trace.tb_next


def _note(names: list[str], reader: nn.Module, method: str) -> str:
    if method:
        return (
            f"{_TITLE} {first_names(names, _NAMED)}, which {type(reader).__name__} may have read. {method} is not a "
            f"forward of a sharded module. Call register_fsdp_forward_method(module, {method!r}) once, so that the "
            "module's own weights are unsharded while it runs, or call unshard() first"
        )
    return (
        f"{_TITLE} {first_names(names, _NAMED)}, which {type(reader).__name__} may have read. A weight is unsharded "
        "only while the forward of its sharded module (the one passed to fully_shard) runs. Call that "
        "module instead of reading its weights, or do not shard it, so that its weights belong to an enclosing sharded "
        "module, or call its unshard() first"
    )
