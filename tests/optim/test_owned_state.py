"""State of an `owned` optimizer, saved and loaded on different numbers of ranks and by torch's own functions."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

import composable_shard as cs
from _pool import POOL, distributed, more, simulated
from composable_shard import checkpoint
from composable_shard.errors import ShardConfigStateError, ShardConfigValueError
from optim._single import (
    Shampoo,
    Single,
    assert_equal,
    backward,
    check_steps,
    gradients_of,
    matrices,
    pair,
    sharded,
    whole,
)

JOB = "optim.test_owned_state"
BLOCKS = {"*.fused.weight": cs.optim.Blocks(8)}
KINDS = {"Muon": torch.optim.Muon, "AdamW": torch.optim.AdamW, "Shampoo": Shampoo}


def nets(kind, state="owner", seed=0):
    plain, model = pair(sharded, seed=seed)
    optimizer = cs.optim.owned(KINDS[kind], matrices(model), lr=0.02, bucket_bytes=3000, blocks=BLOCKS, state=state)
    return model, optimizer, plain, Single(KINDS[kind], matrices(plain), {"fused.weight": 8}, lr=0.02)


def save(rank, world, path, kind, state):
    """Train and save. Returns the content of one process after this."""
    model, optimizer, plain, single = nets(kind, state)
    check_steps(model, optimizer, single, plain, rank, steps=3)
    checkpoint.save(path, {"model": model, "optimizer": optimizer}, step=3)
    return plain.state_dict(), single.inner.state_dict()


def load(rank, world, path, kind, state, expected):
    """Load into a net of another seed, and check that it equals and resumes like one process."""
    model, optimizer, plain, single = nets(kind, state, seed=1)
    optimizer.param_groups[0]["lr"] = 0.5
    checkpoint.load(path, {"model": model, "optimizer": optimizer})
    assert optimizer.param_groups[0]["lr"] == 0.02
    go_on(model, optimizer, plain, single, rank, expected)


def go_on(model, optimizer, plain, single, rank, expected):
    values, state = expected
    plain.load_state_dict(values)
    single.inner.load_state_dict(copy.deepcopy(state))
    assert_equal(model, plain)
    check_steps(model, optimizer, single, plain, rank, steps=2, first=3)


@pytest.mark.parametrize(("kind", "before", "after", "states"), [
    ("Shampoo", 2, 4, ("owner", "shards")),
    more("Muon", 4, 2, ("shards", "owner")),
    more("AdamW", 2, 1, ("shards", "shards")),
    more("Shampoo", 4, 1, ("owner", "owner")),
    more("Shampoo", 1, 2, ("owner", "shards")),
    ("Muon", 2, 1, ("owner", "owner")),
])  # fmt: skip
def test_a_checkpoint_resumes_on_another_number_of_ranks(tmp_path, kind, before, after, states):
    saved = POOL.run(f"{JOB}:save", before, {"path": str(tmp_path), "kind": kind, "state": states[0]})
    expected = saved[0]
    POOL.run(f"{JOB}:load", after, {"path": str(tmp_path), "kind": kind, "state": states[1], "expected": expected})


@simulated(world=2)
def test_a_state_dict_is_that_of_one_process_sharded(rank, world):
    model, optimizer, plain, single = nets("Shampoo")
    check_steps(model, optimizer, single, plain, rank, steps=3)
    saved = optimizer.state_dict()
    names = [name for name, _ in matrices(model)]
    for index, name in enumerate(names):
        held, param = saved["state"][index], dict(model.named_parameters())[name]
        assert isinstance(held["sum"], DTensor)
        assert held["sum"].placements == param.placements
        parts = [single.inner.state[leaf] for leaf, (of, _) in zip(single.leaves, single.parts, strict=True)
                 if of is dict(single.params)[name]]  # fmt: skip
        lefts = [part["sides"][0] for part in parts]
        assert torch.equal(whole(held["sides"][0]), lefts[0] if len(parts) == 1 else torch.stack(lefts))
        assert held["step"] == 3
        assert torch.equal(held["count"], torch.tensor(3.0))
    assert saved["param_groups"][0]["lr"] == 0.02


@pytest.mark.matrix
@pytest.mark.parametrize("state", ["owner", "shards"])
@simulated(world=2)
def test_loading_a_state_dict_again_changes_nothing(rank, world, state):
    model, optimizer, plain, single = nets("Shampoo", state)
    check_steps(model, optimizer, single, plain, rank, steps=2)
    other = cs.optim.owned(Shampoo, matrices(model), lr=0.5, blocks=BLOCKS, state=state)
    other.load_state_dict(optimizer.state_dict())
    check_steps(model, other, single, plain, rank, steps=2, first=2)


@simulated(world=2)
def test_the_state_dict_of_one_process_can_be_loaded(rank, world):
    plain, model = pair(sharded)
    flat = [(name, param) for name, param in matrices(model) if param.ndim == 2]
    optimizer = cs.optim.owned(torch.optim.AdamW, flat, lr=0.02)
    single = Single(torch.optim.AdamW, [(n, p) for n, p in matrices(plain) if p.ndim == 2], lr=0.02)
    backward(model, rank, 0)
    single.step(gradients_of(model))
    optimizer.load_state_dict(single.inner.state_dict())
    with torch.no_grad():
        for (_, ours), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            ours.to_local().copy_(other.chunk(world)[rank] if other.ndim else other)
    optimizer.zero_grad()
    check_steps(model, optimizer, single, plain, rank, steps=2, first=1)


def test_state_keeps_its_dtype_with_bfloat16_parameters():
    with cs.testing.fake(1):
        _, model = pair(sharded, dtype=torch.bfloat16)
        optimizer = cs.optim.owned(Precise, matrices(model), lr=0.1)
        backward(model, 0, 0)
        optimizer.step()
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        again = optimizer.state_dict()["state"]
        assert {held["precise"].dtype for held in again.values()} == {torch.float32}
        assert torch.equal(whole(again[0]["precise"]), whole(saved["state"][0]["precise"]))


class Precise(torch.optim.SGD):
    """Has a sum of gradients in float32 as its state."""

    def step(self, closure=None):
        super().step()
        for param in self.param_groups[0]["params"]:
            self.state[param].setdefault("precise", param.grad.float() / 3)


@distributed(world=2)
def test_torchs_functions_save_and_load_it(rank, world, tmp_path):
    model, optimizer, plain, single = nets("Muon")
    check_steps(model, optimizer, single, plain, rank, steps=2)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    assert sorted(state["optimizer"]["state"]) == sorted(name for name, _ in matrices(model))
    dcp.save(state, checkpoint_id=tmp_path)
    other_model, other, _, _ = nets("Muon", seed=1)
    wanted = dict(zip(("model", "optimizer"), get_state_dict(other_model, other), strict=True))
    dcp.load(wanted, checkpoint_id=tmp_path)
    set_state_dict(other_model, other, model_state_dict=wanted["model"], optim_state_dict=wanted["optimizer"])
    check_steps(other_model, other, single, plain, rank, steps=2, first=2)


@distributed(world=2)
def test_full_states_are_gathered_and_loaded(rank, world):
    model, optimizer, plain, single = nets("Muon")
    check_steps(model, optimizer, single, plain, rank, steps=2)
    full = cs.checkpoint.full_optimizer_state_dict(model, optimizer, rank0_only=False)
    torchs = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    assert full["state"].keys() == {name for name, _ in matrices(model)}
    for name, held in full["state"].items():
        assert held["momentum_buffer"].shape == dict(plain.named_parameters())[name].shape
        if rank == 0:
            assert torch.equal(held["momentum_buffer"], torchs["state"][name]["momentum_buffer"])
    plain_values, single_state = plain.state_dict(), single.inner.state_dict()
    for loads in (
        lambda m, o: cs.checkpoint.load_full_optimizer_state_dict(
            m, o, full if rank == 0 else None, broadcast_from_rank0=True
        ),
        lambda m, o: set_optimizer_state_dict(m, o, full, options=StateDictOptions(full_state_dict=True)),
    ):
        other, again, plain, single = nets("Muon", seed=1)
        cs.checkpoint.load_full_state_dict(other, plain_values)
        loads(other, again)
        go_on(other, again, plain, single, rank, (plain_values, single_state))


@pytest.mark.matrix
@distributed(world=4)
def test_states_of_replicas_are_compared_and_broadcast(rank, world):
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    _, model = pair(lambda model: sharded(model, mesh=mesh))
    optimizer = cs.optim.owned(torch.optim.Muon, matrices(model), lr=0.02)
    backward(model, rank, 0)
    optimizer.step()
    cs.check_replicas(model, optimizer)
    if mesh.get_local_rank("replicate") == 1:
        for held in optimizer.state.values():
            for tensor in held.values():
                tensor.add_(1)
    with pytest.raises(cs.errors.RankMismatchError, match="momentum_buffer of the optimizer for"):
        cs.check_replicas(model, optimizer)
    cs.broadcast_state(model, optimizer)
    cs.check_replicas(model, optimizer)


@simulated(world=2)
def test_mismatched_state_is_named(rank, world):
    model, optimizer, plain, single = nets("Shampoo")
    check_steps(model, optimizer, single, plain, rank, steps=1)
    saved = optimizer.state_dict()
    other = cs.optim.owned(Shampoo, matrices(model), lr=0.02, blocks={"*.fused.weight": cs.optim.Blocks(4)})
    with pytest.raises(ShardConfigValueError, match=r"fused\.weight.*load it with the `blocks` with which it was"):
        other.load_state_dict(saved)


@simulated(world=2)
def test_matrices_of_one_parameter_with_different_counts_have_no_state_dict(rank, world):
    model, optimizer, plain, single = nets("Shampoo")
    check_steps(model, optimizer, single, plain, rank, steps=1)
    for name, value in optimizer.state[model.blocks[0].fused.weight].items():
        if name == "0.count":
            value.add_(1)
    with pytest.raises(ShardConfigStateError, match=r"fused\.weight\[0\]: its matrices have different states"):
        optimizer.state_dict()
