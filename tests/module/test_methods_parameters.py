"""The methods of a sharded module for parameters, communication and state, each compared with torch's FSDP2."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
import torch.nn as nn
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor

from _engines import fully_shard, mesh_of
from _models import shard_blocks, vectors
from _pool import distributed
from _sides import backward, both, call, run_both
from _stepping import counted_gathers, engine_of, kinds, loss_of, resident, train_step, twins
from composable_shard import last_record
from composable_shard._torch.distributed import all_gather_options, reduce_scatter_options

# ---- parameters


@distributed(world=2)
def test_kept_storage_has_a_stable_address_and_can_be_freed(rank, world):
    model, _ = twins(reshard_after_forward=True)
    twin, _ = twins(reshard_after_forward=True)
    model.set_keep_unsharded_storage(True)
    seen = {}
    for block in model.blocks:
        block.up.register_forward_pre_hook(lambda m, _: seen.setdefault(m, []).append(m.weight.data_ptr()))
    for step in range(3):
        for each in (model, twin):
            backward(each, rank, step)
    assert [len(set(addresses)) for addresses in seen.values()] == [1, 1, 1]
    assert len({addresses[0] for addresses in seen.values()}) == 3, "shared by no other block"
    for (name, mine), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad.to_local(), other.grad.to_local()), name
    pool = engine_of(model).pool
    assert pool.live_bytes > 0
    model.set_keep_unsharded_storage(False)
    backward(model, rank, 0)
    assert pool.live_bytes == 0
    model.set_keep_unsharded_storage(True)
    backward(model, rank, 0)
    model.double()
    model(vectors(rank, 0)[0].double()).sum().backward()
    kept = sum(bucket._reserved.nbytes for group in engine_of(model).groups for bucket in group.buckets)
    assert pool.live_bytes == kept, "the conversion has freed the old storage"


@distributed(world=2)
def test_an_embedding_can_stay_sharded_in_backward(rank, world):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(10, 4)
            self.head = nn.Linear(4, 3)

        def forward(self, ids):
            return self.head(self.embed(ids))

    def shard(model, engine):
        engine(model.embed, reshard_after_forward=True)
        engine(model.head)
        engine(model)
        model.embed.set_unshard_in_backward(False)

    models = both(Words, shard)
    ids = torch.arange(6) + rank

    run_both(models, lambda model, step: model(ids + step).square().sum().backward())
    assert kinds(last_record(models["ours"]), "UNSHARD").count("embed") == 1


@distributed(world=2)
def test_a_weight_that_backward_reads_is_gathered_in_any_case(rank, world):
    model, plain = twins(reshard_after_forward=True)
    for block in model.blocks:
        block.set_unshard_in_backward(False)
    train_step(model)
    train_step(plain)
    for name, p in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), p.grad)


@distributed(world=2)
def test_prefetch_lists_are_gathered_instead_of_the_next_module(rank, world):
    models = both()
    for model in models.values():
        blocks = list(model.blocks)
        model.set_modules_to_forward_prefetch(blocks)
        blocks[0].set_modules_to_forward_prefetch([blocks[1], blocks[2]])
        blocks[2].set_modules_to_backward_prefetch([blocks[1], blocks[0]])
        blocks[1].set_modules_to_backward_prefetch([])
    run_both(models, lambda model, step: backward(model, rank, step))
    done = [str(action) for action in last_record(models["ours"]).actions]
    first = done.index("WAIT blocks.0")
    assert {"UNSHARD blocks.1", "UNSHARD blocks.2"} <= set(done[:first])
    back = done.index("WAIT blocks.2", done.index("RESHARD blocks.2"))
    assert done[back + 1 : back + 3] == ["UNSHARD blocks.1", "UNSHARD blocks.0"]


@distributed(world=1)
def test_prefetch_lists_accept_only_sharded_modules(rank, world):
    model = fully_shard(nn.Linear(2, 2))
    for name in ("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"):
        with pytest.raises(ValueError, match="Linear is not sharded"):
            getattr(model, name)([nn.Linear(2, 2)])


@distributed(world=2)
def test_a_post_optimizer_event_is_used_once(rank, world):
    model, _ = twins()
    event = object()  # never waited for on a CPU
    model.set_post_optim_event(event)
    train_step(model)
    engine = engine_of(model)
    assert engine.changed_at is None
    model.set_post_optim_event(event)
    assert engine.changed_at is event
    train_step(model)
    assert engine.changed_at is None
    model._set_unshard_async_op(True)
    train_step(model)


# ---- communication


class LoggedGather(AllGather):
    def __init__(self):
        self.sizes, self.calls = [], 0

    def allocate(self, size, *, dtype, device):
        self.sizes.append(tuple(size))
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.calls += 1
        work = group._allgather_base(output_tensor, input_tensor, all_gather_options())
        if async_op:
            return work
        return work.wait()


class LoggedScatter(ReduceScatter):
    def __init__(self):
        self.ops = []

    def allocate(self, size, *, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.ops.append(op)
        group._reduce_scatter_base(output_tensor, input_tensor, reduce_scatter_options(op)).wait()


@pytest.mark.parametrize("early", [True, False])
@distributed(world=2)
def test_custom_communication_is_used_for_the_module_it_is_set_on(rank, world, early):
    models = both(reshard_after_forward=True)
    comms = {name: (LoggedGather(), LoggedScatter()) for name in models}
    if not early:
        for model in models.values():
            backward(model, rank, 0)
            model.zero_grad()
    for name, model in models.items():
        model.blocks[1].set_custom_all_gather(comms[name][0])
        model.blocks[1].set_custom_reduce_scatter(comms[name][1])
    run_both(models, lambda model, step: backward(model, rank, step))
    for gather, scatter in comms.values():
        assert gather.calls == 4
        assert len(scatter.ops) == 2
    models["ours"].blocks[1].set_custom_all_gather(None)
    backward(models["ours"], rank, 0)
    assert comms["ours"][0].calls == 4


@distributed(world=2)
def test_the_all_reduce_hook_can_change_the_mean(rank, world):
    def shard(model, engine, **options):
        shard_blocks(model, engine, **options)
        model.blocks[0].set_all_reduce_hook(lambda reduced: reduced.mul_(3))

    models = both(shard=shard)
    run_both(models, lambda model, step: backward(model, rank, step))
    twin, _ = twins()
    hooked, _ = twins()
    shapes = []
    hooked.blocks[0].set_all_reduce_hook(lambda reduced: shapes.append(tuple(reduced.shape)) or reduced.mul_(3))
    for each in (twin, hooked):
        backward(each, rank, 0)
    for name, p in twin.named_parameters():
        factor = 3 if name.startswith("blocks.0.") else 1
        assert torch.equal(hooked.get_parameter(name).grad.to_local(), p.grad.to_local() * factor), name
    assert [len(shape) for shape in shapes] == [1]


@distributed(world=2)
def test_a_stream_for_the_hook_is_refused_on_a_mesh_with_replicas(rank, world):
    model = fully_shard(nn.Linear(2, 2), mesh=mesh_of(2, 1))
    with pytest.raises(ValueError, match="stream cannot be set when using native HSDP"):
        model.set_all_reduce_hook(lambda reduced: None, stream=object())


@distributed(world=2)
def test_reductions_can_use_a_separate_process_group(rank, world):
    models = both()
    before = set(dist.distributed_c10d._world.pg_map)
    engines = sum(call(model, "set_separate_reduce_scatter_group") for model in models.values())
    made = set(dist.distributed_c10d._world.pg_map) - before
    assert len(made) == engines, "one for each engine"
    run_both(models, lambda model, step: backward(model, rank, step))
    models["ours"].set_separate_reduce_scatter_group(False)
    backward(models["ours"], rank, 0)
    for group in made:
        dist.destroy_process_group(group)


@distributed(world=2)
def test_process_group_allocation_falls_back_to_ordinary_buffers(rank, world):
    models = both()
    for model in models.values():
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.set_allocate_memory_from_process_group_for_comm(True)
    run_both(models, lambda model, step: backward(model, rank, step))
    with pytest.raises(RuntimeError, match="set only one"):
        models["ours"].set_symm_mem_for_comm()


# ---- state


@distributed(world=2)
def test_reset_discards_accumulated_gradients_and_must_be_called_on_the_root(rank, world):
    model, _ = twins()
    model.reset_iter_state()  # before the first forward there is nothing to discard
    twin, _ = twins()
    model.set_requires_gradient_sync(False)
    backward(model, rank, 0)
    model.set_requires_gradient_sync(True)
    with pytest.raises(RuntimeError, match="on the root"):
        model.blocks[0].reset_iter_state()
    model.reset_iter_state()
    assert resident(model) == []
    model.zero_grad()
    for each in (model, twin):
        backward(each, rank, 1)
    for (name, mine), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad.to_local(), other.grad.to_local()), name


@distributed(world=2)
def test_the_state_supports_torchs_pipelining(rank, world):
    model, _ = twins()
    twin, _ = twins()
    model.set_is_last_backward(False)
    model.set_reshard_after_backward(False)
    model.set_requires_gradient_sync(False)
    for micro in range(2):
        backward(model, rank, micro)
    model.set_is_last_backward(True)
    model.set_reshard_after_backward(True)
    model.set_requires_gradient_sync(True)
    state = fully_shard.state(model)
    assert len(state._state_ctx.all_states) == 4
    for each in state._state_ctx.all_states:
        for group in each._fsdp_param_groups:
            group.post_backward()
    state._root_post_backward_final_callback()
    twin.set_requires_gradient_sync(False)
    backward(twin, rank, 0)
    twin.set_requires_gradient_sync(True)
    backward(twin, rank, 1)
    for (name, mine), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad.to_local(), other.grad.to_local()), name
    assert resident(model) == []
    assert model._get_fsdp_state()._fsdp_param_group is not None
    assert fully_shard.state(nn.Linear(2, 2)) is None


@distributed(world=2)
def test_settings_cause_no_gather(rank, world):
    model, _ = twins()
    train_step(model)
    with counted_gathers() as plain:
        train_step(model)
    model.set_requires_all_reduce(True)
    model.set_force_sum_reduction_for_comms(False)
    model.set_is_last_backward(True)
    with counted_gathers() as found:
        loss_of(model).backward()
    assert found == plain
    assert all(isinstance(p, DTensor) for p in model.parameters())
