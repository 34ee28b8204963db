"""Names of modules and tensors, with and without the parts that wrappers add."""

from __future__ import annotations

import itertools

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


def adapter_name(key: str, adapter: str) -> str | None:
    """The name in peft's files of a tensor of the adapter; None for any other tensor."""
    parts = key.split(".")
    for at, (part, following) in enumerate(itertools.pairwise(parts)):
        if following == adapter and (part.startswith("lora_") or part == "modules_to_save"):
            kept = [*parts[:at], *([] if part == "modules_to_save" else [part]), *parts[at + 2 :]]
            if part == "lora_magnitude_vector" and kept[-1] == "weight":
                kept.pop()
            name = ".".join(kept)
            return name if name.startswith("base_model.model.") else f"base_model.model.{name}"
    return None
