"""Shards whose boundaries are multiples of some rows: they train like others and can be gathered to full tensors."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import composable_shard as cs
from _blocks import Transformer, next_token_loss, token_batch
from _pool import distributed, more, simulated
from composable_shard._torch.ragged import DISPATCHES
from composable_shard.errors import ShardConfigTypeError, ShardConfigValueError


def ragged(param):
    return cs.Ragged(5) if param.ndim == 2 else None


def sharded(model, choose=ragged, **options):
    for module in (*model.blocks, model):
        cs.fully_shard(module, shard_placement_fn=choose, **options)
    return model


def pair(**options):
    torch.manual_seed(0)
    plain = Transformer(layers=2)
    return plain, sharded(copy.deepcopy(plain), **options)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(model, optimizer, rank, steps, first=0, clip=None):
    for step in range(first, first + steps):
        next_token_loss(model, *token_batch(rank, step)).backward()
        if clip is not None:
            cs.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()


def train_alone(plain, optimizer, world, steps, clip=None):
    """Train in one process, with the mean of the ranks' losses."""
    for step in range(steps):
        for rank in range(world):
            (next_token_loss(plain, *token_batch(rank, step)) / world).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(plain.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()


def assert_alike(model, plain, **how):
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(a), whole(b), **how, msg=lambda text, name=name: f"{name}: {text}")


KINDS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True, weight_decay=0.0),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01),
}


@pytest.mark.parametrize("kind", ["adamw", *map(more, ("fused", "sgd", "adagrad", "rmsprop")), "foreach"])
@distributed(world=(2, more(4)))
def test_training_matches_one_process(rank, world, kind):
    plain, model = pair()
    train(model, KINDS[kind](model.parameters()), rank, 3, clip=0.5)
    train_alone(plain, KINDS[kind](plain.parameters()), world, 3, clip=0.5)
    assert_alike(model, plain, rtol=1e-4, atol=1e-5)
    assert len({p.to_local().shape for p in model.blocks.parameters() if p.ndim == 2}) > 1


@simulated(world=3)
def test_shard_boundaries_are_multiples_of_the_rows(rank, world):
    layer = nn.Linear(3, 17, bias=False)
    layer.empty = nn.Parameter(torch.empty(0, 3))
    cs.fully_shard(layer, shard_placement_fn=lambda p: cs.Ragged(4))
    assert [layer.weight.to_local().shape[0], layer.empty.to_local().shape[0]] == [[8, 8, 1][rank], 0]
    assert layer.weight.placements == (cs.Ragged(4),)
    assert isinstance(layer.weight, nn.Parameter)
    assert layer.weight.full_tensor().shape == (17, 3)


@simulated(world=4)
def test_training_is_exact_with_replicas_and_few_ranks(rank, world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    plain, model = pair(mesh=mesh)
    assert model.head.weight.placements == (Replicate(), cs.Ragged(5))
    _, few = pair(reshard_after_forward=2)
    for net in (model, few):
        train(net, KINDS["adamw"](net.parameters()), rank, 2)
    train_alone(plain, KINDS["adamw"](plain.parameters()), world, 2)
    assert_alike(model, plain, rtol=1e-4, atol=1e-5)
    assert_alike(few, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("policy", [
    {"mp_policy": cs.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    more({"offload_policy": cs.CPUOffloadPolicy(pin_memory=False)}),
])  # fmt: skip
@simulated(world=2)
def test_policies_give_the_results_of_even_shards(rank, world, policy):
    _, model = pair(**policy)
    _, other = pair(choose=None, **policy)
    for net in (model, other):
        optimizer = KINDS["sgd"](net.parameters())
        net.set_requires_gradient_sync(False)
        next_token_loss(net, *token_batch(rank, 9)).backward()
        net.set_requires_gradient_sync(True)
        train(net, optimizer, rank, 2)
    assert_alike(model, other, rtol=0, atol=0)


@simulated(world=2)
def test_a_plan_has_the_rows_and_survives_json(rank, world):
    _, model = pair()
    plan = cs.make_plan(model)
    assert cs.ShardPlan.from_json(plan.to_json()) == plan
    rows = {p.fqn: p.rows for group in plan.groups for p in group.params}
    assert rows["head.weight"] == 5
    assert rows["norm.weight"] == 1


@distributed(world=2)
def test_state_dicts_are_ragged_and_load_full_tensors(rank, world, tmp_path):
    plain, model = pair()
    optimizer = KINDS["adamw"](model.parameters())
    train(model, optimizer, rank, 1)
    held = model.state_dict()
    full = cs.checkpoint.full_state_dict(model, rank0_only=False)
    states = cs.checkpoint.full_optimizer_state_dict(model, optimizer, rank0_only=False)
    assert held["head.weight"].placements == (cs.Ragged(5),)
    plain.load_state_dict(full)
    assert_alike(model, plain, rtol=0, atol=0)
    _, other = pair()
    again = KINDS["adamw"](other.parameters())
    cs.checkpoint.load_full_state_dict(other, full)
    cs.checkpoint.load_full_optimizer_state_dict(other, again, states)
    _, third = pair()
    third.load_state_dict(held)
    fourth = KINDS["adamw"](third.parameters())
    fourth.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for net, each in ((model, optimizer), (other, again), (third, fourth)):
        train(net, each, rank, 1, first=1)
    assert_alike(model, other, rtol=0, atol=0)
    assert_alike(model, third, rtol=0, atol=0)


def saves_and_loads(rank, world, path):
    _, model = pair()
    optimizer = KINDS["adamw"](model.parameters())
    train(model, optimizer, rank, 1)
    cs.checkpoint.save(path / "own", {"model": model, "optimizer": optimizer}, step=1)
    cs.checkpoint.export_dcp(path / "dcp", {"model": model, "optimizer": optimizer})
    for choose, load, where in (
        (None, cs.checkpoint.load, "own"),
        (ragged, cs.checkpoint.load, "own"),
        (lambda p: cs.Ragged(3), cs.checkpoint.import_dcp, "dcp"),
    ):
        _, other = pair(choose=choose)
        again = KINDS["adamw"](other.parameters())
        load(path / where, {"model": other, "optimizer": again})
        twin, same = copy.deepcopy((model, optimizer))
        for net, each in ((twin, same), (other, again)):
            train(net, each, rank, 1, first=1)
        assert_alike(twin, other, rtol=0, atol=0)


@distributed(world=2)
def test_checkpoints_are_loaded_into_other_placements(rank, world, tmp_path):
    saves_and_loads(rank, world, tmp_path)


@distributed(world=2)
def test_dcp_checkpoints_support_ragged_shards(rank, world, tmp_path):
    import torch.distributed.checkpoint as dcp

    _, model = pair()
    dcp.save(model.state_dict(), checkpoint_id=tmp_path)
    _, other = pair(choose=lambda p: cs.Ragged(7))
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    state = other.state_dict()
    dcp.load(state, checkpoint_id=tmp_path)
    assert_alike(model, other, rtol=0, atol=0)


@distributed(world=2)
def test_owned_optimizers_support_ragged_matrices(rank, world):
    plain, model = pair()
    kinds = [torch.optim.SGD, torch.optim.SGD]
    owned = cs.optim.owned(kinds[0], [(n, p) for n, p in model.named_parameters() if p.ndim == 2], lr=0.1, momentum=0.9)
    alone = kinds[1]([p for p in plain.parameters() if p.ndim == 2], lr=0.1, momentum=0.9)
    train(model, owned, rank, 2)
    train_alone(plain, alone, world, 2)
    assert_alike(model, plain, rtol=1e-4, atol=1e-5)
    assert owned.state_dict()["state"][0]["momentum_buffer"].full_tensor().shape == model.embed.weight.shape


@pytest.mark.parametrize("whole_model", [True, more(False)])
@distributed(world=2)
def test_compiled_steps_match_eager_steps(rank, world, whole_model):
    if not DISPATCHES:
        _, model = pair()
        with pytest.raises(Exception, match=r"parameter embed\.weight is placed by Ragged, .*from torch 2\.13 on"):
            torch.compile(model, backend="aot_eager", fullgraph=True)(torch.zeros(1, 4, dtype=torch.long))
        return
    _, model = pair()
    _, eager = pair()
    if whole_model:
        run = torch.compile(model, backend="aot_eager", fullgraph=True)
    else:
        run = model
        for block in model.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
    for net, call in ((eager, eager), (model, run)):
        optimizer = KINDS["foreach"](net.parameters())
        for step in range(3):
            next_token_loss(call, *token_batch(rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_alike(model, eager, rtol=1e-4, atol=1e-5)
    assert isinstance(model.head.weight, nn.Parameter)
    assert model.head.weight.placements == (cs.Ragged(5),)


@simulated(world=2)
def test_copies_and_pickles_keep_the_placement(rank, world):
    _, model = pair()
    twin = copy.deepcopy(model)
    assert_alike(model, twin, rtol=0, atol=0)
    placed = pickle.loads(pickle.dumps(twin.head.weight.placements[0]))
    assert placed == cs.Ragged(5) != cs.Ragged(6)
    assert hash(placed) == hash(cs.Ragged(5))
    assert placed != Shard(0)
    assert isinstance(copy.deepcopy(model.head.weight.detach()).to(torch.float64), DTensor)


def product(weight):
    return weight @ weight.full_tensor().T


def other_mesh(weight):
    return weight.redistribute(placements=[Shard(1)])


def mixed(weight):
    return weight + distribute_tensor(torch.ones(weight.shape), weight.device_mesh, [Shard(0)])


@pytest.mark.parametrize(("use", "what"), [
    (product, "aten::mm"),
    (other_mesh, "redistribute to"),
    (mixed, "aten::add together with a DTensor"),
    (lambda weight: weight.sum(0), "aten::sum"),
    (lambda weight: weight.mean(), "aten::mean"),
    (lambda weight: nn.init.normal_(weight), "aten::normal_"),
    (lambda weight: weight[:2], "aten::slice"),
    (lambda weight: weight.to_local(grad_placements=[Shard(0)]), "to_local"),
])  # fmt: skip
@simulated(world=2)
def test_unsupported_operations_are_errors_with_the_parameters_name(rank, world, use, what):
    _, model = pair()
    with torch.no_grad(), pytest.raises(ShardConfigValueError, match=rf"parameter head\.weight: .*{what}.*Ragged\(5\)"):
        use(model.head.weight)


@simulated(world=2)
def test_supported_operations_match_other_dtensors(rank, world):
    _, model = pair()
    _, other = pair(choose=None)
    one, two = model.head.weight.detach(), other.head.weight.detach()
    for use in (torch.linalg.vector_norm, torch.sum, lambda w: (w.clone() * 2 + 1).to(torch.float64), torch.zeros_like):
        torch.testing.assert_close(whole(use(one)), whole(use(two)))
    assert one.redistribute(placements=[Replicate()]).to_local().equal(two.full_tensor())


def test_invalid_numbers_of_rows_are_errors():
    with pytest.raises(ShardConfigTypeError, match=r"rows: expected an int, got 2\.0"):
        cs.Ragged(2.0)
    with pytest.raises(ShardConfigValueError, match="rows: expected at least 1, got 0"):
        cs.Ragged(0)


@simulated(world=4)
def test_ragged_tensor_parallel_parameters_are_errors(rank, world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layer = nn.Linear(8, 8, bias=False)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh["tp"], [Shard(0)]))
    with pytest.raises(ShardConfigValueError, match=r"returned Ragged\(2\) for parameter weight, which is already a"):
        cs.fully_shard(layer, mesh=mesh["dp"], shard_placement_fn=lambda p: cs.Ragged(2))
