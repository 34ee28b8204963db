"""Parity of plain training with all groupings, reshard settings and optimizers."""

from __future__ import annotations

import functools

import pytest

from _models import Stack, TiedText, shard_blocks, shard_lists, shard_nested, shard_root, tokens
from _parity import Case, check_parity
from _pool import distributed, more

SHARDINGS = {
    "blocks": shard_blocks,
    "root": shard_root,
    "nested": shard_nested,
    "lists": shard_lists,
}


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adamw-foreach"])
@distributed(world=(1, 2, 4))
def test_training_is_bitwise_identical_to_the_unsharded_model(rank, world, optimizer):
    check_parity(Case(model=Stack, optimizer=optimizer), rank, world)


@pytest.mark.parametrize("grouping", ["root", "nested", "lists"])
@distributed(world=(1, 2, more(4)))
def test_all_groupings_are_bitwise_identical(rank, world, grouping):
    check_parity(Case(model=Stack, shard=SHARDINGS[grouping], optimizer="adamw"), rank, world)


@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("grouping", ["blocks", "nested", "lists"])
@distributed(world=2)
def test_all_reshard_settings_are_bitwise_identical(rank, world, grouping, reshard):
    shard = functools.partial(SHARDINGS[grouping], reshard_after_forward=reshard)
    check_parity(Case(model=Stack, shard=shard), rank, world)


@pytest.mark.parametrize("reshard", [more(None), True, more(False)])
@distributed(world=(1, 4))
def test_all_reshard_settings_are_bitwise_identical_at_other_world_sizes(rank, world, reshard):
    shard = functools.partial(shard_blocks, reshard_after_forward=reshard)
    check_parity(Case(model=Stack, shard=shard, optimizer="adamw"), rank, world)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@distributed(world=(1, 2, more(4)))
def test_weights_tied_within_a_group_share_one_shard(rank, world, optimizer):
    check_parity(Case(model=TiedText, batch=tokens, optimizer=optimizer), rank, world)
