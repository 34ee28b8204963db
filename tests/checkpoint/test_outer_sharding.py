"""Checkpoints of models whose optimizer state is sharded over both axes of a mesh (`outer_sharding`)."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint import save as dcp_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

import composable_shard as cs
from _engines import ENGINES, mesh_of
from _models import Stack, shard_blocks, vectors
from _pool import POOL, distributed, more
from composable_shard import checkpoint

OUTER = {"outer_sharding": "optimizer"}
LAYOUTS = {
    "hfsdp": lambda world: {"mesh": mesh_of(2, world // 2), **OUTER},
    "hsdp": lambda world: {"mesh": mesh_of(2, world // 2)},
    "zero3": lambda world: {"mesh": mesh_of(world)},
}


def made(layout, world, seed=0, **sizes):
    """A sharded model with its optimizer, and an unsharded copy with its own."""
    torch.manual_seed(seed)
    plain = Stack(**sizes)
    model = copy.deepcopy(plain)
    shard_blocks(model, ENGINES["ours"], **LAYOUTS[layout](world))
    return [(each, torch.optim.AdamW(each.parameters(), lr=0.01)) for each in (model, plain)]


def train(pairs, steps):
    """Train with the same data on all ranks, so that all numbers of ranks have the same gradients."""
    for step in steps:
        for model, optimizer in pairs:
            model(*vectors(0, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_equal(pairs, tolerance=0.0):
    """Compare parameters and optimizer state. Means over three or six equal gradients are rounded."""
    (model, optimizer), (plain, other) = pairs
    for (name, param), twin in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(whole(param), twin, rtol=0, atol=tolerance), name
        for entry, value in optimizer.state[param].items():
            assert torch.allclose(whole(value), other.state[twin][entry], rtol=0, atol=tolerance), (name, entry)


def save_steps(rank, world, layout, path):
    pairs = made(layout, world)
    train(pairs, range(2))
    check_equal(pairs, 1e-5 * (world % 3 == 0))
    checkpoint.save(path, {"model": pairs[0][0], "optimizer": pairs[0][1]}, step=2)


def load_and_continue(rank, world, layout, path, tolerance):
    tolerance = tolerance or 1e-5 * (world % 3 == 0)
    expected = made(layout, world)[1]
    train([expected], range(2))
    state = made(layout, world, seed=1)[0]
    checkpoint.load(path, {"model": state[0], "optimizer": state[1]})
    pairs = [state, expected]
    check_equal(pairs, tolerance)
    train(pairs, range(2, 4))
    check_equal(pairs, tolerance)
    with torch.no_grad():
        assert torch.allclose(*(model(*vectors(0, 9)) for model, _ in pairs), rtol=0, atol=10 * tolerance)


WAYS = [
    more("hfsdp", 4, "hfsdp", 4),
    ("hfsdp", 4, "zero3", 2),
    more("hfsdp", 4, "hsdp", 4),
    more("hsdp", 4, "hfsdp", 4),
    more("zero3", 3, "hfsdp", 4),
    more("hfsdp", 6, "hfsdp", 4),
    more("hfsdp", 2, "hfsdp", 6),
    more("hfsdp", 4, "zero3", 1),
]


@pytest.mark.parametrize(("saved", "before", "loaded", "after"), WAYS)
def test_training_continues_bit_for_bit_under_other_strategies_and_numbers_of_ranks(
    saved, before, loaded, after, tmp_path
):
    here = f"{__name__}:"
    POOL.run(here + "save_steps", before, {"layout": saved, "path": str(tmp_path)})
    tolerance = 1e-5 * (before % 3 == 0)
    POOL.run(here + "load_and_continue", after, {"layout": loaded, "path": str(tmp_path), "tolerance": tolerance})


@distributed(world=4)
def test_full_state_dicts_are_those_of_the_unsharded_model(rank, world):
    pairs = made("hfsdp", world)
    train(pairs, range(2))
    (model, optimizer), expected = pairs
    state = checkpoint.full_state_dict(model, rank0_only=False)
    for name, value in expected[0].state_dict().items():
        assert torch.equal(state[name], value), name
    held = checkpoint.full_optimizer_state_dict(model, optimizer, rank0_only=False)
    fresh = made("hfsdp", world, seed=2)[0]
    checkpoint.load_full_state_dict(fresh[0], state)
    checkpoint.load_full_optimizer_state_dict(fresh[0], fresh[1], held)
    continue_as([fresh, expected])


def continue_as(pairs):
    check_equal(pairs)
    train(pairs, range(2, 4))
    check_equal(pairs)


@pytest.mark.parametrize("even", [True, False])
@distributed(world=4)
def test_torchs_full_state_dicts_need_even_shards(rank, world, even):
    """As with FSDP2 and tensor parallelism, torch cannot split uneven tensors among strided shards."""
    sizes = {"dim": 8, "hidden": 16} if even else {}
    pairs = made("hfsdp", world, **sizes)
    train(pairs, range(2))
    (model, optimizer), expected = pairs
    options = StateDictOptions(full_state_dict=True)
    whole_model = get_model_state_dict(model, options=options)
    whole_state = get_optimizer_state_dict(model, optimizer, options=options)
    for name, value in expected[0].state_dict().items():
        assert torch.equal(whole_model[name], value), name
    fresh = made("hfsdp", world, seed=2, **sizes)[0]
    if not even:
        with pytest.raises(AssertionError):
            set_model_state_dict(fresh[0], whole_model, options=options)
        fresh[0].load_state_dict(whole_model)
        assert torch.equal(fresh[0].inp.weight.full_tensor(), expected[0].inp.weight)
        return
    set_model_state_dict(fresh[0], whole_model, options=options)
    set_optimizer_state_dict(*fresh, whole_state, options=options)
    continue_as([fresh, expected])


@distributed(world=4)
def test_torchs_distributed_checkpoints_resume(rank, world, tmp_path):
    pairs = made("hfsdp", world)
    train(pairs, range(2))

    def state_of(model, optimizer):
        return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}

    dcp_save(state_of(*pairs[0]), checkpoint_id=str(tmp_path))
    fresh = made("hfsdp", world, seed=1)[0]
    state = state_of(*fresh)
    dcp_load(state, checkpoint_id=str(tmp_path))
    set_model_state_dict(fresh[0], state["model"])
    set_optimizer_state_dict(*fresh, state["optimizer"])
    continue_as([fresh, pairs[1]])


@distributed(world=4)
def test_frozen_parameters_of_other_dtypes_are_gathered_in_full(rank, world):
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 10)
    for dtype in (torch.float8_e4m3fn, torch.uint16, torch.bool, torch.bfloat16):
        values = torch.randint(0, 2, (5, 3)).to(dtype)
        model.register_parameter(f"in_{str(dtype)[6:]}", torch.nn.Parameter(values, requires_grad=False))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    cs.fully_shard(model, mesh=mesh_of(2, 2), **OUTER)
    for name, value in checkpoint.full_state_dict(model, rank0_only=False).items():
        assert value.dtype == expected[name].dtype
        assert torch.equal(value.float(), expected[name].float()), name
