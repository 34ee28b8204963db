"""Wrap helpers shard the right modules in the right order, and the result trains exactly."""

from __future__ import annotations

import pytest
import torch.nn as nn
from torch.distributed.tensor import DTensor

import composable_shard
from _engines import fully_shard
from _models import Block, Stack, shard_blocks
from _parity import Case, check_parity
from _pool import distributed


def bytes_of(module):
    return sum(p.numel() * p.element_size() for p in module.parameters())


def names_of(model, modules):
    names = {id(m): n for n, m in model.named_modules()}
    return [names[id(m)] for m in modules]


def check_children_first(model, modules):
    """Check that every module occurs once, after its descendants."""
    names = names_of(model, modules)
    assert len(set(names)) == len(names)
    for place, name in enumerate(names):
        later = names[place + 1 :]
        assert not any(name == "" or other.startswith(name + ".") for other in later), f"{name} before {later}"
    assert all(isinstance(m, composable_shard.FSDPModule) for m in modules)
    assert all(isinstance(p, DTensor) for m in modules for p in m.parameters())


@distributed(world=2)
def test_by_class_shards_every_instance_and_then_the_root(rank, world):
    model = Stack()
    sharded = composable_shard.shard_by_class(model, {Block})
    assert names_of(model, sharded) == ["blocks.0", "blocks.1", "blocks.2", ""]
    check_children_first(model, sharded)


@distributed(world=2)
def test_by_class_without_root_leaves_the_rest_plain(rank, world):
    model = Stack()
    sharded = composable_shard.shard_by_class(model, {Block}, root=False)
    assert names_of(model, sharded) == ["blocks.0", "blocks.1", "blocks.2"]
    assert not isinstance(model, composable_shard.FSDPModule)
    assert not isinstance(model.head.weight, DTensor)


@distributed(world=2)
def test_by_class_puts_nested_classes_before_their_parents(rank, world):
    model = Stack(blocks=2)
    sharded = composable_shard.shard_by_class(model, {nn.Linear, Block})
    assert sorted(names_of(model, sharded)) == sorted(
        ["", "inp", "head", *(f"blocks.{i}{part}" for i in range(2) for part in ("", ".up", ".down"))]
    )
    check_children_first(model, sharded)
    assert sharded[-1] is model


@distributed(world=2)
def test_by_class_counts_subclasses_as_their_class(rank, world):
    class Special(Block):
        pass

    model = Stack(blocks=2)
    model.blocks.append(Special(6, 10))
    sharded = composable_shard.shard_by_class(model, {Block})
    assert names_of(model, sharded) == ["blocks.0", "blocks.1", "blocks.2", ""]


@distributed(world=2)
def test_by_class_shards_a_shared_module_once(rank, world):
    model = Stack(blocks=2)
    model.blocks.append(model.blocks[0])
    sharded = composable_shard.shard_by_class(model, {Block})
    assert len(sharded) == 3
    check_children_first(model, sharded)


@distributed(world=2)
def test_a_root_of_the_class_is_sharded_once(rank, world):
    model = Block(6, 10)
    assert composable_shard.shard_by_class(model, {Block}) == [model]


@pytest.mark.parametrize("min_bytes", [1, 100, 300, 500, 10**9])
@distributed(world=2)
def test_by_size_gives_every_group_except_the_root_at_least_min_bytes(rank, world, min_bytes):
    model = Stack()
    plain = {n: p.numel() * p.element_size() for n, p in model.named_parameters()}
    sharded = composable_shard.shard_by_size(model, min_bytes=min_bytes)
    check_children_first(model, sharded)
    assert sharded[-1] is model
    taken = set()
    for name in names_of(model, sharded)[:-1]:
        own = {n for n in plain if n.startswith(name + ".")} - taken
        assert sum(plain[n] for n in own) >= min_bytes, name
        taken |= own
    assert (len(sharded) == 1) == (min_bytes == 10**9)


@distributed(world=2)
def test_auto_finds_the_repeated_blocks(rank, world):
    model = Stack()
    sharded = composable_shard.shard_auto(model)
    assert names_of(model, sharded) == ["blocks.0", "blocks.1", "blocks.2", ""]
    check_children_first(model, sharded)


class TwoTowers(nn.Module):
    """Two stacks of different blocks, one of them in a Sequential; the blocks contain repeated parts themselves."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(4, 6)
        self.left = nn.ModuleList(Block(6, 10) for _ in range(3))
        self.right = nn.Sequential(*(nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)) for _ in range(2)))

    def forward(self, x):
        x = self.inp(x)
        for block in self.left:
            x = block(x)
        return self.right(x)


@distributed(world=2)
def test_auto_finds_blocks_in_several_stacks_by_structure(rank, world):
    model = TwoTowers()
    sharded = composable_shard.shard_auto(model)
    names = names_of(model, sharded)
    check_children_first(model, sharded)
    assert set(names) == {"left.0", "left.1", "left.2", "right.0", "right.1", ""}
    assert names[-1] == ""


@distributed(world=2)
def test_auto_shards_only_the_root_if_nothing_repeats(rank, world):
    model = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 2))
    assert composable_shard.shard_auto(model) == [model]


def by_class(model):
    return composable_shard.shard_by_class(model, {Block})


def by_size(model):
    return composable_shard.shard_by_size(model, min_bytes=200)


HELPERS = {"class": by_class, "size": by_size, "auto": lambda model: composable_shard.shard_auto(model)}


@pytest.mark.parametrize("helper", HELPERS)
@pytest.mark.parametrize("make", [Stack, TwoTowers])
@distributed(world=(1, 2))
def test_training_after_a_wrap_helper_is_exact(rank, world, helper, make):
    def shard(model, engine):
        assert engine is fully_shard
        HELPERS[helper](model)

    check_parity(Case(model=make, shard=shard, optimizer="adamw", fsdp2=False), rank, world)


@distributed(world=2)
def test_helpers_make_the_same_groups_as_explicit_calls(rank, world):
    def shard(model, engine):
        if engine is fully_shard:
            by_class(model)
        else:
            shard_blocks(model, engine)

    check_parity(Case(model=Stack, shard=shard), rank, world)
