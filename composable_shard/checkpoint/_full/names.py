"""Names of modules and tensors, with and without the parts that wrappers add."""

from __future__ import annotations

_RESTORED = {"_checkpoint_wrapped_module", "_fsdp_wrapped_module"}  # see `load_key`
_WRAPPERS = {"_orig_mod", *_RESTORED}  # attributes under which wrappers store the wrapped module


def plain_name(name: str) -> str:
    """A name without the parts that torch.compile, activation checkpointing and other wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def load_key(name: str) -> str:
    """The key that `load_state_dict` expects for a parameter with `name` in `named_parameters()`.

    Hooks of some wrappers remove their part of the name in `state_dict()`, and add it again in `load_state_dict()`.
    """
    return ".".join(part for part in name.split(".") if part not in _RESTORED)
