"""States of wrapped modules whose hooks hide weights. Each weight is loaded by its own key."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import composable_shard as cs
from _blocks import token_batch
from _engines import ENGINES
from _pool import distributed
from checkpoint import _hooked
from checkpoint._hooked import Decoder
from checkpoint._nets import assert_equal
from composable_shard import checkpoint
from composable_shard.errors import CheckpointError


def compiled(module):
    return torch.compile(module, backend="eager")


def compiled_in_place(module):
    module.compile(backend="eager")
    return module


WRAPPERS = {
    "checkpoint": checkpoint_wrapper,
    "compiled": compiled,
    "compiled in place": compiled_in_place,
    "checkpoint of compiled": lambda module: checkpoint_wrapper(compiled(module)),
    "compiled checkpoint": lambda module: compiled(checkpoint_wrapper(module)),
}
HIDING = ["first name removed", "second name removed", "deleted", "name not added back"]


def build(kind, seed=0):
    """A decoder whose hooks hide weights."""
    if kind != "name not added back":
        return _hooked.build(kind, seed)
    torch.manual_seed(seed)
    decoder = Decoder(tied=True)
    _hooked.hook(decoder, lambda state, prefix: state.pop(prefix + "head.weight"), None)
    return decoder


def wrapped(decoder, wrap, engine="ours"):
    """A decoder as a part of a model."""
    for block in decoder.blocks:
        ENGINES[engine](block)
    model = nn.Sequential(WRAPPERS[wrap](decoder))
    ENGINES[engine](model[0])
    return ENGINES[engine](model)


def assert_runs_as(model, plain, tied):
    tokens = token_batch(0, 6)[0]
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), plain(tokens))
    inner = next(each for each in model.modules() if isinstance(each, Decoder))
    assert not tied or inner.head.weight is inner.embed.weight


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("kind", HIDING)
@distributed(world=2)
def test_full_states_load_into_wrapped_modules_with_hidden_weights(rank, world, kind, wrap):
    plain = nn.Sequential(build(kind, 1))
    for engine in ENGINES:
        state = cs.checkpoint.full_state_dict(wrapped(build(kind, 1), wrap, engine), rank0_only=False)
        assert_equal(state, plain.state_dict())
        for options in ({}, {"broadcast_from_rank0": True}, {"assign": True}):
            model = wrapped(build(kind, 2), wrap, engine)
            assert cs.checkpoint.load_full_state_dict(model, state, **options) == ([], [])
            assert_runs_as(model, plain, "name" in kind)


@pytest.mark.parametrize("wrap", WRAPPERS)
@distributed(world=2)
def test_a_full_state_of_the_model_without_hooks_fills_hidden_weights(rank, world, wrap):
    torch.manual_seed(1)
    plain = nn.Sequential(Decoder())
    for options in ({}, {"broadcast_from_rank0": True}, {"assign": True}):
        model = wrapped(build("deleted", 2), wrap)
        assert cs.checkpoint.load_full_state_dict(model, plain.state_dict(), **options) == ([], [])
        assert_runs_as(model, plain, False)


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("kind", HIDING)
@distributed(world=2)
def test_checkpoints_load_into_wrapped_modules_with_hidden_weights(rank, world, kind, wrap, tmp_path):
    plain = nn.Sequential(build(kind, 1))
    checkpoint.save(tmp_path, {"model": wrapped(build(kind, 1), wrap)}, step=0)
    unsharded = nn.Sequential(WRAPPERS[wrap](_hooked.on_meta(kind, build)))
    for model in (wrapped(build(kind, 2), wrap), wrapped(_hooked.on_meta(kind, build), wrap), unsharded):
        checkpoint.load(tmp_path, {"model": model})
        assert_runs_as(model, plain, "name" in kind)


@distributed(world=2)
def test_a_key_from_a_load_hook_that_no_module_loads_is_named(rank, world):
    state = cs.checkpoint.full_state_dict(wrapped(build("deleted", 1), "checkpoint"), rank0_only=False)

    def rename(module, state, prefix, *args):
        state[prefix + "observed"] = state.pop(prefix + "seen")

    def renaming():
        decoder = build("deleted", 2)
        decoder.register_load_state_dict_pre_hook(rename)
        return wrapped(decoder, "checkpoint")

    with pytest.raises(CheckpointError, match=r"0\.observed"):
        cs.checkpoint.load_full_state_dict(renaming(), state)
    assert cs.checkpoint.load_full_state_dict(renaming(), state, strict=False).unexpected_keys == ["0.observed"]
