"""Names of modules and tensors, with and without the parts that wrappers add."""

from __future__ import annotations

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}  # what others put around modules


def plain_name(name: str) -> str:
    """A name without what compilation, checkpoints of activations and others put around modules."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
