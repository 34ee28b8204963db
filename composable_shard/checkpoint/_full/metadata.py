"""Metadata of state dicts: module versions, which `load_state_dict` uses to convert states of older versions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import nn

from .names import plain_name

Metadata = OrderedDict[str, dict[str, Any]]

_ASSIGNS = "assign_to_params_buffers"


def metadata_of(state: object) -> Metadata | None:
    """The metadata of a state dict by module name, without the parts that wrappers add; None if it has no metadata."""
    given = getattr(state, "_metadata", None)
    if not isinstance(given, Mapping):
        return None
    # A wrapper comes before the module that it wraps and has the same plain name. The wrapped module's entry replaces
    # its entry, since the wrapped module converts states.
    metadata = OrderedDict((plain_name(key), dict(each)) for key, each in given.items() if isinstance(each, Mapping))
    for each in metadata.values():
        each.pop(_ASSIGNS, None)  # `load_state_dict(assign=True)` leaves this key in the dict that is passed to it
    return metadata


def with_metadata(values: Mapping[str, Any], metadata: Metadata | None) -> OrderedDict[str, Any]:
    """A state dict with the given values and metadata. None for no metadata."""
    state = OrderedDict(values)
    if metadata is not None:
        state._metadata = metadata  # type: ignore[attr-defined]
    return state


def metadata_for(model: nn.Module, metadata: Metadata | None) -> Metadata | None:
    """A copy of metadata for `model.load_state_dict`, also under the model's module names with wrappers."""
    if metadata is None:
        return None
    names = {key: plain_name(key) for key, _ in model.named_modules(remove_duplicate=False)}
    # Keep entries of modules that the model does not have, because hooks may read them.
    names = {name: name for name in metadata} | names
    return OrderedDict((key, dict(metadata[name])) for key, name in names.items() if name in metadata)
