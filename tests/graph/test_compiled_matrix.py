"""The compiled path, case by case: the graphs, and three steps that are bitwise identical to the eager runtime.

A graph is one line. Its letters are, in order: G all-gather, w wait, m matrix product, R reduce-scatter, A all-reduce,
X all-to-all, k keep gradients. A forward is followed by the bytes that it saves for backward, without its inputs.
``EXPECTTEST_ACCEPT=1`` rewrites the lines.
"""

from __future__ import annotations

import copy
import functools
import importlib

import pytest
import torch
import torch.nn as nn
from expecttest import assert_expected_inline
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from _blocks import Transformer, next_token_loss, token_batch
from _compiling import even, graphs_of, quiet, three_steps
from _engines import fully_shard, mesh_of
from _models import Block, Stack, shard_blocks, vectors
from _pool import distributed, more


def plain(rank, world, **options):
    return three_steps(rank, even(), shard_blocks, vectors, **options)


def test_two_blocks_and_their_root():
    assert_expected_inline(
        graphs_of(plain),
        """\
forward GwGmwGmmwmmm, saves 2288 bytes
backward GmmwGmmmmRwmmmmwRmwRw
""",
    )


@pytest.mark.matrix
def test_a_root_that_reshards_is_gathered_again():
    assert_expected_inline(
        graphs_of(plain, reshard_after_forward=True),
        """\
forward GwGmwGmmwmmm, saves 2160 bytes
backward GwGmmwGmmmmRwmmmmwRmwRw
""",
    )


@pytest.mark.matrix
def test_groups_that_stay_unsharded_are_not_gathered_again():
    assert_expected_inline(
        graphs_of(plain, reshard_after_forward=False),
        """\
forward GwGmwGmmwmmm, saves 4464 bytes
backward mmmmmmRmmmmwRmwRw
""",
    )


def test_one_process_has_no_collectives():
    assert_expected_inline(
        graphs_of(plain, world=1),
        """\
forward mmmmmm, saves 2288 bytes
backward mmmmmmmmmmm
""",
    )


@pytest.mark.matrix
def test_four_ranks_on_gloo_sum_in_rank_order():
    assert_expected_inline(
        graphs_of(plain, world=4),
        """\
forward GwGmwGmmwmmm, saves 2288 bytes
backward GmmwGmmmmRwmmmmwRmwRw
""",
    )


def hybrid(rank, world):
    return three_steps(rank, even(1), shard_blocks, vectors, mesh=mesh_of(2, 2))


@pytest.mark.matrix
def test_hybrid_sharding_reduce_scatters_and_then_all_reduces():
    assert_expected_inline(
        graphs_of(hybrid, world=4),
        """\
forward GwGmwmmm, saves 1288 bytes
backward GmmwmmmmRmRAwAw
""",
    )


def replicated(rank, world):
    return three_steps(rank, even(1), shard_blocks, vectors, mesh=mesh_of(world, 1))


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.matrix)])
def test_replicas_without_sharding_gather_nothing(world):
    text = graphs_of(replicated, world=world)
    if world == 2:
        assert_expected_inline(
            text,
            """\
forward mmmm, saves 1288 bytes
backward mmmmmmAmAww
""",
        )


def uneven(rank, world):
    return three_steps(rank, Stack(1), shard_blocks, vectors)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.matrix)])
def test_uneven_shards_are_padded(world):
    text = graphs_of(uneven, world=world)
    if world == 2:
        assert_expected_inline(
            text,
            """\
forward GwGmwmmm, saves 896 bytes
backward GmmwmmmmRmwRw
""",
        )


class Tiny(nn.Module):
    """Parameters with empty shards on the last ranks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def one_column(rank, step):
    return (vectors(rank, step)[0][:, :1],)


def empty(rank, world):
    return three_steps(rank, Tiny(), shard_blocks, one_column)


def test_ranks_with_empty_shards_take_part():
    assert_expected_inline(
        graphs_of(empty, world=2),
        """\
forward GwGmwm, saves 40 bytes
backward GmwGmRmwwRw
""",
    )


def cut_along_columns(rank, world):
    def placement(param):
        return Shard(param.ndim - 1)

    return three_steps(rank, even(1), shard_blocks, vectors, shard_placement_fn=placement)


def test_parameters_sharded_along_another_dim():
    assert_expected_inline(
        graphs_of(cut_along_columns),
        """\
forward GwGmwmmm, saves 1288 bytes
backward GmmwmmmmRmwRw
""",
    )


# ---- activation checkpointing


def save_products(ctx, op, *args, **kwargs):
    saved = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE


selective = functools.partial(create_selective_checkpoint_contexts, save_products)


class Inside(Block):
    context = None

    def body(self, x):
        return super().forward(x)

    def forward(self, x):
        more = {"context_fn": self.context} if self.context is not None else {}
        return checkpoint(self.body, x, use_reentrant=False, **more)


class Checkpointed(nn.Module):
    def __init__(self, where, kind):
        super().__init__()
        self.inp = nn.Linear(4, 8)
        self.blocks = nn.ModuleList((Inside if where == "inside" else Block)(8, 16) for _ in range(2))
        self.head = nn.Linear(8, 4)
        self.where = where
        self.more = {"context_fn": selective} if kind == "selective" else {}
        for block in self.blocks:
            if where == "inside" and kind == "selective":
                block.context = selective

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, **self.more) if self.where == "outside" else block(x)
        return self.head(x)


def checkpointed(rank, world, where, kind, **options):
    return three_steps(rank, Checkpointed(where, kind), shard_blocks, vectors, **options)


@pytest.mark.matrix
def test_a_checkpoint_inside_the_sharded_block():
    assert_expected_inline(
        graphs_of(checkpointed, where="inside", kind="plain"),
        """\
forward GwGmwGmmwmmm, saves 448 bytes
backward GmwGmmmmmmmRwmmmmmwRmwRw
""",
    )


def test_a_checkpoint_around_the_sharded_block():
    assert_expected_inline(
        graphs_of(checkpointed, where="outside", kind="plain"),
        """\
forward GwGmwGmmwmmm, saves 448 bytes
backward GmwGmmmmmmmRwmmmmmwRmwRw
""",
    )


@pytest.mark.matrix
def test_a_selective_checkpoint_inside_the_sharded_block():
    assert_expected_inline(
        graphs_of(checkpointed, where="inside", kind="selective"),
        """\
forward GwGmwGmmwmmm, saves 1248 bytes
backward GmmwGmmmmRwmmmmwRmwRw
""",
    )


def test_a_selective_checkpoint_around_the_sharded_block():
    assert_expected_inline(
        graphs_of(checkpointed, where="outside", kind="selective"),
        """\
forward GwGmwGmmwmmm, saves 1248 bytes
backward GmmwGmmmmRwmmmmwRmwRw
""",
    )


@pytest.mark.matrix
def test_a_checkpoint_inside_a_block_that_stays_unsharded():
    assert_expected_inline(
        graphs_of(checkpointed, where="inside", kind="plain", reshard_after_forward=False),
        """\
forward GwGmwGmmwmmm, saves 2784 bytes
backward mmmmmmmmRmmmmmwRmwRw
""",
    )


@pytest.mark.matrix
def test_a_checkpoint_around_a_block_that_stays_unsharded():
    assert_expected_inline(
        graphs_of(checkpointed, where="outside", kind="plain", reshard_after_forward=False),
        """\
forward GwGmwGmmwmmm, saves 2784 bytes
backward mmmmmmmmRmmmmmwRmwRw
""",
    )


# ---- checkpoints recompute with the same random numbers


class Decoder(Transformer):
    """Attention, norms, rotary embeddings and dropout; each block is recomputed in backward."""

    def __init__(self, where="around", **kinds):
        super().__init__(dropout=0.2)
        self.kinds = {"use_reentrant": False, **kinds}
        if where == "inside":
            for block in self.blocks:
                block.forward = functools.partial(checkpoint, block.forward, **self.kinds)
        self.where = where

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            more = self.cos[: x.shape[1]], self.sin[: x.shape[1]]
            x = checkpoint(block, x, *more, **self.kinds) if self.where == "around" else block(x, *more)
        return self.head(self.norm(x))


KINDS = {"plain": {}, "selective": {"context_fn": selective}, "reentrant": {"use_reentrant": True}}


def seeded_loss(model, rank, step):
    torch.manual_seed(step + 10 * rank)
    return next_token_loss(model, *token_batch(rank, step))


def decoder(rank, world, where, kind):
    def loss_of(model, step):
        return seeded_loss(model, rank, step)

    return three_steps(rank, Decoder(where, **KINDS[kind]), shard_blocks, None, loss_of=loss_of, steps=2)


@pytest.mark.parametrize(
    ("where", "kind"),
    [more("around", "plain"), more("inside", "plain"), more("around", "selective"), more("around", "reentrant")],
)
def test_checkpointed_attention_with_dropout_recomputes_the_same_masks(where, kind):
    graphs = graphs_of(decoder, where=where, kind=kind).splitlines()
    assert [graph.split()[0] for graph in graphs] == ["forward", "backward"]
    assert [graph.split()[1].count("G") for graph in graphs] == [3, 2]  # the root's own group stays unsharded


@pytest.mark.parametrize(
    ("backend", "order"),
    [
        ("aot_eager", "shard, torch.compile"),
        more("aot_eager", "torch.compile, shard"),
        more("aot_eager", "shard, m.compile()"),
        more("inductor", "torch.compile, shard"),
        more("composable_shard", "shard, torch.compile"),
    ],
)
@distributed(world=2, limit_s=240)  # Inductor compiles for long without its cache on disk
def test_checkpointed_attention_with_dropout_compiles_like_the_unsharded_model(rank, world, order, backend):
    torch._dynamo.reset()
    quiet(lambda: importlib.import_module("torch._inductor.compile_fx"))
    torch.manual_seed(3)
    plain = Decoder()
    model = run = copy.deepcopy(plain)
    if order == "torch.compile, shard":
        run = torch.compile(model, backend=backend, fullgraph=True)
    shard_blocks(model, fully_shard)
    if order == "shard, torch.compile":
        run = torch.compile(model, backend=backend, fullgraph=True)
    elif order == "shard, m.compile()":
        model.compile(backend=backend)
    alone = torch.compile(plain, backend=backend, fullgraph=True)
    for step in range(2):
        losses = [seeded_loss(each, 0, step) for each in (alone, run)]
        assert torch.allclose(*losses, rtol=1e-5), losses
        for loss in losses:
            loss.backward()
        for name, param in plain.named_parameters():
            torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), param.grad, msg=name)
        for each in (plain, model):
            torch.optim.SGD(each.parameters(), lr=0.1).step()
            each.zero_grad()
