"""Collectives in fewer bits: the number of operators that a group adds to a step, and rounding in turns."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from _blocks import Transformer, next_token_loss, token_batch
from _low_bits import BLOCK, noise_like, trains_as_one_that_rounds
from _pool import simulated
from composable_shard import CommPolicy, fully_shard, testing
from composable_shard._comm import rounding
from composable_shard._comm.rounding import numbers_in
from composable_shard._plan import parcel as parcels
from composable_shard._plan.parcel import parcel
from composable_shard._policies import Wire

NO_WORK = ("empty", "new_empty", "empty_like", "empty_strided", "unsafe_split_with_sizes")
WORLD = 4


class Counts(TorchDispatchMode):
    """Counts operators that compute or write tensors; views and allocations do not count."""

    def __init__(self):
        super().__init__()
        self.all = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        self.all += not (func.is_view or name in NO_WORK or func.namespace in ("c10d", "prim", "profiler"))
        return func(*args, **(kwargs or {}))


def operators(model, policy, loss_of):
    """Count the operators of a later step of a model whose blocks are groups."""
    with testing.fake(WORLD):
        for module in (*model.blocks, model):
            fully_shard(module)
        if policy is not None:
            model.set_comm_policy(policy)
        for _ in range(2):
            loss_of(model).backward()
            model.zero_grad()
        with Counts() as counts:
            loss_of(model).backward()
    return counts.all


def added_by_a_block(make, policy, loss_of):
    """Count the operators that one more block adds to a step, minus those that it adds without a policy."""
    bits, none = ([operators(make(layers), each, loss_of) for layers in (1, 3)] for each in (policy, None))
    return ((bits[1] - bits[0]) - (none[1] - none[0])) / 2


def decoder(layers):
    return Transformer(layers=layers, dim=32, hidden=64)


def loss_of_decoder(model):
    return next_token_loss(model, *token_batch(0, 0))


class Wide(nn.Module):
    """Blocks of many square layers in sequence."""

    def __init__(self, blocks, layers):
        super().__init__()
        self.blocks = nn.Sequential(
            *[nn.Sequential(*[nn.Linear(32, 32) for _ in range(layers)]) for _ in range(blocks)]
        )

    def forward(self, x):
        return self.blocks(x).sum()


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (CommPolicy("fp8", block=32), 40),
        (CommPolicy("int8", block=32), 34),
        (CommPolicy(reduce="fp8", block=32), 35),
        (CommPolicy(reduce="int8", block=32), 26),
    ],
    ids=str,
)
def test_a_decoder_block_adds_a_number_of_operators_that_does_not_depend_on_its_layers(policy, expected):
    assert added_by_a_block(decoder, policy, loss_of_decoder) == expected

    def loss_of(model):
        return model(torch.ones(2, 32))

    few, many = (added_by_a_block(lambda blocks, n=n: Wide(blocks, n), policy, loss_of) for n in (3, 12))
    assert few == many


@pytest.mark.parametrize("form", ["fp8", "int8", "bf16"])
@pytest.mark.parametrize("lead", [(), (3,)])
def test_rounding_in_pieces_that_fit_into_the_cpu_cache_is_bitwise_identical(monkeypatch, form, lead):
    (part,) = parcel([(7, 96)], 4, Wire(form, 32)).parts
    numbers = torch.randn(*lead, 7 * 96)

    def rounded():
        (to,) = numbers_in(torch.zeros(*lead, part.nbytes + 4 * 24, dtype=torch.uint8), [part], torch.float32)
        noise = noise_like(to.values, torch.Generator().manual_seed(0))
        to.put(numbers.view(to.values.shape), noise)
        out = torch.empty(to.values.shape)
        to.fill(out)
        return out

    whole = rounded()
    monkeypatch.setattr(rounding, "CACHED", 200)
    assert torch.equal(rounded(), whole)
    assert 0 < (whole - numbers.view(whole.shape)).abs().max() < 0.3


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("at_once", [1, 2000, 4000])
@pytest.mark.parametrize("policy", [CommPolicy("fp8", "int8", block=BLOCK), CommPolicy("int8", "fp8", block=BLOCK)])
def test_rounding_in_several_turns_is_bitwise_identical(monkeypatch, policy, at_once, rows):
    monkeypatch.setattr(parcels, "AT_ONCE", at_once)
    simulated(world=2)(lambda rank, world: trains_as_one_that_rounds(rank, world, policy, rows) and None)()


def test_parameters_with_equal_blocks_are_one_part_and_large_ones_take_turns(monkeypatch):
    pieces, wire = [(8, 64), (8, 1), (8, 64), (8, 48), (1, 64), (9, 64)], Wire("int8", 64)

    def members(ranks=1):
        return [(part.turn, part.members) for part in parcel(pieces, 4, wire, 8, ranks).parts]

    assert members() == [(0, (0, 2, 4, 5)), (0, (1, 6)), (0, (3,))]
    monkeypatch.setattr(parcels, "AT_ONCE", 2 * (8 * 64 + 8))
    assert members(2) == [(0, (0,)), (0, (1,)), (1, (2,)), (2, (3,)), (2, (4,)), (3, (5,)), (4, (6,))]
    values = [(part.begin, part.nbytes) for part in parcel(pieces, 4, wire, 8, 2).parts]
    assert all(one[0] + one[1] <= two[0] for one, two in itertools.pairwise(values))
