"""The matrix of the compiled path, continued: precision, selections of parameters, and module state."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from expecttest import assert_expected_inline

from _compiling import LIMIT_S, even, graphs_of, three_steps
from _models import Block, TiedText, shard_blocks, shard_lists, shard_nested, tokens, vectors
from _pool import POOL
from composable_shard import CPUOffloadPolicy, MixedPrecisionPolicy

# ---- precision


def mixed_precision(rank, world, reduce_dtype):
    policy = MixedPrecisionPolicy(torch.bfloat16, getattr(torch, reduce_dtype))
    return three_steps(rank, even(), shard_blocks, vectors, mp_policy=policy)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("reduce_dtype", ["float32", "bfloat16"])
def test_mixed_precision_casts_before_the_gather(reduce_dtype, world):
    text = graphs_of(mixed_precision, world=world, reduce_dtype=reduce_dtype)
    if world == 2:
        assert_expected_inline(
            text,
            """\
forward GwGmwGmmwmmm, saves 1184 bytes
backward GmmwGmmmmRwmmmmwRmwRw
""",
        )


class TwoDtypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 6)
        self.b = nn.Linear(6, 4).double()

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)).double())


def shard_it(model, fully_shard, **options):
    fully_shard(model, **options)


def two_dtypes(rank, world):
    return three_steps(rank, TwoDtypes(), shard_it, vectors, reshard_after_forward=True)


def test_a_group_of_two_dtypes_has_one_collective_per_dtype():
    assert_expected_inline(
        graphs_of(two_dtypes),
        """\
forward Gwmm, saves 360 bytes
backward GwmmmRw
""",
    )


# ---- selections of parameters


def freeze_most(model):
    """Freeze parameters as with adapters: one group completely, and one except a bias."""
    model.blocks[0].requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    model.blocks[1].up.bias.requires_grad_(True)


def frozen(rank, world):
    return three_steps(rank, even(), shard_blocks, vectors, before=freeze_most)


def test_frozen_parameters_are_gathered_and_not_reduced():
    assert_expected_inline(
        graphs_of(frozen),
        """\
forward GwGmwGmmwmmm, saves 1328 bytes
backward GmmwGmmRwmmmwRw
""",
    )


def tied(rank, world):
    return three_steps(rank, TiedText(8, 8), shard_blocks, tokens_of_8)


def tokens_of_8(rank, step):
    return (tokens(rank, step)[0] % 8,)


def test_tied_weights_are_one_parameter():
    assert_expected_inline(
        graphs_of(tied),
        """\
forward GwGwGmmwmmm, saves 5440 bytes
backward GmmwGmmmmRwmmmmwRwRw
""",
    )


def lists(rank, world):
    return three_steps(rank, even(3), shard_lists, vectors)


@pytest.mark.matrix
def test_a_list_is_gathered_once():
    assert_expected_inline(
        graphs_of(lists),
        """\
forward GwGmwGmmmmwmmm, saves 3352 bytes
backward GmmwGmmmmRwmmmmmmmmwRmwRw
""",
    )


def nested(rank, world):
    return three_steps(rank, even(1), shard_nested, vectors)


@pytest.mark.matrix
def test_groups_within_groups():
    assert_expected_inline(
        graphs_of(nested),
        """\
forward GwGmwGwmmm, saves 1288 bytes
backward GmmwGmmwmmRwRmwRw
""",
    )


class PartlyUsed(nn.Module):
    """One parameter is used on rank 0 only, and another one on no rank."""

    def __init__(self, rank):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.mine = nn.Parameter(torch.ones(4))
        self.nobodys = nn.Parameter(torch.ones(4))
        self.rank = rank

    def forward(self, x):
        x = self.a(x)
        return x * self.mine if self.rank == 0 else x


def partly_used(rank, world):
    return three_steps(rank, PartlyUsed(rank), shard_it, vectors, reshard_after_forward=True)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.matrix)])
def test_parameters_that_some_ranks_do_not_use(world):
    """Graphs differ between ranks, but their collectives do not."""
    texts = POOL.run("test_compiled_parameters:partly_used", world, limit_s=LIMIT_S)
    assert_expected_inline(
        texts[0].replace("X", "R"),
        """\
forward Gwm, saves 80 bytes
backward GwmRw
""",
    )
    assert_expected_inline(
        texts[1].replace("X", "R"),
        """\
forward Gwm, saves 0 bytes
backward GmwRw
""",
    )


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(4, 8)])
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.blocks[0](self.blocks[0](x)))


def twice(rank, world):
    return three_steps(rank, Twice(), shard_blocks, vectors)


def test_a_module_used_twice_is_gathered_and_reduced_twice():
    assert_expected_inline(
        graphs_of(twice),
        """\
forward GwGwmmmmm, saves 1104 bytes
backward GmmwmmmmRmmmmRwwRw
""",
    )


def few_ranks(rank, world):
    return three_steps(rank, even(1), shard_blocks, vectors, reshard_after_forward=2)


@pytest.mark.matrix
def test_weights_that_eager_reshards_among_few_ranks_are_gathered_among_all():
    assert_expected_inline(
        graphs_of(few_ranks, world=4),
        """\
forward GwGmwmmm, saves 1160 bytes
backward GwGmmwmmmmRmwRw
""",
    )


def offloaded(rank, world):
    return three_steps(rank, even(1), shard_blocks, vectors, offload_policy=CPUOffloadPolicy())


@pytest.mark.matrix
def test_offloading_without_an_accelerator_changes_nothing():
    assert_expected_inline(
        graphs_of(offloaded),
        """\
forward GwGmwmmm, saves 1288 bytes
backward GmmwmmmmRmwRw
""",
    )


# ---- module state


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), nn.Linear(8, 4)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def normed(rank, world):
    return three_steps(rank, Normed(), shard_blocks, vectors)


def test_buffers_are_updated_as_in_eager():
    assert_expected_inline(
        graphs_of(normed),
        """\
forward GwGmwm, saves 448 bytes
backward GwGmmRwmwRw
""",
    )


class Auxiliary(nn.Module):
    """A block that stores its own auxiliary loss, which the caller adds."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x):
        self.loss = self.lin.weight.square().mean()
        return torch.tanh(self.lin(x))


class WithAuxiliary(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Auxiliary() for _ in range(2))

    def forward(self, x):
        x = F.pad(x, (0, 4))
        for block in self.blocks:
            x = block(x)
        return x


def auxiliary(rank, world):
    def loss_of(each, step):
        out = each(*vectors(rank, step))
        return out.square().mean() + sum(block.loss for block in each.blocks)

    return three_steps(rank, WithAuxiliary(), shard_blocks, vectors, loss_of=loss_of)


@pytest.mark.matrix
def test_an_auxiliary_loss_stored_on_a_module():
    assert_expected_inline(
        graphs_of(auxiliary),
        """\
forward GwGmwm, saves 480 bytes
backward GwGmmRmwwRw
""",
    )
