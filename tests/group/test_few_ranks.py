"""`reshard_after_forward=n`: between forward and backward, parameters stay sharded among a few adjacent ranks."""

from __future__ import annotations

import functools
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from _engines import ENGINES, fully_shard, mesh_of
from _models import Stack, shard_blocks, shard_lists, vectors
from _parity import Case, check_parity
from _pool import distributed, more
from _stepping import assert_at_rest, assert_same_gradients, engine_of, kinds, loss_of, train_step, twins
from composable_shard import MixedPrecisionPolicy, last_record, make_plan, testing
from composable_shard._group.phases import ParamPhase

few = functools.partial(shard_blocks, reshard_after_forward=2)
EVEN = functools.partial(Stack, dim=8, hidden=16)


MODELS = {"even": EVEN, "uneven": Stack, "odd": functools.partial(Stack, dim=5, hidden=3)}


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("even", "sgd"),
        ("uneven", "adamw"),
        ("odd", "sgd"),
        more("even", "adamw"),
        more("uneven", "sgd"),
        more("odd", "adamw"),
    ],
)
@distributed(world=4)
def test_training_is_exact(rank, world, name, optimizer):
    model = MODELS[name]
    check_parity(Case(model=model, shard=few, optimizer=optimizer), rank, world)


@distributed(world=4)
def test_module_lists_and_mixed_precision_are_exact(rank, world):
    check_parity(Case(model=Stack, shard=functools.partial(shard_lists, reshard_after_forward=2)), rank, world)
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, _ = twins(reshard_after_forward=2, mp_policy=bf16)
    other, _ = twins(reshard_after_forward=True, mp_policy=bf16)
    for each in (model, other):
        train_step(each)
    for name, param in model.named_parameters():
        assert torch.equal(param.grad.to_local(), other.get_parameter(name).grad.to_local()), name


@distributed(world=4)
def test_a_mesh_with_replicas_uses_the_ranks_of_its_shard_axis(rank, world):
    shard = functools.partial(shard_blocks, mesh=mesh_of(1, 4), reshard_after_forward=2)
    check_parity(Case(model=Stack, shard=shard, mesh=(1, 4)), rank, world)


@distributed(world=4)
def test_sharding_along_another_dim_is_exact_and_fails_with_fsdp2(rank, world):
    options = {"reshard_after_forward": 2, "shard_placement_fn": lambda p: Shard(p.ndim - 1)}
    torch.manual_seed(3)
    plain, model, theirs = EVEN(), EVEN(), EVEN()
    model.load_state_dict(plain.state_dict())
    shard_blocks(model, fully_shard, **options)
    shard_blocks(theirs, ENGINES["fsdp2"], **options)
    for each in (model, plain):
        train_step(each)
    assert_same_gradients(model, plain)
    with pytest.raises((IndexError, RuntimeError)):
        train_step(theirs)


@distributed(world=4)
def test_between_forward_and_backward_modules_have_dtensors_on_the_small_mesh(rank, world):
    model, plain = twins(EVEN, few)
    loss = loss_of(model)
    block = model.blocks[0]
    shown = block.up.weight
    assert isinstance(shown, DTensor)
    assert isinstance(shown, torch.nn.Parameter)
    assert shown.requires_grad
    assert shown.device_mesh.shape == (2, 2)
    assert shown.to_local().shape == (8, 8)
    assert torch.equal(shown.to_local(), plain.blocks[0].up.weight.chunk(2)[rank % 2])
    assert torch.equal(model.state_dict()["blocks.0.up.weight"].full_tensor(), plain.blocks[0].up.weight)
    assert model.state_dict()["blocks.0.up.weight"].to_local().shape == (4, 8)
    phases = {group.name: group.phase for group in engine_of(model).groups}
    assert phases["blocks.0"] is ParamPhase.RESIDENT
    loss.backward()
    loss_of(plain).backward()
    assert_same_gradients(model, plain)
    assert_at_rest(model)


@distributed(world=4)
def test_the_record_of_a_step_matches_the_plan(rank, world):
    model, _ = twins(Stack, few)
    train_step(model)
    train_step(model)
    plan, record = make_plan(model), last_record(model)
    assert record.actions == plan.actions()
    assert record.live_bytes == plan.live_bytes()
    assert engine_of(model).pool.peak_bytes == plan.peak_bytes, "pieces and unsharded parameters exist at the same time"
    assert kinds(record, "SHRINK") == ["blocks.0", "blocks.1", "blocks.2", ""]
    assert "after forward, among 2" in str(plan)


@distributed(world=4)
def test_no_piece_stays_after_no_grad_forwards_steps_or_changed_settings(rank, world):
    model, plain = twins(Stack, few)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    with torch.no_grad():
        assert torch.equal(model(*vectors(0, 0)), plain(*vectors(0, 0)))
    assert_at_rest(model)
    abandoned = loss_of(model)  # a forward without a backward
    train_step(model)
    train_step(plain)
    del abandoned
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    first, second = loss_of(model, 1), loss_of(model, 2)
    (first + second).backward()
    (loss_of(plain, 1) + loss_of(plain, 2)).backward()
    for name, param in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), param.grad)
    for value in (True, False):
        model.set_reshard_after_forward(value)
        model.zero_grad()
        plain.zero_grad()
        train_step(model, 3)
        assert not kinds(last_record(model), "SHRINK")
        train_step(plain, 3)
        assert_same_gradients(model, plain)


@distributed(world=2)
def test_one_rank_and_all_ranks_mean_false_and_true(rank, world):
    with pytest.warns(UserWarning, match="reshard_after_forward=1 keeps the unsharded parameters"):
        model = fully_shard(Stack(), reshard_after_forward=1)
    assert "after backward" in str(make_plan(model))
    model = fully_shard(Stack(), reshard_after_forward=2)
    assert "among" not in str(make_plan(model))


@pytest.mark.parametrize(("value", "kind"), [(3, ValueError), (0, ValueError), (-2, ValueError), ("2", TypeError)])
@distributed(world=2)
def test_a_number_of_ranks_that_does_not_divide_the_world_size_is_an_error(rank, world, value, kind):
    with pytest.raises(kind, match="reshard_after_forward"):
        fully_shard(Stack(), reshard_after_forward=value)


@distributed(world=4)
def test_ranks_may_belong_to_different_numbers_of_process_groups(rank, world):
    if rank < 2 and torch.__version__ < "2.15":  # later versions find no group of all ranks after this call
        dist.new_group([0, 1], use_local_synchronization=True)
    check_parity(Case(model=Stack, shard=functools.partial(few, mesh=init_device_mesh("cpu", (4,)))), rank, world)


def train_in(world, **options):
    model = EVEN()
    shard_blocks(model, fully_shard, mesh=world.mesh, **options)
    train_step(model)
    return weakref.ref(dist.group.WORLD)


def test_small_meshes_do_not_keep_the_world_alive():
    among_few = testing.spmd(4)(train_in, reshard_after_forward=2)
    among_all = testing.spmd(4)(train_in)  # torch 2.11 itself keeps worlds alive
    gc.collect()
    assert [world() is None for world in among_few] == [world() is None for world in among_all]


@pytest.mark.parametrize("allowed", [0, 1])
@distributed(world=4)
def test_a_gather_in_backward_that_runs_out_of_memory_leaves_the_model_usable(rank, world, allowed):
    """Fails where the gather among few ranks leases its slot, and where it leases its landing buffer."""
    model, plain = twins(reshard_after_forward=2)
    for step in range(2):
        train_step(model, step)
    engine = engine_of(model)
    loss = loss_of(model, 2)
    leased, lease = [], engine.pool.lease

    def fails(request, owner=None):
        leased.append(request.name)
        if len(leased) > allowed:
            raise torch.OutOfMemoryError("no memory")
        return lease(request, owner)

    engine.pool.lease = fails
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        loss.backward()
    engine.pool.lease = lease
    assert leased[-1].startswith("landing" if allowed else "weights")
    model.zero_grad()
    for step in range(2):
        train_step(model, step), train_step(plain, step)
    assert_same_gradients(model, plain)
    assert_at_rest(model)


class TwoDtypes(Stack):
    """A stack whose blocks scale their outputs by a float64 parameter, so that a group has two buckets."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.scale = torch.nn.Parameter(torch.full((8,), 1.5, dtype=torch.float64))
            block.register_forward_hook(lambda module, _, output: output * module.scale.mean().float())


@pytest.mark.parametrize("kept", [0, 1])
@distributed(world=4)
def test_running_out_of_memory_for_pieces_after_forward_leaves_the_model_usable(rank, world, kept):
    """Fails where the first bucket of a group keeps its piece, and where the second does after the first has."""
    model, plain = twins(TwoDtypes, reshard_after_forward=2)
    train_step(model)
    model.zero_grad()
    engine = engine_of(model)
    pieces, lease = [], engine.pool.lease

    def fails(request, owner=None):
        if request.name.startswith("pieces"):
            pieces.append(request.name)
            if len(pieces) > kept:
                raise torch.OutOfMemoryError("no memory")
        return lease(request, owner)

    engine.pool.lease = fails
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        loss_of(model, 2)
    engine.pool.lease = lease
    assert len(pieces) == kept + 1
    assert not any(group.phase is ParamPhase.RESIDENT for group in engine.groups)
    for step in range(2):
        train_step(model, step), train_step(plain, step)
    assert_same_gradients(model, plain)
    assert_at_rest(model)
