"""Full state dicts are gathered, streamed and loaded at any time, in bounded memory, for all shardings."""

from __future__ import annotations

import contextlib
import copy
import io

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.profiler import ProfilerActivity, profile

import composable_shard as cs
from _engines import ENGINES, mesh_of, named_mesh
from _models import Stack, shard_blocks, vectors
from _pool import distributed
from checkpoint._nets import Net, assert_equal, assert_same, batch, build, shard, step
from composable_shard import MixedPrecisionPolicy, testing
from composable_shard.checkpoint._full import tensors, transfer
from composable_shard.errors import CheckpointMismatchError

SIZES = [None, 256]  # bytes to move at a time: a whole small model, or few tensors


@contextlib.contextmanager
def moving(nbytes):
    """Set the number of bytes that are communicated together."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors, "CPU_LIMIT", nbytes or transfer.CPU_LIMIT)
        yield


# ---- gathering


def test_an_unsharded_model_in_a_group_without_a_cpu_backend():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("cuda:fake", store=FakeStore(), rank=0, world_size=2)  # as with NCCL only
    try:
        model = build()
        assert_equal(cs.checkpoint.full_state_dict(model), model.state_dict())
        assert [name for name, _ in cs.checkpoint.iter_full_state(model)]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("engine", ["ours", "fsdp2"])
@pytest.mark.parametrize("limit", SIZES)
@distributed(world=2)
def test_rank_0_gets_the_unsharded_state_and_others_get_nothing(rank, world, engine, limit):
    expected = build().state_dict()
    model = shard(build(), engine)
    with moving(limit):
        everywhere = cs.checkpoint.full_state_dict(model, rank0_only=False)
        state = cs.checkpoint.full_state_dict(model)
    assert_equal(everywhere, expected)
    if rank:
        assert state == {}
        return
    assert_equal(state, expected)
    assert state["head.weight"] is state["embed.weight"], "tied weights are one tensor"
    file = io.BytesIO()
    torch.save(state, file)
    assert (
        file.tell() < sum(v.nbytes for v in {id(v): v for v in state.values() if torch.is_tensor(v)}.values()) + 16384
    )
    own = {p.data_ptr() for p in [*model.parameters(), *model.buffers()] if not isinstance(p, DTensor)}
    assert not own & {v.data_ptr() for v in state.values() if torch.is_tensor(v)}, "tensors have their own memory"


@pytest.mark.parametrize("how", ["unshard", "forward", "backward"])
@distributed(world=2)
def test_gathering_while_parameters_are_unsharded_does_not_change_training(rank, world, how):
    models = [shard(build(), reshard_after_forward=False) for _ in range(2)]
    states = []
    for model, taken in zip(models, [True, False], strict=True):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        step(model, optimizer, rank)
        if how == "unshard":
            for module in [model, *model.blocks]:
                module.unshard()
        loss = None if how == "unshard" else model(batch(rank, 1)).square().mean()
        if how == "backward":
            loss.backward()
            loss = None
        before = {n: p.full_tensor() for n, p in model.state_dict().items() if isinstance(p, DTensor)}
        if taken:
            state = cs.checkpoint.full_state_dict(model, rank0_only=False)
            assert dict(cs.checkpoint.iter_full_state(model)).keys() == state.keys() - {"head.weight", "_extra_state"}
            for name, value in before.items():
                assert_same(state[name], value, name)
        if loss is not None:
            loss.backward()
        model.apart.grad = None
        optimizer.step()
        optimizer.zero_grad()
        step(model, optimizer, rank, 2)
        states.append(cs.checkpoint.full_state_dict(model, rank0_only=False))
    assert_equal(*states)


@distributed(world=2)
def test_dtype_casts_only_floating_point_tensors_and_defaults_to_the_stored_one(rank, world):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = shard(build(), mp_policy=policy)
    model(batch(rank, 0))
    expected = build().state_dict()
    assert_equal(cs.checkpoint.full_state_dict(model, rank0_only=False), expected)
    for dtype in (torch.bfloat16, torch.float64):
        cast = {n: v.to(dtype) if torch.is_tensor(v) and v.is_floating_point() else v for n, v in expected.items()}
        assert_equal(cs.checkpoint.full_state_dict(model, rank0_only=False, dtype=dtype, cpu_offload=False), cast)
    assert expected["count"].dtype == torch.int64


@pytest.mark.matrix
@distributed(world=4)
def test_it_works_over_replicas_and_with_tensor_parallelism(rank, world):
    torch.manual_seed(0)
    plain = Stack(dim=6, hidden=8)
    replicas, parallel = copy.deepcopy(plain), copy.deepcopy(plain)
    shard_blocks(replicas, cs.fully_shard, mesh=mesh_of(2, 2))
    mesh = named_mesh((2, 2), ("dp", "tp"))
    for block in parallel.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    theirs = copy.deepcopy(parallel)
    shard_blocks(parallel, cs.fully_shard, mesh=mesh["dp"])
    shard_blocks(theirs, ENGINES["fsdp2"], mesh=mesh["dp"])
    expected = plain.state_dict()
    changed = {name: value + 1 for name, value in expected.items()}
    for model in (replicas, parallel, theirs):
        assert_equal(cs.checkpoint.full_state_dict(model, rank0_only=False), expected)
        state = cs.checkpoint.full_state_dict(model)
        assert_equal(state, {} if rank else expected)
        result = cs.checkpoint.load_full_state_dict(model, changed if rank == 0 else None, broadcast_from_rank0=True)
        assert not any(result)
        assert_equal(dict(cs.checkpoint.iter_full_state(model)), changed)
        cs.checkpoint.load_full_state_dict(model, expected)
        assert_equal(cs.checkpoint.full_state_dict(model, rank0_only=False), expected)
    x = vectors(0, 0)
    torch.testing.assert_close(parallel(*x), plain(*x))


@pytest.mark.matrix
@distributed(world=4)
def test_the_first_rank_of_a_model_on_some_ranks_acts_as_rank_0(rank, world):
    halves = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "dp"))
    torch.manual_seed(halves.get_local_rank("stage"))
    plain = Stack()
    model = copy.deepcopy(plain)
    shard_blocks(model, cs.fully_shard, mesh=halves["dp"])
    state = cs.checkpoint.full_state_dict(model)
    assert_equal(state, {} if rank % 2 else plain.state_dict())
    changed = {name: value + 1 for name, value in plain.state_dict().items()}
    cs.checkpoint.load_full_state_dict(model, {} if rank % 2 else changed, broadcast_from_rank0=True)
    assert_equal(cs.checkpoint.full_state_dict(model, rank0_only=False), changed)


def test_it_works_without_a_process_group_and_in_a_simulated_world():
    plain = build()
    assert_equal(cs.checkpoint.full_state_dict(plain), plain.state_dict())
    other = build(1)
    cs.checkpoint.load_full_state_dict(other, cs.checkpoint.full_state_dict(plain), broadcast_from_rank0=True)
    assert_equal(other.state_dict(), plain.state_dict())

    def on_rank(here):
        model = build()
        for block in model.blocks:
            cs.fully_shard(block)
        cs.fully_shard(model)
        changed = {n: v + 1 if torch.is_tensor(v) else v for n, v in plain.state_dict().items()}
        cs.checkpoint.load_full_state_dict(model, changed if here.rank == 0 else {}, broadcast_from_rank0=True)
        assert_equal(cs.checkpoint.full_state_dict(model), {} if here.rank else changed)

    testing.spmd(2)(on_rank)


# ---- streaming


@pytest.mark.parametrize("limit", SIZES)
@distributed(world=2)
def test_tensors_are_streamed_in_order_on_every_rank_and_can_be_kept(rank, world, limit):
    plain = build()
    model = shard(build())
    with moving(limit):
        kept = dict(cs.checkpoint.iter_full_state(model, dtype=torch.float64))
    expected = {n: v for n, v in plain.state_dict().items() if n not in ("head.weight", "_extra_state")}
    with torch.no_grad():
        for value in [*model.parameters(), *model.buffers()]:
            value.zero_()
    assert_equal(kept, {n: v.double() if v.is_floating_point() else v for n, v in expected.items()})


# ---- loading


@pytest.mark.parametrize("engine", ["ours", "fsdp2"])
@pytest.mark.parametrize("broadcast", [False, True])
@distributed(world=2)
def test_a_full_state_dict_is_loaded_in_place(rank, world, engine, broadcast):
    source = build(1)
    source.note = "loaded"
    for limit in SIZES:
        model = shard(build(2), engine)
        params = [*model.parameters()]
        optimizer = torch.optim.AdamW(params)
        step(model, optimizer, rank)
        given = source.state_dict() if rank == 0 or not broadcast else None
        with moving(limit):
            result = cs.checkpoint.load_full_state_dict(model, given, broadcast_from_rank0=broadcast)
        assert result == ([], [])
        assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
        assert_equal(cs.checkpoint.full_state_dict(model, rank0_only=False), source.state_dict())
        torch.testing.assert_close(model(batch(0, 0)), source(batch(0, 0)))


@pytest.mark.parametrize("broadcast", [False, True])
@distributed(world=2)
def test_assign_materializes_a_model_on_meta(rank, world, broadcast):
    source = build(1)
    with torch.device("meta"):
        model = Net()
        emptied = Net()
    for made in (model, emptied):
        made.cos, made.sin = source.cos, source.sin  # they are not in state dicts
        shard(made)
    state = source.state_dict()
    given = state if rank == 0 or not broadcast else {}
    with pytest.raises(CheckpointMismatchError, match=r"scale: is on the meta device .*assign=True"):
        cs.checkpoint.load_full_state_dict(model, given, broadcast_from_rank0=broadcast)
    with pytest.raises(cs.errors.CheckpointError, match=r"full_state_dict: scale, apart, .*on the meta device"):
        cs.checkpoint.full_state_dict(model)
    cs.checkpoint.load_full_state_dict(model, given, broadcast_from_rank0=broadcast, assign=True)
    emptied.to_empty(device="cpu")
    emptied.cos, emptied.sin = source.cos, source.sin
    cs.checkpoint.load_full_state_dict(emptied, given, broadcast_from_rank0=broadcast)
    for made in (model, emptied):
        assert_equal(cs.checkpoint.full_state_dict(made, rank0_only=False), state)
        assert made.head.weight is made.embed.weight
        assert [p.requires_grad for p in made.parameters()] == [p.requires_grad for p in source.parameters()]
        assert made.apart.untyped_storage().data_ptr() != source.apart.untyped_storage().data_ptr()
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
        step(made, optimizer, rank)
        step(made, optimizer, rank, 1)
    assert_equal(*(cs.checkpoint.full_state_dict(made, rank0_only=False) for made in (model, emptied)))


@distributed(world=2)
def test_assigned_tensors_keep_their_dtypes_and_copied_ones_get_the_models(rank, world):
    half = {
        n: v.bfloat16() if torch.is_tensor(v) and v.is_floating_point() else v for n, v in build(1).state_dict().items()
    }
    model = shard(build())
    model(batch(rank, 0))
    cs.checkpoint.load_full_state_dict(model, half)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    cs.checkpoint.load_full_state_dict(model, half, assign=True)
    assert_equal(cs.checkpoint.full_state_dict(model, rank0_only=False), half)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model(batch(rank, 0)).dtype == torch.bfloat16


@pytest.mark.parametrize("how", ["unshard", "forward"])
@distributed(world=2)
def test_the_next_forward_uses_loaded_weights_even_if_unsharded_ones_were_kept(rank, world, how):
    source = build(1)
    model = shard(build(2), reshard_after_forward=False)
    loss = model(batch(rank, 0)).square().mean()
    if how == "unshard":
        loss.backward()
        for module in [model, *model.blocks]:
            module.unshard()
    cs.checkpoint.load_full_state_dict(model, source.state_dict())
    if how == "forward":
        with pytest.raises(cs.errors.StaleStateError):
            loss.backward()
    torch.testing.assert_close(model(batch(0, 0)), source(batch(0, 0)), rtol=0, atol=0)


@pytest.mark.parametrize("broadcast", [False, True])
@distributed(world=2)
def test_a_failed_check_changes_nothing_and_all_ranks_raise_the_reason(rank, world, broadcast):
    model = shard(build())
    before = cs.checkpoint.full_state_dict(model, rank0_only=False)
    state = dict(build(1).state_dict())
    wrong = dict(state)
    wrong["stranger"] = wrong.pop("blocks.1.feed_forward.up.weight")
    wrong["norm.weight"] = torch.zeros(3)
    wrong["count"] = torch.tensor(1.5)
    bad_rank = 0 if broadcast else 1
    given = wrong if rank == bad_rank else state
    said = rf"(?s)on rank {bad_rank}: nothing was changed.*count: has dtype torch\.float32, which cannot be cast"
    said += r".*norm\.weight: has shape \(3,\), but \(16,\) in the model.*missing: blocks\.1\.feed_forward\.up\.weight"
    said += r".*unexpected: stranger"
    if broadcast:  # both ranks check the same state; the message names the first
        said = said.replace(f"rank {bad_rank}", r"rank \d")
    with pytest.raises(CheckpointMismatchError, match=said):
        cs.checkpoint.load_full_state_dict(model, given, broadcast_from_rank0=broadcast)
    with pytest.raises(CheckpointMismatchError, match=r"norm\.weight"):
        cs.checkpoint.load_full_state_dict(model, given, strict=False, broadcast_from_rank0=broadcast)
    with pytest.raises(CheckpointMismatchError, match="is a DTensor"):
        cs.checkpoint.load_full_state_dict(model, dict(model.state_dict()), broadcast_from_rank0=broadcast)
    assert_equal(cs.checkpoint.full_state_dict(model, rank0_only=False), before)
    wrong["norm.weight"], wrong["count"] = state["norm.weight"], state["count"]
    result = cs.checkpoint.load_full_state_dict(model, wrong, strict=False, broadcast_from_rank0=broadcast)
    assert result == (["blocks.1.feed_forward.up.weight"], ["stranger"])
    expected = state | {"blocks.1.feed_forward.up.weight": before["blocks.1.feed_forward.up.weight"]}
    assert_equal(cs.checkpoint.full_state_dict(model, rank0_only=False), expected)


@distributed(world=2)
def test_one_name_of_a_tied_weight_is_enough(rank, world):
    model = shard(build())
    state = dict(build(1).state_dict())
    expected = dict(state)
    del state["embed.weight"]
    assert cs.checkpoint.load_full_state_dict(model, state) == ([], [])
    assert_equal(cs.checkpoint.full_state_dict(model, rank0_only=False), expected)


@distributed(world=2)
def test_models_that_differ_between_ranks_are_refused(rank, world):
    model = nn.Linear(4, 4, bias=rank == 0)
    model.weight = nn.Parameter(model.weight.detach())
    cs.fully_shard(nn.Linear(2, 2))
    with pytest.raises(CheckpointMismatchError, match=r"Ranks 0 and 1 hold different parameters: 2 and 1 of them"):
        cs.checkpoint.load_full_state_dict(model, {}, strict=False)


@distributed(world=2)
def test_hooks_may_change_names_or_values_in_wrapped_modules(rank, world):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    class Halves(nn.Linear):
        """Its weight is saved in two parts, doubled."""

        def __init__(self):
            super().__init__(4, 4)
            self._register_state_dict_hook(self.split)
            self._register_load_state_dict_pre_hook(self.join)

        @staticmethod
        def split(module, state, prefix, _):
            whole = state.pop(f"{prefix}weight")
            whole = 2 * (whole.full_tensor() if isinstance(whole, DTensor) else whole)
            state[f"{prefix}up"], state[f"{prefix}down"] = whole.chunk(2)

        def join(self, state, prefix, *_):
            if f"{prefix}up" in state:
                state[f"{prefix}weight"] = torch.cat([state.pop(f"{prefix}up"), state.pop(f"{prefix}down")]) / 2

    def make(seed):
        torch.manual_seed(seed)
        return nn.Sequential(Halves(), checkpoint_wrapper(nn.Linear(4, 4)))

    source, model = make(0), make(1)
    for module in model:
        cs.fully_shard(module)
    compiled = torch.compile(cs.fully_shard(model), backend="eager")
    state = cs.checkpoint.full_state_dict(source, rank0_only=False)
    assert list(state) == ["0.bias", "0.up", "0.down", "1.weight", "1.bias"]
    cs.checkpoint.load_full_state_dict(compiled, state)
    assert_equal(cs.checkpoint.full_state_dict(compiled, rank0_only=False), state)
    x = torch.randn(3, 4)
    torch.testing.assert_close(model(x), source(x))


@distributed(world=2)
def test_frozen_parameters_of_any_dtype_empty_parameters_and_other_dims(rank, world):
    def make(seed):
        torch.manual_seed(seed)
        model = nn.Linear(3, 4)
        frozen = {
            "whole": torch.randint(-9, 9, (5, 3)),
            "bits": torch.rand(3) > 0.5,
            "complex": torch.randn(5, 2, dtype=torch.complex64),
            "eighth": torch.randn(7).to(torch.float8_e4m3fn),
            "empty": torch.randn(0, 4),
        }
        for name, value in frozen.items():
            model.register_parameter(name, nn.Parameter(value, requires_grad=False))
        model.wide = nn.Parameter(torch.randn(3, 6))
        return model

    from torch.distributed.tensor import Shard

    source, model = make(0), make(1)
    wide = model.wide
    cs.fully_shard(model, shard_placement_fn=lambda param: Shard(1) if param is wide else None)
    expected = make(1).state_dict()
    for lead_only in (False, True):
        state = cs.checkpoint.full_state_dict(model, rank0_only=lead_only)
        if rank == 0 or not lead_only:
            assert list(state) == list(expected)
            assert all(state[n].dtype == v.dtype and bytes_of(state[n]) == bytes_of(v) for n, v in expected.items())
    for broadcast in (False, True):
        cs.checkpoint.load_full_state_dict(model, source.state_dict(), broadcast_from_rank0=broadcast)
        state = cs.checkpoint.full_state_dict(model, rank0_only=False)
        assert all(bytes_of(state[n]) == bytes_of(v) for n, v in source.state_dict().items())
        cs.checkpoint.load_full_state_dict(model, expected)


def bytes_of(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8).tolist()


# ---- memory


def allocated(call):
    """Peak bytes of torch's CPU allocator during a call, in addition to those before it, and the call's result."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as watched:
        result = call()
    events, waiting = [], [*watched.profiler.kineto_results.experimental_event_tree()]
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag.name == "Allocation":
            events.append((event.start_time_ns, event.extra_fields.alloc_size))
    now = most = 0
    for _, size in sorted(events):
        now += size
        most = max(most, now)
    return most, result


@pytest.mark.parametrize("broadcast", [False, True])
@distributed(world=2)
def test_peak_memory_is_the_largest_group_and_the_full_copy_on_rank_0_only(rank, world, broadcast):
    torch.manual_seed(0)
    model = Stack(blocks=6, dim=64, hidden=511)
    total = sum(p.nbytes for p in model.parameters())
    group = sum(p.nbytes for p in model.blocks[0].parameters())
    shard_blocks(model, cs.fully_shard)
    slack = 16384
    most, state = allocated(lambda: cs.checkpoint.full_state_dict(model))
    assert most <= group + (total if rank == 0 else 0) + slack
    assert most >= (total if rank == 0 else group // 3)  # check that the measurement works
    most, _ = allocated(lambda: [value.sum() for _, value in cs.checkpoint.iter_full_state(model)])
    assert group <= most <= 2 * group + slack
    with torch.device("meta"):
        empty = Stack(blocks=6, dim=64, hidden=511)
    shard_blocks(empty, cs.fully_shard)
    given = state if rank == 0 else None
    if not broadcast:
        given = [state]
        dist.broadcast_object_list(given, src=0)
        [given] = given
    load = lambda: cs.checkpoint.load_full_state_dict(empty, given, broadcast_from_rank0=broadcast, assign=True)  # noqa: E731
    most, _ = allocated(load)
    assert most <= total // 2 + 2 * group + slack, "its shards, and a group in transfer"
    most, _ = allocated(lambda: cs.checkpoint.load_full_state_dict(empty, given, broadcast_from_rank0=broadcast))
    assert most <= (2 * group if broadcast else 0) + slack
    assert_equal(cs.checkpoint.full_state_dict(empty), state)


@distributed(world=2)
def test_small_tensors_are_communicated_together(rank, world):
    model = cs.fully_shard(nn.Sequential(*(nn.Linear(5, 3) for _ in range(50))))
    real, calls = transfer._exchange, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "_exchange", lambda *args: calls.append(real(*args)))
        cs.checkpoint.full_state_dict(model)
    assert len(calls) < 4
