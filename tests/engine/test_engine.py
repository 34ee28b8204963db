"""The engine: its actions, their order, and its prefetches."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
from expecttest import assert_expected_inline
from torch.distributed.tensor import DTensor

from _engines import fully_shard
from _models import Block, Stack, shard_blocks, vectors
from _pool import POOL, distributed
from _stepping import (
    assert_at_rest,
    assert_same_gradients,
    counted_gathers,
    engine_of,
    kinds,
    loss_of,
    resident,
    train_step,
    twins,
)
from composable_shard import last_record, make_plan

# ---- actions and their order


def four_blocks(rank, world, reshard=None):
    model, _ = twins(lambda: Stack(4), reshard_after_forward=reshard)
    for step in range(2):
        train_step(model, step)
    return str(last_record(model))


def text_of(job, world=2, **kwargs):
    texts = POOL.run(f"test_engine:{job.__name__}", world, kwargs)
    assert texts == texts[:1] * world, "ranks issued different actions"
    return texts[0]


def test_gathers_are_one_ahead_in_both_directions_and_reductions_overlap_with_the_next_blocks():
    """REDUCE of a block precedes WAIT of the next two; REDUCED comes late, at the third block or at the end."""
    assert_expected_inline(
        text_of(four_blocks),
        """\
UNSHARD (root)
WAIT (root)
UNSHARD blocks.0
WAIT blocks.0
UNSHARD blocks.1
RESHARD blocks.0
WAIT blocks.1
UNSHARD blocks.2
RESHARD blocks.1
WAIT blocks.2
UNSHARD blocks.3
RESHARD blocks.2
WAIT blocks.3
RESHARD blocks.3
UNSHARD blocks.3
WAIT blocks.3
UNSHARD blocks.2
RESHARD blocks.3
REDUCE blocks.3
WAIT blocks.2
REDUCED blocks.3
UNSHARD blocks.1
RESHARD blocks.2
REDUCE blocks.2
WAIT blocks.1
REDUCED blocks.2
UNSHARD blocks.0
RESHARD blocks.1
REDUCE blocks.1
WAIT blocks.0
RESHARD blocks.0
REDUCE blocks.0
RESHARD (root)
REDUCED blocks.1
REDUCE (root)
REDUCED blocks.0
REDUCED (root)""",
    )


def frozen_block(rank, world):
    model = Stack(3)
    model.blocks[1].requires_grad_(False)
    shard_blocks(model, fully_shard)
    for step in range(2):
        train_step(model, step)
    return str(last_record(model))


def test_a_frozen_group_is_gathered_for_backward_and_resharded_when_its_last_saved_weight_is_freed():
    assert_expected_inline(
        text_of(frozen_block),
        """\
UNSHARD (root)
WAIT (root)
UNSHARD blocks.0
WAIT blocks.0
UNSHARD blocks.1
RESHARD blocks.0
WAIT blocks.1
UNSHARD blocks.2
RESHARD blocks.1
WAIT blocks.2
RESHARD blocks.2
UNSHARD blocks.2
WAIT blocks.2
UNSHARD blocks.1
RESHARD blocks.2
REDUCE blocks.2
WAIT blocks.1
REDUCED blocks.2
UNSHARD blocks.0
RESHARD blocks.1
WAIT blocks.0
RESHARD blocks.0
REDUCE blocks.0
RESHARD (root)
REDUCE (root)
REDUCED blocks.0
REDUCED (root)""",
    )


@distributed(world=2)
def test_a_frozen_group_is_prefetched_in_backward_as_planned(rank, world):
    model = Stack(3)
    model.blocks[1].requires_grad_(False)
    shard_blocks(model, fully_shard)
    for step in range(2):
        train_step(model, step)
    assert last_record(model).actions == make_plan(model).actions()


def used_twice(rank, world):
    class Twice(Stack):
        def forward(self, x):
            x = self.inp(x)
            for block in (self.blocks[0], self.blocks[1], self.blocks[0]):
                x = block(x)
            return self.head(x)

    model, _ = twins(lambda: Twice(2))
    for step in range(2):
        train_step(model, step)
    return str(last_record(model))


def test_a_group_used_twice_is_reduced_once_per_use():
    assert_expected_inline(
        text_of(used_twice),
        """\
UNSHARD (root)
WAIT (root)
UNSHARD blocks.0
WAIT blocks.0
UNSHARD blocks.1
RESHARD blocks.0
WAIT blocks.1
UNSHARD blocks.0
RESHARD blocks.1
WAIT blocks.0
RESHARD blocks.0
UNSHARD blocks.0
WAIT blocks.0
UNSHARD blocks.1
RESHARD blocks.0
REDUCE blocks.0
WAIT blocks.1
REDUCED blocks.0
UNSHARD blocks.0
RESHARD blocks.1
REDUCE blocks.1
WAIT blocks.0
RESHARD blocks.0
REDUCE blocks.0
RESHARD (root)
REDUCED blocks.1
REDUCE (root)
REDUCED blocks.0
REDUCED (root)""",
    )


@distributed(world=(1, 2))
def test_weights_that_the_next_backward_needs_are_kept(rank, world):
    class Again(Stack):
        def forward(self, x):
            return self.head(self.blocks[0](self.blocks[0](self.inp(x))))

    model, _ = twins(lambda: Again(1))
    for step in range(2):
        train_step(model, step)
    text = str(last_record(model))
    assert text.endswith(
        "UNSHARD blocks.0\nWAIT blocks.0\nREDUCE blocks.0\nRESHARD blocks.0\nREDUCE blocks.0\n"
        "RESHARD (root)\nREDUCED blocks.0\nREDUCE (root)\nREDUCED blocks.0\nREDUCED (root)"
    )


class Permuted:
    """Completes the uses of blocks in another order than autograd, as several devices might."""

    def __init__(self, engine, order):
        self.engine, self.order, self.held = engine, order, []
        self.real = engine._complete

    def __call__(self, now, use, gradients):
        if use.group.is_root:
            return self.real(now, use, gradients)
        self.held.append((now, use, gradients))
        if len(self.held) == len(self.order):
            held, self.held = self.held, []
            for number in self.order:
                self.real(*held[number])
        return None


@pytest.mark.parametrize("orders", [[(0, 1, 2), (2, 1, 0)], [(1, 2, 0), (2, 0, 1)], [(2, 1, 0), (0, 2, 1)]])
@distributed(world=2)
def test_an_early_reduction_waits_its_turn_so_that_all_ranks_issue_in_the_same_order(rank, world, orders):
    model, plain = twins()
    train_step(model)
    train_step(plain)
    model.zero_grad()
    plain.zero_grad()
    engine = engine_of(model)
    engine._complete = Permuted(engine, orders[rank])
    for step in range(2):
        train_step(model, step)
        train_step(plain, step)
    del engine._complete
    assert_same_gradients(model, plain)
    assert kinds(last_record(model), "REDUCE") == ["blocks.2", "blocks.1", "blocks.0", ""]
    assert_at_rest(model)


@pytest.mark.parametrize("world_", [1, 2])
def test_at_most_two_reductions_are_in_flight(world_):
    in_flight = most = 0
    for line in text_of(four_blocks, world_).splitlines():
        in_flight += (line.startswith("REDUCE ")) - (line.startswith("REDUCED "))
        most = max(most, in_flight)
    assert most == 2
    assert in_flight == 0


class Noting(Block):
    """Records when its node was made, and what its parameters look like in forward."""

    def forward(self, x):
        self.noted = (x.grad_fn._sequence_nr(), self.up.weight.grad_fn._sequence_nr())
        self.looks = (
            isinstance(self.up.weight, nn.Parameter),
            type(self.up.weight) is DTensor,
            getattr(self.up.weight, "tag", None),
            self.up.bias.requires_grad,
            [name for name, _ in self.named_parameters()],
        )
        return super().forward(x)


class NotingStack(Stack):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Noting(6, 10) for _ in range(3))


@distributed(world=(1, 2))
def test_nodes_are_created_when_a_forward_begins_and_not_when_its_gather_is_issued(rank, world):
    model, _ = twins(NotingStack)
    for step in range(2):
        train_step(model, step)
        for block in model.blocks:
            of_input, of_node = block.noted
            assert of_node > of_input, "otherwise backward runs the node before later operations of the previous block"


@distributed(world=(1, 2))
def test_unsharded_weights_look_like_their_sharded_parameters(rank, world):
    torch.manual_seed(3)
    model = NotingStack()
    for block in model.blocks:
        block.up.weight.tag = "decay"
        block.up.bias.requires_grad_(False)
    names = [name for name, _ in model.blocks[0].named_parameters()]
    shard_blocks(model, fully_shard)
    train_step(model)
    for block in model.blocks:
        assert block.looks == (True, False, "decay", False, names)
        assert block.up.weight.tag == "decay"
        assert block.up.bias.grad is None


@distributed(world=2)
def test_an_embedding_with_integer_input_reduces_like_any_layer(rank, world):
    model = nn.Sequential(nn.Embedding(7, 6), Block(6, 8), nn.Linear(6, 3))
    for child in model:
        fully_shard(child)
    fully_shard(model)
    for _ in range(2):
        model(torch.tensor([[1, 2, 3]])).square().mean().backward()
    record = last_record(model)
    assert kinds(record, "REDUCE") == ["2", "1", "0"]
    assert record.actions == make_plan(model).actions()


# ---- prefetch


class Skipping(Stack):
    """Runs only the blocks that it is configured to run."""

    def __init__(self):
        super().__init__()
        self.run = (0, 1, 2)

    def forward(self, x):
        x = self.inp(x)
        for number in self.run:
            x = self.blocks[number](x)
        return self.head(x)


@pytest.mark.parametrize("reshard", [True, False])
@distributed(world=(1, 2))
def test_a_prefetched_group_that_is_not_used_is_resharded_at_the_end_of_forward(rank, world, reshard):
    model, plain = twins(Skipping, reshard_after_forward=reshard)
    train_step(model)
    train_step(plain)
    model.run = plain.run = (0, 1)
    loss = loss_of(model, 1)
    assert "blocks.2" not in resident(model)
    loss.backward()
    train_step(plain, 1)
    del loss
    record = last_record(model)
    assert str(record).splitlines().count("UNSHARD blocks.2") == 1, "it was prefetched"
    assert str(record).splitlines().count("RESHARD blocks.2") == 1
    assert_same_gradients(model, plain)
    assert_at_rest(model)
    for step in range(2, 4):  # at the end of the first one, all ranks know that all have seen the new order
        train_step(model, step)
    assert "UNSHARD blocks.2" not in str(last_record(model)), "the order was learned"


@distributed(world=(1, 2))
def test_a_no_grad_forward_prefetches_one_group_ahead_and_leaves_no_group_unsharded(rank, world):
    model, plain = twins(reshard_after_forward=False)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(model(*vectors(0, 0)), plain(*vectors(0, 0)))
        assert_at_rest(model)
        text = str(last_record(model)).splitlines()
        assert text.index("UNSHARD blocks.1") < text.index("RESHARD blocks.0")
        assert text.index("UNSHARD blocks.2") < text.index("WAIT blocks.2")


@pytest.mark.parametrize("reshard", [True, False])
@distributed(world=2)
def test_the_next_forward_does_not_gather_again_after_a_user_unshard(rank, world, reshard):
    model, _ = twins(reshard_after_forward=reshard)
    train_step(model)
    for async_op in (True, False):
        with counted_gathers() as gathers, torch.no_grad():
            model.blocks[1].unshard(async_op)
            model(*vectors(rank, 1))
        model.blocks[1].reshard()
        assert gathers.count("blocks.1") == 1
        assert_at_rest(model)
