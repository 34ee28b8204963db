"""Module versions in state dicts, which modules use to convert states of older versions on load."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import composable_shard as cs
from _engines import ENGINES
from _pool import distributed
from checkpoint._hooked import Decoder, build, versioned
from checkpoint._nets import assert_equal


def wrapped(seed, engine="ours"):
    """One block is wrapped for activation checkpointing, and the other one is compiled."""
    model = build("versioned", seed)
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    for block in model.blocks:
        ENGINES[engine](block)
    return ENGINES[engine](model)


def on_meta():
    source = build("versioned")
    with torch.device("meta"):
        model = build("versioned")
    model.cos, model.sin = source.cos, source.sin
    for block in model.blocks:
        cs.fully_shard(block)
    return cs.fully_shard(model)


def states():
    """A state of this version, one of the first version, and one without metadata, which counts as the first."""
    now = build("versioned", 1).state_dict()
    first = copy.deepcopy(now)
    first._metadata = copy.deepcopy(now._metadata)
    for name in first:
        if name.endswith("attention_norm.weight"):
            first._metadata[name.removesuffix(".weight")]["version"] = 1
    return {"now": now, "first": first, "without": dict(now)}


@distributed(world=2)
def test_full_states_have_the_metadata_of_the_unsharded_model(rank, world, tmp_path):
    plain = build("versioned", 1)
    expected = plain.state_dict()
    assert expected._metadata["blocks.0.attention_norm"]["version"] == 2
    for engine in ENGINES:
        for model in (wrapped(1, engine), torch.compile(wrapped(1, engine), backend="eager")):
            for options in ({}, {"cpu_offload": False}, {"dtype": torch.float64}):
                state = cs.checkpoint.full_state_dict(model, rank0_only=False, **options)
                assert list(state._metadata.items()) == list(expected._metadata.items())
            first = cs.checkpoint.full_state_dict(model)
            assert first == {} if rank else first._metadata == expected._metadata
    torch.save(state, tmp_path / f"{rank}.pt")
    other = build("versioned", 2)
    other.load_state_dict(torch.load(tmp_path / f"{rank}.pt", weights_only=True))
    assert_equal(other.state_dict(), expected)


@pytest.mark.parametrize("kind", ["now", "first", "without"])
@distributed(world=2)
def test_a_full_state_is_converted_like_in_the_unsharded_model(rank, world, kind):
    state = states()[kind]
    plain = build("versioned", 2)
    plain.load_state_dict(state)
    expected = plain.state_dict()
    metadata = copy.deepcopy(getattr(state, "_metadata", None))
    for options in (
        {},
        {"broadcast_from_rank0": True},
        {"assign": True},
        {"assign": True, "broadcast_from_rank0": True},
    ):
        given = state if rank == 0 or "broadcast_from_rank0" not in options else None
        for engine in ENGINES:
            model = wrapped(2, engine)
            assert cs.checkpoint.load_full_state_dict(model, given, **options) == ([], [])
            assert_equal(cs.checkpoint.full_state_dict(model, rank0_only=False), expected)
        if options.get("assign"):
            model = on_meta()
            cs.checkpoint.load_full_state_dict(model, given, **options)
            assert_equal(cs.checkpoint.full_state_dict(model, rank0_only=False), expected)
        assert getattr(state, "_metadata", None) == metadata  # torch's own load adds a key to it


@distributed(world=2)
def test_metadata_of_an_assigning_load_does_not_make_the_next_load_assign(rank, world):
    state = build("versioned", 1).state_dict()
    build("versioned", 2).load_state_dict(state, assign=True)  # adds a key to the metadata
    model = cs.fully_shard(build("versioned", 2))
    weight = model.head.weight
    cs.checkpoint.load_full_state_dict(model, state)
    assert model.head.weight is weight
    assert_equal(cs.checkpoint.full_state_dict(model, rank0_only=False), build("versioned", 1).state_dict())


@distributed(world=2)
def test_hooks_see_metadata_of_modules_that_no_longer_exist(rank, world):
    torch.manual_seed(1)
    former = versioned()
    former.adapter = torch.nn.Identity()
    seen = []
    model = cs.fully_shard(Decoder())
    model.register_load_state_dict_pre_hook(lambda module, state, *args: seen.extend(state._metadata))
    cs.checkpoint.load_full_state_dict(model, former.state_dict())
    assert "adapter" in seen
