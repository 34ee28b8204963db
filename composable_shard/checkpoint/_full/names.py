"""Names of modules and tensors, with and without the parts that wrappers add."""

from __future__ import annotations

_RESTORED = {"_checkpoint_wrapped_module", "_fsdp_wrapped_module"}  # see `load_key`
_WRAPPERS = {"_orig_mod", *_RESTORED}  # what others put around modules


def plain_name(name: str) -> str:
    """A name without what compilation, checkpoints of activations and others put around modules."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def load_key(name: str) -> str:
    """The key by which `load_state_dict` knows a parameter that has `name` in `named_parameters()`.

    Hooks of some wrappers remove their part of the name when a state dict is made, and add it back when one is loaded.
    """
    return ".".join(part for part in name.split(".") if part not in _RESTORED)
