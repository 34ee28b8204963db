"""Notes on torch's errors that name no tensor: weights read while they are sharded, and buffers on the meta device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType

from torch import nn

from .._group.group import ParamGroup
from .._plan.text import first_names

_WORDS = "got mixed torch.Tensor and DTensor"  # of torch, for an operator that was given both
_NAMED = 3  # weights or buffers that a note names
_TITLE = "sharded at this point:"


def explain_sharded_read(error: BaseException, groups: Sequence[ParamGroup]) -> None:
    """Say which weights were sharded where an operator got a `DTensor` that it did not expect, and what to do.

    The note is about the innermost module in the traceback that has sharded weights, its own before those of its
    submodules. There is none for another error, without such a module, or where a call within has failed by the same
    error: its weights were whole, and are sharded again by now.

    Args:
        error: any; it has just ended the call of a sharded module, whose frame is the first one of its traceback.
        groups: of the root.
    """
    if _WORDS not in str(error) or error.__traceback__ is None or _was_seen(error.__traceback__):
        return
    names = {id(param.sharded): param.fqn for group in groups for param in group.params}
    for reader in reversed(list(_modules(error.__traceback__))):
        if read := _within(reader, names, recurse=False) or _within(reader, names, recurse=True):
            error.add_note(_note(read, reader))
            return


def explain_meta_buffers(error: BaseException, module: nn.Module, is_root: bool) -> None:
    """Say which buffers of the root are on the meta device, if that can be why torch's operator failed.

    Args:
        error: any; it has just ended the call of a sharded module.
        module: that module.
        is_root: whether it is the root, whose names are whole; else nothing is done.
    """
    if not is_root or "meta" not in str(error):
        return
    if names := [name for name, buffer in module.named_buffers() if buffer.is_meta]:
        error.add_note(
            f"still on the meta device: {first_names(names, _NAMED)} (buffers). A load fills only what the "
            "files hold, and so no buffers that are not persistent: give these their values as the model's constructor "
            "does. model.to_empty(device=...) makes room for them; call it before the load, for it empties all weights"
        )


def _within(reader: nn.Module, names: Mapping[int, str], recurse: bool) -> list[str]:
    """The names of a module's parameters that are among these, by id."""
    return [names[id(param)] for param in reader.parameters(recurse) if id(param) in names]


def _was_seen(trace: TracebackType) -> bool:
    """Whether the error has come through the call of another sharded module within."""
    call, within = trace.tb_frame.f_code, trace.tb_next
    while within is not None and within.tb_frame.f_code is not call:
        within = within.tb_next
    return within is not None


def _modules(trace: TracebackType | None) -> Iterator[nn.Module]:
    """The modules whose methods a traceback goes through, from the outermost to the innermost."""
    while trace is not None:
        if isinstance(owner := trace.tb_frame.f_locals.get("self"), nn.Module):
            yield owner
        trace = trace.tb_next


def _note(names: list[str], reader: nn.Module) -> str:
    return (
        f"{_TITLE} {first_names(names, _NAMED)}, which {type(reader).__name__} could read. A weight is whole only "
        "while the module runs that fully_shard was called on for it. Call that module instead of reading its weights; "
        "or do not call fully_shard on it, so that its weights belong to a module around it; or call its unshard() "
        "before"
    )
