"""Notes for torch errors that name no tensor: weights read while they are sharded, and buffers on the meta device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType

from torch import nn

from .._group.group import ParamGroup
from .._plan.text import first_names

_WORDS = "got mixed torch.Tensor and DTensor"  # torch's message for an operator that was given both
_NAMED = 3  # number of weights or buffers that a note names
_TITLE = "sharded at this point:"


def explain_sharded_read(error: BaseException, groups: Sequence[ParamGroup]) -> None:
    """Add a note to the error of an operator that got an unexpected `DTensor`: which weights were sharded, what to do.

    The note is about the innermost module in the traceback that has sharded weights: first its own weights, then those
    of its submodules. No note is added in three cases:

    - The error is another one.
    - There is no such module.
    - The error passed through the call of another sharded module. Its weights were unsharded during that call, and are
      sharded again now.

    Args:
        error: any error that has just ended the call of a sharded module. Its traceback begins with the frame of that
            call.
        groups: the groups of the root.
    """
    if _WORDS not in str(error) or error.__traceback__ is None or _was_seen(error.__traceback__):
        return
    names = {id(param.sharded): param.fqn for group in groups for param in group.params}
    for reader in reversed(list(_modules(error.__traceback__))):
        if read := _within(reader, names, recurse=False) or _within(reader, names, recurse=True):
            error.add_note(_note(read, reader))
            return


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


def _was_seen(trace: TracebackType) -> bool:
    """Whether the error passed through the call of another, inner sharded module."""
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
        f"{_TITLE} {first_names(names, _NAMED)}, which {type(reader).__name__} could read. A weight is unsharded only "
        "while the forward of its sharded module (the one passed to fully_shard) runs. Call that "
        "module instead of reading its weights, or do not shard it, so that its weights belong to an enclosing sharded "
        "module, or call its unshard() first"
    )
