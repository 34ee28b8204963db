"""Communication in few bits combined with offload, loss scalers and replicas, and with extreme values."""

import math
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import composable_shard as cs
from _blocks import next_token_loss, token_batch
from _compiling import even, graphs_of, three_steps
from _low_bits import (
    BLOCK,
    Ranks,
    arrived_at_random,
    assert_trains_alike,
    by_piece,
    groups_of,
    plain,
    round_weights,
    sharded,
    trains_as_one_that_rounds,
    whole_of,
)
from _models import shard_blocks, vectors
from _pool import distributed, more, simulated
from composable_shard import CommPolicy, CPUOffloadPolicy, fully_shard
from composable_shard._comm.mesh import MeshInfo
from composable_shard._comm.rounding import Rounding
from composable_shard._group.reduction import ReduceBucket
from composable_shard._policies import Wire

BOTH = CommPolicy(gather="fp8", reduce="int8", block=BLOCK)


# ---- offload


@pytest.fixture
def offloading():
    """Keep shards on the host. The CPU is both the accelerator and the host. Yields addresses of copies to the host."""
    homes, real = [], ReduceBucket._at_home

    def at_home(bucket, out):
        home = real(bucket, out)
        assert home is not out
        homes.append(home.untyped_storage().data_ptr())
        return home

    with (
        mock.patch.object(MeshInfo, "offloads", property(lambda info: True)),
        mock.patch.object(ReduceBucket, "_at_home", at_home),
    ):
        yield homes


OFFLOADED = [
    CommPolicy("fp8", "int8", block=BLOCK),
    CommPolicy("int8", "bf16", block=BLOCK),
    CommPolicy("bf16", "fp8", block=BLOCK),
    CommPolicy("int8", None, block=BLOCK),
]


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("policy", OFFLOADED, ids=str)
def test_offloaded_shards_are_rounded_like_others(offloading, policy, rows):
    @simulated(world=2)
    def run(rank, world):
        model = trains_as_one_that_rounds(rank, world, policy, rows, offload_policy=CPUOffloadPolicy(pin_memory=False))
        next_token_loss(model, *token_batch(rank, 4)).backward()
        for param in model.parameters():
            assert param.grad.to_local().untyped_storage().data_ptr() in offloading

    run()


def low_bits(model, shard, **options):
    shard_blocks(model, shard, **options)
    model.set_comm_policy(CommPolicy(gather="int8", reduce="int8", block=8))


def offloaded(rank, world, **options):
    with mock.patch.object(MeshInfo, "offloads", property(lambda info: True)):
        return three_steps(rank, even(), low_bits, vectors, offload_policy=CPUOffloadPolicy(pin_memory=False))


def test_the_compiled_graph_with_offloaded_shards_is_bitwise_identical_to_eager():
    assert graphs_of(offloaded).startswith("forward Gw")


# ---- loss scalers


class Spoiled(torch.autograd.Function):
    """The identity, with one element of the gradient replaced by a value that is not finite."""

    @staticmethod
    def forward(ctx, x, value):
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        grad.view(-1)[-1] = ctx.value
        return grad, None


class Spoilable(nn.Module):
    """A linear layer. If `spoil` is not zero, one element of its weight's gradient is `spoil`."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 32) / 6)
        self.spoil = 0.0

    def forward(self, x):
        return x @ (Spoiled.apply(self.weight, self.spoil) if self.spoil else self.weight).t()


def spoilable(policy):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), Spoilable())
    for module in (model[2], model):
        fully_shard(module)
    model.set_comm_policy(policy)
    return model


@pytest.mark.parametrize("value", [math.inf, more(-math.inf), math.nan])
@pytest.mark.parametrize("policy", [BOTH, more(CommPolicy("int8", "fp8", block=BLOCK)), CommPolicy("fp8", "bf16")])
@distributed(world=2)
def test_if_one_rank_overflows_all_ranks_skip_the_step_and_continue_exactly(rank, world, policy, value):
    model, other = spoilable(policy), spoilable(policy)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.05) for each in (model, other)]
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    scales = []
    for step in range(5):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step + rank))
        overflows = step == 1
        model[2].spoil = value if overflows and rank == 1 else 0.0
        losses = [each(x).square().mean() for each in (model, other)]
        assert torch.equal(*losses)
        scaler.scale(losses[0]).backward()
        losses[1].backward()  # rounds the same number of times, so that both models use the same random numbers
        before = [param.to_local().clone() for param in model.parameters()]
        scaler.step(optimizers[0])
        scaler.update()
        scales.append(scaler.get_scale())
        if overflows:
            for param, value_before in zip(model.parameters(), before, strict=True):
                assert torch.equal(param.to_local(), value_before)
        else:
            optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(one.to_local(), two.to_local())
    assert scales == [64.0, 32.0, 32.0, 64.0, 64.0]
    with torch.no_grad():
        assert torch.equal(*[each.eval()(torch.ones(2, 8)) for each in (model, other)])


# ---- replicas


class Replicas:
    """Means over replicas whose sums are rounded stochastically."""

    def __init__(self, groups, wire, shape):
        self.groups, self.wire, (self.replicas, self.pieces) = groups, wire, shape
        self.number = 0

    def mean(self, own):
        """The mean of the gradients of all ranks, by name. `own` has the gradients of each rank, by name."""
        totals = {}
        for group in self.groups:
            for replica in range(self.replicas):
                rows = own[replica * self.pieces : (replica + 1) * self.pieces]
                sums = {name: by_piece(sum([row[name] for row in rows]), self.pieces) for name in group}
                for piece in range(self.pieces):
                    self._add(totals, sums, group, replica, piece)
        self.number += 1
        whole = {name: torch.cat([totals[name, piece] for piece in range(self.pieces)]) for name in own[0]}
        return {name: whole_of(each[None], own[0][name]) / len(own) for name, each in whole.items()}

    def _add(self, totals, sums, group, replica, piece):
        name = f"{group[0]} between replicas"
        generator = Rounding(self.number).seeded(name, replica * self.pieces + piece, torch.device("cpu"))
        for name in group:
            numbers = sums[name][piece : piece + 1]
            got = arrived_at_random(numbers, self.wire, generator)[0]
            totals[name, piece] = got if replica == 0 else totals[name, piece] + got


@pytest.mark.parametrize("form", ["int8", more("fp8"), "bf16"])
@pytest.mark.parametrize("shape", [(2, 2), more((4, 1))])
@simulated(world=4)
def test_rounding_only_between_replicas_is_bitwise_identical_to_a_model_that_rounds_sums(rank, world, shape, form):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    model, reference = sharded(CommPolicy(replicas=form, block=BLOCK), mesh=mesh), plain()
    replicas = Replicas(groups_of(model), Wire(form, BLOCK), shape)
    assert_trains_alike(rank, world, model, reference, replicas.mean)


# ---- extreme values, and empty shards

ODD = {  # values in the first row of a weight
    "nan": [math.nan, 1.0],
    "inf": [math.inf, -1.0],
    "denormal": [1e-40, -1e-45],
    "tiny": [1.2e-38, 0.0],
    "huge": [3e38, -1.0],
    "zero": [0.0, -0.0],
}


def empty_and_short():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 3), nn.Linear(3, 48, bias=False), nn.Linear(48, 1), nn.Linear(1, 32))


@pytest.mark.parametrize("form", ["int8", "fp8", "bf16"])
@pytest.mark.parametrize("kind", ODD)
@simulated(world=4)
def test_extreme_weights_are_rounded_correctly_and_do_not_affect_others(rank, world, kind, form):
    reference, wire = empty_and_short(), Wire(form, BLOCK)
    with torch.no_grad():
        for layer in reference:
            layer.weight[0, : min(2, layer.weight.shape[1])] = torch.tensor(ODD[kind])[: layer.weight.shape[1]]
    model = empty_and_short()
    model.load_state_dict(reference.state_dict())
    fully_shard(model)
    assert not all(param.to_local().numel() for param in model.parameters()) or rank == 0
    model.set_comm_policy(CommPolicy(gather=form, block=BLOCK))
    round_weights(reference, wire)
    if kind in ("nan", "inf"):
        assert not all(torch.isfinite(param).all() for param in reference.parameters())
        assert all(torch.isfinite(param[1:]).all() for param in reference.parameters() if param.dim() > 1)
    model.unshard()
    for (name, ours), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.isnan(), expected.isnan()), name
        assert torch.equal(ours.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0)), name
    model.reshard()


class Given(nn.Module):
    """A layer whose gradient is the argument of its forward."""

    def __init__(self, rows, columns):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, columns))

    def forward(self, gradient):
        return (self.weight * gradient).sum()


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("form", ["int8", "fp8", "bf16"])
@pytest.mark.parametrize("kind", ODD)
@simulated(world=2)
def test_extreme_gradients_are_rounded_correctly_and_do_not_affect_others(rank, world, kind, form, rows):
    model, wire = Given(rows, 32), Wire(form, BLOCK)
    fully_shard(model)
    model.set_comm_policy(CommPolicy(reduce=form, block=BLOCK))
    own = []
    for each in range(world):
        gradient = torch.randn(rows, 32, generator=torch.Generator().manual_seed(each))
        if each == 0:
            gradient[0, :BLOCK] = torch.tensor(ODD[kind]).repeat(BLOCK // 2)
        own.append({"weight": gradient})
    model(own[rank]["weight"]).backward()
    mean = Ranks([["weight"]], wire, world).mean(own)["weight"]
    grad = model.weight.grad.full_tensor()
    assert torch.equal(grad.isnan(), mean.isnan())
    assert torch.equal(grad.nan_to_num(nan=7.0), mean.nan_to_num(nan=7.0))
    spoiled = kind in ("nan", "inf")
    assert torch.isfinite(grad[0, :BLOCK]).all() != spoiled
    assert torch.isfinite(grad[0, BLOCK:]).all()
    assert torch.isfinite(grad[1:]).all()


@simulated(world=2)
def test_shard_by_class_accepts_a_policy_for_offloaded_shards(rank, world):
    model = plain()
    options = {"comm_policy": BOTH, "offload_policy": CPUOffloadPolicy(pin_memory=False)}
    cs.shard_by_class(model, {type(model.blocks[0])}, **options)
    expected = sharded(BOTH)
    assert torch.equal(*[next_token_loss(each, *token_batch(rank, 0)) for each in (model, expected)])
