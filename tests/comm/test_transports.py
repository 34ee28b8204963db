"""The transport of a group: a named one, or one by backend and size. All are bitwise identical."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import Shard

import composable_shard
from _engines import forced, mesh_of
from _parity import Case, check_parity
from _pool import distributed, more, simulated
from composable_shard._comm.transports import LARGE_FROM_BYTES
from composable_shard.errors import RankMismatchError, ShardConfigValueError
from composable_shard.testing import spmd

WIDE = 256  # a square weight has 256 KiB, so its pieces are gathered alone at world sizes 2 and 4
NAMES = ["p2p", "packed"]


class Block(nn.Module):
    """Large and small parameters, one that is uneven at any world size, and one with a noncontiguous gradient."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDE, WIDE)
        self.odd = nn.Linear(WIDE, WIDE + 1)
        self.down = nn.Linear(WIDE + 1, WIDE, bias=False)
        self.turned = nn.Parameter(torch.randn(WIDE, WIDE) / WIDE)

    def forward(self, x):
        return x + self.down(torch.relu(self.odd(self.up(x)))) @ self.turned.t()


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDE, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def rows(rank, step):
    return (torch.randn(4, WIDE, generator=torch.Generator().manual_seed(100 * step + rank)),)


def train(model, rank, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        model(*rows(rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def sharded(policy=None, **kwargs):
    torch.manual_seed(0)
    model, more = Wide(), {} if policy is None else {"mp_policy": policy}
    for block in model.blocks:
        composable_shard.fully_shard(block, **more, **kwargs)
    return composable_shard.fully_shard(model, **more, **kwargs)


@pytest.mark.parametrize("name", NAMES)
@distributed(world=(2, 4))
def test_training_matches_the_unsharded_model_on_every_transport(rank, world, name):
    with forced(name):
        check_parity(Case(model=Wide, batch=rows), rank, world)


KINDS = ["bfloat16", "float16 sums", "hsdp", "offload", "dim 1"]


def trained(rank, kind):
    """Train with cast, padded or transposed pieces. Return the parameters and the plan's peak memory in bytes."""
    half, policy = torch.bfloat16, composable_shard.MixedPrecisionPolicy
    kwargs = {
        "bfloat16": lambda: {"policy": policy(param_dtype=half, reduce_dtype=torch.float32)},
        "float16 sums": lambda: {"policy": policy(reduce_dtype=torch.float16)},
        "hsdp": lambda: {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))},
        "offload": lambda: {"offload_policy": composable_shard.CPUOffloadPolicy(pin_memory=False)},
        "dim 1": lambda: {"shard_placement_fn": lambda p: torch.distributed.tensor.Shard(int(p.shape == (WIDE, WIDE)))},
    }[kind]()
    model = sharded(**kwargs)
    train(model, rank)
    record, plan = composable_shard.last_record(model), composable_shard.make_plan(model)
    assert record.live_bytes == plan.live_bytes()
    return [p.full_tensor() for p in model.parameters()], plan.peak_bytes


@pytest.mark.parametrize("kind", KINDS)
@distributed(world=4)
def test_transports_of_gloo_are_bitwise_identical_even_with_cast_padded_or_transposed_pieces(rank, world, kind):
    found = {}
    for name in NAMES:
        with forced(name):
            found[name] = trained(rank, kind)
    assert all(torch.equal(a, b) for a, b in zip(found["p2p"][0], found["packed"][0], strict=True))
    assert found["p2p"][1] <= found["packed"][1]


@pytest.mark.parametrize("kind", KINDS)
def test_direct_and_packed_gathers_are_bitwise_identical_even_with_cast_padded_or_transposed_pieces(kind):
    found = {}
    for name in ("direct", "packed"):
        with forced(name):
            found[name] = spmd(4)(lambda here: trained(here.rank, kind))
    for direct, packed in zip(found["direct"], found["packed"], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(direct[0], packed[0], strict=True))
        assert direct[1] <= packed[1]


class Shared(nn.Module):
    """The gradient of `where` shares its memory with that of the activation, to which a hook writes."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDE, WIDE, bias=False)
        self.where = nn.Parameter(torch.randn(WIDE, WIDE))

    def forward(self, x):
        h = self.first(x)
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient.mul_(2))
        return h + self.where


@pytest.mark.parametrize("name", NAMES)
@distributed(world=2)
def test_gradients_that_a_hook_writes_to_are_the_same_on_all_transports(rank, world, name):
    grads = {}
    for each in (name, "packed"):
        with forced(each):
            torch.manual_seed(0)
            model = composable_shard.fully_shard(Shared())
            torch.manual_seed(rank)
            model(torch.randn(WIDE, WIDE)).square().sum().backward()
            grads[each] = [p.grad.full_tensor() for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(grads[name], grads["packed"], strict=True))


class Conjugate(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDE, WIDE, dtype=torch.complex64))

    def forward(self, x):
        return (x @ self.weight.mH).abs()


@pytest.mark.parametrize("name", NAMES)
@distributed(world=2)
def test_lazily_conjugated_gradients_are_reduced(rank, world, name):
    with forced(name):
        torch.manual_seed(0)
        plain, model = Conjugate(), Conjugate()
        model.load_state_dict(plain.state_dict())
        composable_shard.fully_shard(model)
        x = torch.randn(2, WIDE, dtype=torch.complex64)
        for each in (plain, model):
            each(x).sum().backward()
        torch.testing.assert_close(model.weight.grad.full_tensor(), plain.weight.grad)


class Halves(nn.Module):
    """Rank 0 uses both modules, the other ranks only one."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, both):
        return self.two(self.one(x)) if both else self.two(x)


@distributed(world=2)
def test_replicas_that_use_different_modules_do_not_hang(rank, world):
    """The wait for a reduction may issue its all-reduce, so it must be at the same place on all ranks."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    plain, model = Halves(), Halves()
    model.load_state_dict(plain.state_dict())
    for child in (model.one, model.two):
        composable_shard.fully_shard(child, mesh=mesh, reshard_after_forward=False)
    composable_shard.fully_shard(model, mesh=mesh)
    model.set_reduce_scatter_unused_params(True)
    x = torch.ones(2, 8)
    model(x, both=True).sum().backward()
    model.zero_grad()
    model.one.unshard()
    model(x, both=rank == 0).sum().backward()
    model.one.reshard()
    ((plain(x, both=True).sum() + plain(x, both=False).sum()) / 2).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)


@distributed(world=2)
def test_the_plan_shows_a_forced_transport_and_an_unknown_name_is_an_error(rank, world):
    for name, shown in {"p2p": "p2p, 2 packed", "packed": "packed"}.items():
        with forced(name):
            line = next(line for line in str(composable_shard.make_plan(sharded())).splitlines() if "blocks.0" in line)
            assert line.endswith(f"  {shown}"), line
    with (
        forced("pigeon"),
        pytest.raises(ShardConfigValueError, match=r"=pigeon: .* has packed, p2p, torch"),
    ):
        sharded()(*rows(rank, 0))


@distributed(world=2)
def test_ranks_that_name_different_transports_get_an_error_and_do_not_hang(rank, world):
    with forced(("packed", "p2p")[rank]), pytest.raises(RankMismatchError, match="transport packed: packed -> p2p"):
        sharded()(*rows(rank, 0))


def shown(nbytes, mesh):
    """Return the transport in the plan of one parameter with `nbytes` bytes."""
    with torch.device("meta"):
        module = nn.Linear(1, nbytes // 4, bias=False)
    return composable_shard.make_plan(composable_shard.fully_shard(module, mesh=mesh)).groups[0].route.name


@distributed(world=(2, 4))
def test_large_groups_use_sends_and_receives_on_gloo(rank, world):
    mesh = mesh_of(world)
    assert shown(LARGE_FROM_BYTES, mesh) == "p2p"
    assert shown(LARGE_FROM_BYTES // 2, mesh) == "packed"
    with forced("packed"):
        assert shown(LARGE_FROM_BYTES, mesh) == "packed"


@simulated(world=2)
def test_other_backends_use_one_transport_for_all_sizes(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    assert [shown(nbytes, mesh) for nbytes in (64, 2 * LARGE_FROM_BYTES)] == ["direct", "direct"]


@distributed(world=2)
def test_a_plan_made_before_the_first_step_has_the_transports_of_the_run(rank, world):
    model = sharded()
    before = [group.route for group in composable_shard.make_plan(model).groups]
    train(model, rank, steps=1)
    assert [group.route for group in composable_shard.make_plan(model).groups] == before


EXACT = [name for name in ("bool", "int8", "int16", "uint16", "uint32", "int64", "uint64") if hasattr(torch, name)]
EIGHT_BITS = [name for name in ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu") if hasattr(torch, name)]


def all_bits(dtype, shape, seed):
    """Return random bit patterns of a dtype, including NaNs."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), generator=generator, dtype=torch.uint8)
    return (raw % 2).bool() if dtype == torch.bool else raw.view(dtype)


class Quantised(nn.Module):
    """Frozen parameters of a narrow dtype, uneven at any world size, together with others."""

    def __init__(self, dtype, mixed):
        super().__init__()
        for name, shape in {"tall": (7, 3), "wide": (5, 8), "one": (1, 6), "large": (130, 520)}.items():
            self.register_parameter(name, nn.Parameter(all_bits(dtype, shape, len(name)), requires_grad=False))
        self.scale = nn.Linear(3, 3) if mixed else nn.Identity()
        self.read = {}

    def forward(self, x):
        self.read = {name: param.detach().clone() for name, param in self.named_parameters() if "scale" not in name}
        return self.scale(x)


def as_bytes(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def cut(param):
    return Shard(1) if param.shape == (5, 8) else None


def assert_read(model, base):
    """Check that the last forward of a model has read the frozen parameters of another one."""
    for key, value in base.named_parameters():
        if "scale" not in key:
            assert model.read[key].dtype is value.dtype
            assert torch.equal(as_bytes(model.read[key]), as_bytes(value.detach())), key


@pytest.mark.parametrize("mixed", [True, False], ids=["mixed", "alone"])
@pytest.mark.parametrize("dtype", [*EIGHT_BITS, *EXACT])
@simulated(world=2)
def test_direct_gathers_of_any_dtype_are_bitwise_identical(rank, world, dtype, mixed):
    base = Quantised(getattr(torch, dtype), mixed)
    model = copy.deepcopy(base)
    composable_shard.fully_shard(model, shard_placement_fn=cut)
    assert composable_shard.make_plan(model).groups[0].route.name == "direct"
    model(torch.ones(2, 3))
    assert_read(model, base)


@pytest.mark.parametrize("mixed", [True, False], ids=["mixed", "alone"])
@pytest.mark.parametrize("dtype", [*EIGHT_BITS, *EXACT])
@distributed(world=(2, more(4)))
def test_parameters_of_any_dtype_are_gathered_bit_for_bit(rank, world, dtype, mixed):
    torch.manual_seed(0)
    base = Quantised(getattr(torch, dtype), mixed)
    engines = dict.fromkeys((*NAMES, "torch"), composable_shard.fully_shard)
    outputs = {}
    for name, shard in (({"fsdp2": fsdp2} if mixed else {}) | engines).items():
        # gloo does not support these dtypes, and FSDP2 gathers them only together with others
        model = shard(copy.deepcopy(base), mesh=mesh_of(world), shard_placement_fn=cut)
        with forced(name) if name in engines else nullcontext():
            out = model(torch.ones(2, 3, requires_grad=True))
            out.sum().backward()
        assert_read(model, base)
        outputs[name] = out.detach()
        if mixed:
            outputs[name] = torch.cat([out.detach(), model.scale.weight.grad.full_tensor()])
    first = next(iter(outputs.values()))
    assert all(torch.equal(first, each) for each in outputs.values())


@pytest.mark.matrix
@distributed(world=2)
def test_parameters_of_eight_bits_are_gathered_in_compiled_graphs_too(rank, world):
    class Scaled(Quantised):
        def forward(self, x):
            return self.scale(x) * self.wide.float().nan_to_num(0.0, 0.0, 0.0).sum()

    torch.manual_seed(0)
    base = Scaled(torch.float8_e4m3fn, mixed=True)
    x = torch.ones(2, 3)
    want = base(x)
    model = composable_shard.fully_shard(copy.deepcopy(base), mesh=mesh_of(world))
    torch._dynamo.reset()  # graphs of earlier tests count towards the recompile limit
    assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(x), want)
