"""Decoders with typical hooks that change the state dict on save and undo the change on load."""

from __future__ import annotations

from functools import partial

import torch
from torch.distributed.tensor import DTensor

from _blocks import Transformer


class Decoder(Transformer):
    """A decoder with a persistent buffer and extra state."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__(tied=tied)
        self.register_buffer("seen", torch.arange(5.0))
        self.recipe = "delayed"

    def forward(self, tokens):
        return super().forward(tokens) * (1 + self.seen.mean())

    def get_extra_state(self):
        return {"recipe": self.recipe}

    def set_extra_state(self, state):
        self.recipe = state["recipe"]


def hook(module, save, load):
    """Call `save(state, prefix)` after the module's state dict, and `load(state, prefix)` before it is loaded."""

    def after(module, state, prefix, meta):
        save(state, prefix)

    module.register_state_dict_post_hook(after)
    if load is not None:
        module.register_load_state_dict_pre_hook(lambda _, state, prefix, *args: load(state, prefix))


def rename(state, prefix, old, new):
    """Rename one key without changing its position. Does nothing if the key does not exist."""
    value = state[prefix + old]
    items = [(prefix + new if key == prefix + old else key, each) for key, each in state.items()]
    del state[prefix + old]
    state.clear()
    state.update(items)
    assert state[prefix + new] is value


def replace(make, old, state, prefix):
    state[prefix + old] = make(state[prefix + old])


def renamed():
    """Hooks of layers rename their weights, and a hook of the root renames a buffer."""
    model = Decoder()
    for block in model.blocks:
        for layer in (block.attention.q, block.feed_forward.down, block.attention_norm):
            hook(layer, partial(rename, old="weight", new="kernel"), partial(rename, old="kernel", new="weight"))
    hook(model.head, partial(rename, old="weight", new="kernel"), partial(rename, old="kernel", new="weight"))
    hook(model, partial(rename, old="seen", new="statistics"), partial(rename, old="statistics", new="seen"))
    return model


def nested():
    """All keys get a prefix."""
    model = Decoder(tied=True)

    def save(state, prefix):
        items = [(f"transformer.{key}", value) for key, value in state.items()]
        state.clear()
        state.update(items)

    def load(state, prefix):
        items = [(key.removeprefix("transformer."), value) for key, value in state.items()]
        state.clear()
        state.update(items)

    hook(model, save, load)
    return model


def tied(removed="embed.weight"):
    """A hook removes one name of a tied weight."""
    model = Decoder(tied=True)
    kept = {"embed.weight": "head.weight", "head.weight": "embed.weight"}[removed]
    hook(
        model,
        lambda state, prefix: state.pop(prefix + removed),
        lambda state, prefix: state.setdefault(prefix + removed, state[prefix + kept]),
    )
    return model


def tied_and_renamed():
    """Hooks rename both names of a tied weight."""
    model = Decoder(tied=True)
    for layer in (model.embed, model.head):
        hook(layer, partial(rename, old="weight", new="table"), partial(rename, old="table", new="weight"))
    return model


def fused():
    """The weight of q is saved in two parts, and the weights of gate and up in one."""
    model = Decoder()

    def split(state, prefix):
        whole = state.pop(f"{prefix}weight")
        state[f"{prefix}rotated"], state[f"{prefix}rest"] = whole.chunk(2)

    def join(state, prefix):
        state[f"{prefix}weight"] = torch.cat([state.pop(f"{prefix}rotated"), state.pop(f"{prefix}rest")])

    def stack(state, prefix):
        state[f"{prefix}stacked"] = torch.stack([state.pop(f"{prefix}{name}.weight") for name in ("gate", "up")])

    def unstack(state, prefix):
        for name, each in zip(("gate", "up"), state.pop(f"{prefix}stacked").unbind(0), strict=True):
            state[f"{prefix}{name}.weight"] = each

    for block in model.blocks:
        hook(block.attention.q, split, join)
        hook(block.feed_forward, stack, unstack)
    return model


def made():
    """Values change under the same names: transposed, cast, cloned, or views of the model's memory."""
    model = Decoder()
    for block in model.blocks:
        transpose = partial(replace, lambda each: each.t(), "weight")  # square: only its strides change
        hook(block.attention.o, transpose, transpose)
        hook(
            block.feed_forward.up,
            partial(replace, lambda each: each.double(), "weight"),
            partial(replace, lambda each: each.float(), "weight"),
        )
        hook(block.attention.k, partial(replace, lambda each: each.clone(), "weight"), None)
        hook(block.attention.v, partial(replace, lambda each: 2 * each, "weight"), partial(replace, half, "weight"))
    hook(model, partial(replace, lambda each: each.clone(), "seen"), None)
    return model


def half(value):
    return value / 2


def swapped():
    """Two layers swap names, and a key that the model does not have is added on save and removed on load."""
    model = Decoder()

    def swap(state, prefix):
        one, two = prefix + "attention.k.weight", prefix + "attention.v.weight"
        state[one], state[two] = state[two], state[one]

    for block in model.blocks:
        hook(block, swap, swap)
    hook(
        model,
        lambda state, prefix: state.__setitem__("version", torch.tensor(3)),
        lambda state, prefix: state.pop("version", None),
    )
    return model


def deleted():
    """A hook removes a frozen block."""
    model = Decoder()
    model.blocks[0].requires_grad_(False)

    def save(state, prefix):
        for key in [key for key in state if key.startswith(f"{prefix}blocks.0.")]:
            del state[key]

    hook(model, save, None)
    return model


class ScaleNorm(torch.nn.RMSNorm):
    """A norm whose first version saved its weight minus one, as Gemma's does."""

    _version = 2

    def __init__(self, dim):
        super().__init__(dim)
        torch.nn.init.normal_(self.weight, mean=1.0)

    def _load_from_state_dict(self, state, prefix, metadata, *args):
        if (metadata.get("version") or 1) < 2:
            state[prefix + "weight"] = state[prefix + "weight"] + 1
        super()._load_from_state_dict(state, prefix, metadata, *args)


def versioned():
    """A load of a state dict without module versions converts it from an older version."""
    model = Decoder()
    for block in model.blocks:
        block.attention_norm = ScaleNorm(block.attention.q.in_features)
    return model


MODELS = {
    "renamed": renamed,
    "nested": nested,
    "second name removed": partial(tied, "head.weight"),
    "tied and renamed": tied_and_renamed,
    "fused": fused,
    "made": made,
    "swapped": swapped,
    "deleted": deleted,
    "versioned": versioned,
    "first name removed": tied,  # the last case, which `make test` runs
}


def build(kind, seed=0):
    torch.manual_seed(seed)
    model = MODELS[kind]()
    with torch.no_grad():
        model.seen.add_(seed)
    model.recipe = f"of seed {seed}"
    if kind == "deleted":  # unsaved weights keep their initial values
        torch.manual_seed(100)
        with torch.no_grad():
            for param in model.blocks[0].parameters():
                param.copy_(torch.randn(param.shape))
    return model


def on_meta(kind, make=build):
    """A decoder on meta, except for values that no state dict has."""
    source = make(kind)
    with torch.device("meta"):
        model = make(kind)
    model.cos, model.sin = source.cos, source.sin
    if kind == "deleted":
        model.blocks[0] = source.blocks[0]
    return model


def once(model):
    """The tensors in the state dict of an unsharded model, tied weights only under their first name."""
    state = {name: each for name, each in model.state_dict(keep_vars=True).items() if torch.is_tensor(each)}
    firsts = {}
    return {name: each.detach() for name, each in state.items() if firsts.setdefault(id(each), name) == name}


def full(value):
    return value.full_tensor() if isinstance(value, DTensor) else value
