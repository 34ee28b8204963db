"""One call whose parameters are on several meshes, for example experts on fewer ranks than the rest."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.tensor import DTensor, Replicate, Shard

import composable_shard as cs
from _engines import ENGINES, fully_shard, named_mesh
from _pool import distributed
from _stepping import assert_at_rest, engine_of
from composable_shard import ShardPlacementResult, last_record, make_plan, testing
from composable_shard._plan.schedule import Kind

TORCH_HAS_RESULTS = ShardPlacementResult.__module__.startswith("torch.distributed")
SIDES = ("ours", "fsdp2") if TORCH_HAS_RESULTS else ("ours",)


class Mixture(nn.Module):
    """A router and two experts; a rank's data determine which of them it uses."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.router = nn.Linear(8, 2)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        y = self.norm(x)
        gates = self.router(y).softmax(-1)
        return x + sum(gates[..., i : i + 1] * expert(y).tanh() for i, expert in enumerate(self.experts))


def make():
    torch.manual_seed(3)
    return nn.Sequential(Mixture(), Mixture(), nn.Linear(8, 4))


def experts_on(model, info):
    """Return a placement function that shards the experts on another mesh."""
    experts = {id(p) for module in model.modules() if isinstance(module, Mixture) for p in module.experts.parameters()}
    return lambda p: ShardPlacementResult(None, info) if id(p) in experts else None


def shard(model, engine, mesh, info, **options):
    for module in model:
        choose = experts_on(module, info)
        engine(module, mesh=mesh, shard_placement_fn=choose, **options)
    engine(model, mesh=mesh, **options)
    return model


def meshes():
    return named_mesh((4,), ("dp",)), named_mesh((2, 2), ("edp", "ep"))


def pair_info(experts):
    """Describe experts that are sharded over two adjacent ranks."""
    return FSDPMeshInfo(experts["ep"], shard_mesh_dim=0)


def replica_info(experts):
    """Describe experts that are sharded over two ranks and replicated."""
    return HSDPMeshInfo(experts, shard_mesh_dim=1, replicate_mesh_dim=0)


def batch(rank, step):
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def mean_gradients(plain, rank, step, pairs):
    """Average the gradients of all ranks' unsharded models over the ranks that share each parameter.

    With `pairs`, each pair of ranks shares its experts, which differ from those of the other pair.
    """
    plain.zero_grad()
    plain(batch(rank, step)).square().mean().backward()
    per_rank = [None] * 4
    dist.all_gather_object(per_rank, {name: p.grad for name, p in plain.named_parameters()})
    pair = per_rank[2 * (rank // 2) :][:2]
    sharing = {name: pair if pairs and "experts" in name else per_rank for name in per_rank[0]}
    return {name: sum(each[name] for each in found) / len(found) for name, found in sharing.items()}


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize(("pairs", "reshard"), [(True, True), (True, False), (False, True)])
@distributed(world=4)
def test_training_is_exact(rank, world, pairs, reshard):
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    dense, experts = meshes()
    info = pair_info(experts) if pairs else replica_info(experts)
    plain = make()
    models = {side: shard(make(), ENGINES[side], dense, info, reshard_after_forward=reshard) for side in SIDES}
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (plain, *models.values())]
    for step in range(3):
        want = mean_gradients(plain, rank, step, pairs)
        for side, model in models.items():
            model(batch(rank, step)).square().mean().backward()
            for name, gradient in want.items():
                got = full(model.get_parameter(name).grad)
                torch.testing.assert_close(got, gradient, msg=lambda m, n=name, s=side: f"{s}: gradient of {n}: {m}")
        for name, p in plain.named_parameters():
            p.grad = want[name]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    ours = models["ours"]
    for name, p in plain.named_parameters():
        torch.testing.assert_close(full(ours.get_parameter(name)), p)
    for mine, theirs in zip(ours.parameters(), models[SIDES[-1]].parameters(), strict=True):
        assert (mine.placements, mine.device_mesh) == (theirs.placements, theirs.device_mesh)
    assert_at_rest(ours)


@distributed(world=4)
def test_each_mesh_has_its_own_group_and_name(rank, world):
    dense, experts = meshes()
    model = shard(make(), fully_shard, dense, replica_info(experts))
    plan = make_plan(model)
    assert [group.fqn for group in plan.groups] == ["0", "0 on edp/ep", "1", "1 on edp/ep", "2"]
    assert [group.mesh for group in plan.groups][:2] == ["shard over 4", "replicate over 2, shard over 2"]
    assert model[0].experts[0].weight.placements == (Replicate(), Shard(0))
    model(batch(rank, 0)).square().mean().backward()
    model(batch(rank, 1)).square().mean().backward()
    found = [str(action) for action in last_record(model).actions if action.kind in (Kind.UNSHARD, Kind.REDUCE)]
    assert found == [
        *["UNSHARD 0", "UNSHARD 0 on edp/ep", "UNSHARD 1", "UNSHARD 1 on edp/ep", "UNSHARD 2"],
        *["UNSHARD 2", "UNSHARD 1", "UNSHARD 1 on edp/ep", "REDUCE 2", "UNSHARD 0", "UNSHARD 0 on edp/ep"],
        *["REDUCE 1 on edp/ep", "REDUCE 1", "REDUCE 0 on edp/ep", "REDUCE 0"],
    ]
    assert last_record(model).actions == make_plan(model).actions()


@distributed(world=4)
def test_methods_reach_all_groups_of_a_module(rank, world):
    dense, experts = meshes()
    model = shard(make(), fully_shard, dense, pair_info(experts))
    plain = make()
    model[0].unshard()
    assert torch.equal(model[0].experts[0].weight, plain[0].experts[0].weight)
    assert torch.equal(model[0].router.weight, plain[0].router.weight)
    model[0].reshard()
    handle = model[1].unshard(async_op=True)
    handle.wait()
    assert torch.equal(model[1].experts[1].weight, plain[1].experts[1].weight)
    model[1].reshard()
    assert all(isinstance(p, DTensor) for p in model.parameters())

    want = mean_gradients(plain, rank, 0, pairs=True)
    model[0].set_gradient_divide_factor(1)  # of all groups of the module
    model.set_requires_gradient_sync(False)
    model(batch(rank, 0)).square().mean().backward()
    assert all(p.grad is None or not p.grad.to_local().any() for p in model.parameters())
    model.set_requires_gradient_sync(True)
    model(batch(rank, 0)).square().mean().backward()
    for name in ("experts.0.weight", "experts.1.bias"):
        torch.testing.assert_close(full(model[0].get_parameter(name).grad), 4 * want[f"0.{name}"])
        torch.testing.assert_close(full(model[1].get_parameter(name).grad), 2 * want[f"1.{name}"])
    model[0].set_modules_to_forward_prefetch([model[1]])
    model[1].set_modules_to_backward_prefetch([model[0]])
    model(batch(rank, 0)).square().mean().backward()
    assert [type(each).__name__ for each in fully_shard.state(model[0])._fsdp_param_groups] == ["GroupFacade"] * 2


@distributed(world=4)
def test_state_dicts_copies_and_clipping_are_exact_after_an_error(rank, world):
    dense, experts = meshes()
    info = replica_info(experts)
    model, other = (shard(make(), fully_shard, dense, info) for _ in range(2))
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    model.unshard()
    model[0].unshard()
    state = model.state_dict()
    assert all(isinstance(value, DTensor) for value in state.values())
    other.load_state_dict(state)
    other.load_state_dict(make().state_dict())  # full state dicts are loaded, too
    made = copy.deepcopy(other)

    def fail(*args):
        raise ZeroDivisionError

    hook = made[1].norm.register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        made(batch(rank, 0))
    hook.remove()
    assert all(isinstance(p, DTensor) for p in made.parameters())
    for each in (model, other, made):
        each(batch(rank, 0)).square().mean().backward()
    for a, b, c in zip(model.parameters(), other.parameters(), made.parameters(), strict=True):
        assert torch.equal(a.grad.to_local(), b.grad.to_local())
        assert torch.equal(a.grad.to_local(), c.grad.to_local())
    plain = make()
    want = mean_gradients(plain, rank, 0, pairs=False)
    for name, p in plain.named_parameters():
        p.grad = want[name]
    norm = cs.clip_grad_norm_(model.parameters(), 0.1)
    torch.testing.assert_close(full(norm), nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
    for name, p in plain.named_parameters():
        torch.testing.assert_close(full(model.get_parameter(name).grad), p.grad)


@distributed(world=4)
def test_checkpoints_and_forwards_without_gradients(rank, world):
    dense, experts = meshes()
    model = shard(make(), fully_shard, dense, pair_info(experts))
    plain = make()
    with torch.no_grad():
        torch.testing.assert_close(model(batch(rank, 0)), plain(batch(rank, 0)))
    out = batch(rank, 0)
    for block in model:
        out = torch.utils.checkpoint.checkpoint(block, out, use_reentrant=False)
    out.square().mean().backward()
    for name, gradient in mean_gradients(plain, rank, 0, pairs=True).items():
        torch.testing.assert_close(full(model.get_parameter(name).grad), gradient)


@pytest.mark.matrix
@distributed(world=4)
def test_one_full_graph_equals_eager(rank, world):
    dense, experts = meshes()
    info = pair_info(experts)
    eager, model = (shard(make(), fully_shard, dense, info) for _ in range(2))
    torch._dynamo.reset()
    run = cs.compile(model, backend="aot_eager")
    for step in range(2):
        for each in (eager, run):
            each(batch(rank, step)).square().mean().backward()
        for (name, want), (_, got) in zip(eager.named_parameters(), model.named_parameters(), strict=True):
            assert torch.equal(got.grad.to_local(), want.grad.to_local()), name


@distributed(world=4)
def test_mistakes_are_errors(rank, world):
    dense, experts = meshes()
    odd = HSDPMeshInfo(experts, shard_mesh_dim=0, replicate_mesh_dim=1)
    with pytest.raises(
        ValueError, match="mesh_info: expected an FSDPMeshInfo of a 1D mesh or an HSDPMeshInfo of a 2D mesh"
    ):
        fully_shard(make(), mesh=dense, shard_placement_fn=lambda p: ShardPlacementResult(None, odd))
    with pytest.raises(TypeError, match="mesh_info: expected FSDPMeshInfo or HSDPMeshInfo, got DeviceMesh"):
        fully_shard(make(), mesh=dense, shard_placement_fn=lambda p: ShardPlacementResult(None, dense))
    info = pair_info(experts)
    with pytest.raises(ValueError, match=r"returned S.*3\) for parameter weight"):
        fully_shard(nn.Linear(4, 4), mesh=dense, shard_placement_fn=lambda p: ShardPlacementResult(Shard(3), info))
    model = make()[0]
    with pytest.raises(ValueError, match="a factor of 2, not 4"):
        fully_shard(model, mesh=dense, shard_placement_fn=experts_on(model, info), reshard_after_forward=4)
    assert not any(isinstance(p, DTensor) for p in model.parameters())


def test_groups_of_one_module_share_its_edges_and_the_stricter_limit_in_a_graph():
    def body(here):
        mesh, experts = meshes()
        model = shard(make(), cs.fully_shard, mesh, pair_info(experts))
        model(torch.randn(3, 8)).sum().backward()
        plan = make_plan(model)
        own, on_experts = sorted(fqn for fqn in plan.order if fqn.partition(" on ")[0] == "0")
        edges = replace(
            plan.effective_schedule(),
            forward=((own, ("1", on_experts)), (on_experts, ("2",))),
            in_flight=((own, 1), (on_experts, 3)),
        )
        model.set_plan(replace(plan, schedule=edges))
        told = engine_of(model).order.for_graphs(reductions=True)
        return told.forward["0"], told.in_flight["0"]

    assert testing.spmd(4)(body) == [(("1", "2"), 1)] * 4
