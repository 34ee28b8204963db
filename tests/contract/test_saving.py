"""State dicts of sharded tensors, without communication; saving and loading, full and sharded."""

from __future__ import annotations

import copy
import io
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from _blocks import Transformer
from contract._ways import PROCESSES, REAL, contract


def layers(dim=8):
    return nn.Sequential(nn.Linear(dim, 5), nn.BatchNorm1d(5), nn.Linear(5, dim))


def shard(t, model, mesh=None, **options):
    mesh = mesh or t.mesh()
    for layer in (model[0], model[2]):
        t.fully_shard(layer, mesh=mesh, **options)
    return t.fully_shard(model, mesh=mesh, **options)


@contract()
def test_values_are_the_sharded_parameters_and_alias_them(t):
    model = shard(t, layers())
    state = model.state_dict()
    assert list(state) == list(layers().state_dict())
    for name, param in model.named_parameters():
        assert isinstance(state[name], DTensor)
        assert not state[name].requires_grad
        assert state[name].placements == param.placements
        if param.to_local().numel():
            assert state[name].to_local().data_ptr() == param.to_local().data_ptr()
    assert not isinstance(state["1.running_mean"], DTensor)


@contract()
def test_values_are_sharded_while_parameters_are_unsharded(t):
    plain, model = t.pair(layers)
    shard(t, model, reshard_after_forward=False)
    out = model(t.randn(3, 8))
    state = model.state_dict()
    for name, _ in model.named_parameters():
        assert isinstance(state[name], DTensor)
        t.same(state[name], dict(plain.named_parameters())[name])
    out.sum().backward()
    model.unshard()
    assert all(isinstance(model.state_dict()[n], DTensor) for n, _ in plain.named_parameters())


@contract()
def test_a_state_dict_of_shards_is_loaded(t):
    plain, model = t.pair(layers)
    shard(t, model)
    state = {n: torch.full_like(v, 2) for n, v in model.state_dict().items()}
    assert not any(model.load_state_dict(state))
    x = t.randn(3, 8)
    with torch.no_grad():
        for tensor in plain.state_dict().values():
            tensor.fill_(2)
    t.same(model(x), plain(x))


@contract()
def test_a_state_dict_of_shards_is_assigned(t):
    plain, model = t.pair(layers)
    with torch.device("meta"):
        empty = layers()
    shard(t, model)
    shard(t, empty)
    assert all(p.is_meta for p in empty.parameters())
    empty.load_state_dict(model.state_dict(), assign=True, strict=True)
    x = t.randn(3, 8)
    t.same(empty.eval()(x), plain.eval()(x))


@contract(ways=REAL)
def test_a_full_state_dict_is_split_and_assigned(t):
    plain = t.build(layers)
    with torch.device("meta"):
        model = shard(t, layers())
    state = {}
    for name, tensor in plain.state_dict().items():
        target = model.state_dict()[name]
        if isinstance(target, DTensor):
            tensor = nn.Parameter(distribute_tensor(tensor, target.device_mesh, target.placements))
        state[name] = tensor
    model.load_state_dict(state, assign=True)
    t.parity(plain, model)
    t.train(plain, model, lambda step: t.randn(4, 8, step=step))


@contract(ways=REAL)
@pytest.mark.parametrize("offload", [True, False])
def test_torchs_functions_gather_and_load_a_full_state_dict(t, offload):
    plain, model = t.pair(layers)
    shard(t, model)
    options = StateDictOptions(full_state_dict=True, cpu_offload=offload)
    state = get_model_state_dict(model, options=options)
    if t.rank == 0 or not offload:
        for name, tensor in plain.state_dict().items():
            assert not isinstance(state[name], DTensor)
            t.same(state[name], tensor)
    changed = {n: v + 1 for n, v in plain.state_dict().items()}
    set_model_state_dict(model, changed, options=StateDictOptions(full_state_dict=True))
    for name, param in model.named_parameters():
        t.same(param, changed[name])


@contract(ways=PROCESSES)
def test_the_full_state_dict_of_rank_0_is_broadcast(t):
    plain = t.build(layers)
    with torch.device("meta"):
        model = shard(t, layers())
    model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, plain.state_dict() if t.rank == 0 else {}, options=options)
    t.parity(plain, model)


@contract(ways=REAL)
def test_torchs_functions_gather_and_load_optimizer_state(t):
    model = shard(t, t.build(layers))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(t.randn(3, 8)).sum().backward()
    optimizer.step()
    state = get_optimizer_state_dict(model, optimizer)
    assert set(state["state"]) == {n for n, _ in model.named_parameters()}
    assert all(isinstance(each["exp_avg"], DTensor) for each in state["state"].values())
    whole = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    for name, each in whole["state"].items():
        t.same(state["state"][name]["exp_avg"], each["exp_avg"])
    other = torch.optim.Adam(model.parameters(), lr=0.1)
    set_optimizer_state_dict(model, other, state)
    for param in model.parameters():
        t.same(other.state[param]["exp_avg"], optimizer.state[param]["exp_avg"])


@contract(ways=PROCESSES)
def test_a_distributed_checkpoint_of_model_and_optimizer(t):
    def make():
        torch.manual_seed(3)
        model = Transformer(layers=1)
        t.fully_shard(model.blocks[0], mesh=t.mesh())
        t.fully_shard(model, mesh=t.mesh())
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(model, optimizer):
        tokens = torch.arange(8).view(1, 8)
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = make()
    step(model, optimizer)
    folder = [tempfile.mkdtemp() if t.rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    parts = get_state_dict(model, optimizer)
    dcp.save({"model": parts[0], "optimizer": parts[1]}, checkpoint_id=folder[0])
    step(model, optimizer)
    expected = [p.full_tensor().detach().clone() for p in model.parameters()]
    other, its = make()
    step(other, its)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    mine = dict(zip(("model", "optimizer"), get_state_dict(other, its), strict=True))
    dcp.load(mine, checkpoint_id=folder[0])
    set_state_dict(other, its, model_state_dict=mine["model"], optim_state_dict=mine["optimizer"])
    step(other, its)
    for value, param in zip(expected, other.parameters(), strict=True):
        t.same(param, value)


@contract(ways=PROCESSES)
def test_torch_save_and_load_of_a_sharded_state_dict(t):
    model = shard(t, t.build(layers))
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=False)
    other = shard(t, layers())
    other.load_state_dict(state)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        t.same(a, b)


@contract(world=4)
def test_state_dicts_on_a_mesh_with_replicas(t):
    plain, model = t.pair(layers)
    shard(t, model, mesh=t.mesh(2, 2))
    state = {n: v.clone() for n, v in model.state_dict().items()}
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model.load_state_dict(state)
    x = t.randn(3, 8)
    t.same(model(x), plain(x))


@contract()
def test_an_earlier_state_dict_contains_the_trained_values(t):
    model = shard(t, layers())
    state = model.state_dict()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(t.randn(3, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, param in model.named_parameters():
        if param.to_local().numel():
            assert state[name].to_local().data_ptr() == param.to_local().data_ptr()
        t.same(state[name], param)


@contract()
def test_the_state_dict_of_a_submodule_and_strict_loading(t):
    model = shard(t, layers())
    assert list(model[0].state_dict()) == ["weight", "bias"]
    state = dict(model.state_dict())
    del state["0.bias"]
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(state)
    assert model.load_state_dict(state, strict=False).missing_keys == ["0.bias"]


@contract()
def test_a_state_dict_keeps_its_values_when_the_model_moves(t):
    plain, model = t.pair(layers)
    shard(t, model)
    moved = copy.copy(model.state_dict())
    model.cpu()
    for name in dict(plain.named_parameters()):
        t.same(moved[name], plain.state_dict()[name])
