"""Optimizers of full matrices on sharded parameters give the results of one process."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import composable_shard as cs
from _blocks import Transformer, next_token_loss, token_batch
from _pool import distributed, more, simulated
from composable_shard._torch.distributed import local_part
from optim._single import (
    Net,
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

MUON = torch.optim.Muon


def muon_pair(rank, shard=sharded, net=Net, dtype=torch.float32, options=None, **how):
    """A sharded net with an `owned` optimizer, and a plain net with an optimizer of one process."""
    plain, model = pair(shard, net, dtype=dtype)
    options = {"lr": 0.02, **(options or {})}
    optimizer = cs.optim.owned(MUON, matrices(model), bucket_bytes=2000, **options, **how)
    rows = {"fused.weight": 8} if "blocks" in how else {}
    return model, optimizer, plain, Single(MUON, matrices(plain), rows, **options)


@pytest.mark.parametrize("state", ["owner", more("shards")])
@distributed(world=(2, more(4)))
def test_twenty_steps_of_two_optimizers_are_bitwise_identical_to_one_process(rank, world, state):
    plain, model = pair(sharded, lambda: Transformer(layers=2))
    sides = []
    for net, muon in ((model, lambda *a, **o: cs.optim.owned(MUON, *a, state=state, bucket_bytes=2000, **o)),
                      (plain, MUON)):  # fmt: skip
        inner = [(n, p) for n, p in matrices(net) if "embed" not in n and "head" not in n]
        names = {n for n, _ in inner}
        others = [p for n, p in net.named_parameters() if n not in names]
        pairs = [muon(inner, lr=0.02), torch.optim.AdamW(others, lr=0.01)]
        schedules = [torch.optim.lr_scheduler.OneCycleLR(o, 0.05, 20, cycle_momentum=False) for o in pairs]
        sides.append([*pairs, *schedules])
    for step in range(20):
        backward(model, rank, step)
        for other in range(world):
            (next_token_loss(plain, *token_batch(other, step)) / world).backward()
        for side in sides:
            for each in side:
                each.step()
        model.zero_grad()
        plain.zero_grad()
    assert_equal(model, plain)
    ours, single = (side[0] for side in sides)
    assert ours.param_groups[0]["lr"] == single.param_groups[0]["lr"]
    for index, held in single.state_dict()["state"].items():
        assert torch.equal(ours.state_dict()["state"][index]["momentum_buffer"].full_tensor(), held["momentum_buffer"])


@pytest.mark.parametrize("state", ["owner", "shards"])
@pytest.mark.parametrize(
    "kind", [Shampoo, more(torch.optim.AdamW), more(torch.optim.Adagrad)], ids=lambda kind: kind.__name__
)
@simulated(world=4)
def test_stacks_and_blocks_of_rows_are_stepped_as_separate_matrices(rank, world, kind, state):
    plain, model = pair(sharded)
    blocks = {"*.fused.weight": cs.optim.Blocks(8)}
    optimizer = cs.optim.owned(kind, matrices(model), lr=0.02, bucket_bytes=2000, blocks=blocks, state=state)
    check_steps(model, optimizer, Single(kind, matrices(plain), {"fused.weight": 8}, lr=0.02), plain, rank)


@pytest.mark.parametrize("state", ["owner", "shards"])
@distributed(world=2)
def test_muon_steps_stacks_and_blocks(rank, world, state):
    model, optimizer, plain, single = muon_pair(rank, blocks={"*.fused.weight": cs.optim.Blocks(8)}, state=state)
    check_steps(model, optimizer, single, plain, rank)


@simulated(world=5)
def test_uneven_and_empty_shards_are_assembled(rank, world):
    model, optimizer, plain, single = muon_pair(rank)
    assert any(p.to_local().numel() == 0 for _, p in matrices(model)) == (rank >= 3)  # three experts
    check_steps(model, optimizer, single, plain, rank)


@pytest.mark.parametrize("state", ["owner", more("shards")])
@distributed(world=4)
def test_each_replica_steps_separately(rank, world, state):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, optimizer, plain, single = muon_pair(rank, lambda model: sharded(model, mesh=mesh), state=state)
    check_steps(model, optimizer, single, plain, rank)
    cs.check_replicas(model, optimizer)


@pytest.mark.parametrize("state", ["owner", "shards"])
@distributed(world=4)
def test_each_matrix_is_stepped_once_if_the_outer_axis_shards_as_well(rank, world, state):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    shard = functools.partial(sharded, mesh=mesh, outer_sharding="optimizer")
    model, optimizer, plain, single = muon_pair(rank, shard, state=state)
    check_steps(model, optimizer, single, plain, rank)
    held = sum(
        local_part(value).numel()
        for kept in optimizer.state.values()
        for value in kept.values()
        if isinstance(value, torch.Tensor)
    )
    counts = [None] * world
    dist.all_gather_object(counts, held)
    assert sum(counts) <= 1.1 * sum(param.numel() for _, param in matrices(plain))


@pytest.mark.matrix
@simulated(world=6)
def test_uneven_and_empty_shards_over_both_axes_are_assembled(rank, world):
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("outer", "inner"))
    model, optimizer, plain, single = muon_pair(rank, functools.partial(sharded, mesh=mesh, outer_sharding="optimizer"))
    check_steps(model, optimizer, single, plain, rank)


@pytest.mark.matrix
@simulated(world=4)
def test_shards_along_another_dim_are_assembled(rank, world):
    def last(param):
        return Shard(param.ndim - 1) if param.ndim > 1 and param.shape[-1] % world == 0 else None

    model, optimizer, plain, single = muon_pair(rank, lambda model: sharded(model, shard_placement_fn=last))
    check_steps(model, optimizer, single, plain, rank)


def tensor_parallel(model, mesh):
    plan = {f"feed_forward.{name}": ColwiseParallel() for name in ("gate", "up")}
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {**plan, "feed_forward.down": RowwiseParallel()})
    sharded(model, mesh=mesh["dp"])


@pytest.mark.parametrize("state", ["owner", more("shards")])
@distributed(world=4)
def test_with_tensor_parallelism_matrices_are_assembled_over_both_axes(rank, world, state):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, optimizer, plain, single = muon_pair(
        mesh.get_local_rank("dp"), lambda model: tensor_parallel(model, mesh), state=state
    )
    check_steps(model, optimizer, single, plain, mesh.get_local_rank("dp"))
    held = [whole(kept["momentum_buffer"]) for kept in optimizer.state_dict()["state"].values()]
    expected = iter(single.inner.state.values())
    for param, buffer in zip((p for _, p in single.params), held, strict=True):
        parts = [next(expected)["momentum_buffer"] for each, _ in single.parts if each is param]
        assert torch.equal(buffer, torch.stack(parts) if param.ndim == 3 else parts[0])


@pytest.mark.matrix
@simulated(world=2)
def test_meshes_may_have_one_rank_each(rank, world):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model, optimizer, plain, single = muon_pair(rank, lambda model: sharded(model, mesh=mesh))
    check_steps(model, optimizer, single, plain, rank)
    assert optimizer.sent_bytes == 0


@pytest.mark.matrix
@pytest.mark.parametrize("options", [
    {"weight_decay": 0.3, "nesterov": False},
    {"lr": torch.tensor(0.03)},
    {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3},
], ids=["weight_decay", "tensor", "adjusted"])  # fmt: skip
@simulated(world=2)
def test_options_are_passed_to_the_optimizer(rank, world, options):
    model, optimizer, plain, single = muon_pair(rank, options=options)
    check_steps(model, optimizer, single, plain, rank, steps=2)


@simulated(world=2)
def test_options_of_param_groups_apply_to_their_parameters(rank, world):
    plain, model = pair(sharded)
    sides = []
    for net, kind in ((model, lambda *a, **o: cs.optim.owned(torch.optim.SGD, *a, **o)), (plain, torch.optim.SGD)):
        params = [p for _, p in matrices(net)]
        groups = [{"params": params[:5], "lr": 0.3}, {"params": params[5:], "maximize": True}]
        sides.append(kind(groups, lr=0.1, momentum=0.9))
    for step in range(2):
        backward(model, rank, step)
        for name, param in plain.named_parameters():
            param.grad = gradients_of(model)[name]
        for optimizer in sides:
            optimizer.step()
            optimizer.param_groups[0]["lr"] /= 2
        assert_equal(model, plain)


@simulated(world=2)
def test_bfloat16_parameters_step_as_in_one_process(rank, world):
    model, optimizer, plain, single = muon_pair(rank, dtype=torch.bfloat16)
    check_steps(model, optimizer, single, plain, rank)


@pytest.mark.parametrize("state", ["owner", "shards"])
@simulated(world=2)
def test_frozen_parameters_and_those_without_a_gradient_do_not_change(rank, world, state):
    plain, model = pair(sharded)
    for net in (plain, model):
        net.blocks[0].requires_grad_(False)
    optimizer = cs.optim.owned(MUON, matrices(model), lr=0.02, state=state)
    single = Single(MUON, matrices(plain), lr=0.02)
    check_steps(model, optimizer, single, plain, rank, steps=1)
    backward(model, rank, 1)
    for net in (plain, model):
        net.blocks[0].requires_grad_(True)
    for name, param in model.named_parameters():
        if name.endswith("up.weight"):
            param.grad = None
    gradients = gradients_of(model)
    optimizer.step()
    optimizer.zero_grad()
    single.step(gradients)
    assert_equal(model, plain)
    check_steps(model, optimizer, single, plain, rank, steps=2, first=2)


@simulated(world=2)
def test_a_step_without_any_gradient_sends_nothing(rank, world):
    model, optimizer, plain, _ = muon_pair(rank)
    optimizer.step()
    assert optimizer.sent_bytes == 0
    assert not optimizer.state
    assert_equal(model, plain)


@pytest.mark.matrix
@simulated(world=2)
def test_a_closure_is_called_once_and_its_loss_returned(rank, world):
    model, optimizer, plain, single = muon_pair(rank)
    losses, gradients = [], {}

    def closure():
        optimizer.zero_grad()
        loss = next_token_loss(model, *token_batch(rank, 0))
        loss.backward()
        losses.append(loss)
        gradients.update(gradients_of(model))
        return loss

    assert optimizer.step(closure) is losses[0]
    assert len(losses) == 1
    single.step(gradients)
    assert_equal(model, plain)


@pytest.mark.matrix
@simulated(world=2)
def test_hooks_of_users_run_around_the_step(rank, world):
    model, optimizer, _, _ = muon_pair(rank)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    backward(model, rank, 0)
    optimizer.step()
    assert calls == ["before", "after"]


@simulated(world=2)
def test_a_grad_scaler_skips_only_steps_with_infinities(rank, world):
    model, optimizer, plain, single = muon_pair(rank)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    for step, spoils in ((0, True), (1, False)):
        scaler.scale(next_token_loss(model, *token_batch(rank, step))).backward()
        if spoils:
            model.head.weight.grad.to_local().fill_(float("inf"))
        scaler.unscale_(optimizer)
        gradients = gradients_of(model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if not spoils:
            single.step(gradients)
        assert_equal(model, plain)


@pytest.mark.matrix
@simulated(world=4)
def test_parameters_can_be_added_later(rank, world):
    plain, model = pair(sharded)
    pairs = matrices(model)
    optimizer = cs.optim.owned(MUON, pairs[:4], lr=0.02)
    optimizer.add_param_group({"params": [p for _, p in pairs[4:]]})
    check_steps(model, optimizer, Single(MUON, matrices(plain), lr=0.02), plain, rank)


@simulated(world=2)
def test_equal_layers_without_names_are_distinguished(rank, world):
    plain, model = pair(sharded, lambda: Transformer(layers=2))
    optimizer = cs.optim.owned(MUON, [p for _, p in matrices(model)], lr=0.02)
    check_steps(model, optimizer, Single(MUON, matrices(plain), lr=0.02), plain, rank)
    with pytest.raises(
        cs.errors.ShardConfigValueError, match=r"parameter blocks\.0\.attention_norm\.weight: Muon does not"
    ):
        cs.optim.owned(MUON, model.parameters())


@simulated(world=2)
def test_every_rank_steps_its_plain_parameters(rank, world):
    torch.manual_seed(0)
    plain, model = Net(), Net()
    model.load_state_dict(plain.state_dict())
    optimizer = cs.optim.owned(MUON, matrices(model), lr=0.02)
    check_steps(model, optimizer, Single(MUON, matrices(plain), lr=0.02), plain, 0)
    assert optimizer.sent_bytes == 0
