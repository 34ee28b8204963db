"""Weights arrive bit for bit in the layout of the receivers."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import composable_shard as cs
from _blocks import TENSOR_PARALLEL, Transformer, next_token_loss, token_batch
from _pool import distributed, more, simulated
from composable_shard import checkpoint, weights
from composable_shard._faults import ledger
from composable_shard._plan.boxes import chunk_of, whole_box
from composable_shard.weights import Box, LocalTensor, Piece, TensorInfo, WeightLayout, _channel, _moves, _targets

F32, BF16 = torch.float32, torch.bfloat16


def made(seed, **options):
    torch.manual_seed(seed)
    return Transformer(**options)


def sharded(model, mesh, fully_shard=cs.fully_shard):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def parallel(model, mesh):
    for block in model.blocks:
        parallelize_module(block, mesh, TENSOR_PARALLEL)
    return model


def full(model):
    """All full values of a state dict, on every rank."""
    return {name: getattr(p, "full_tensor", lambda p=p: p)().clone() for name, p in model.state_dict().items()}


def train(model, rank, step):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    next_token_loss(model, *token_batch(rank, step)).backward()
    optimizer.step()
    optimizer.zero_grad()


def from_rank_0(value):
    box = [value]
    dist.broadcast_object_list(box, 0)
    return box[0]


def rows_of(values, count, index, dtype=None):
    """The layout and the tensors of one of several ranks that split all tensors by rows."""
    tensors, held = {}, {}
    for name, value in values.items():
        own, box = dtype or value.dtype, whole_box(value.shape)
        if value.ndim:
            box = box.part(0, *chunk_of(value.shape[0], count, index))
        pieces = (Piece(name, box, (0,) * value.ndim),) if box.numel else ()
        held[name] = LocalTensor(box.shape, own, pieces)
        tensors[name] = torch.full(box.shape, 3.0, dtype=own)
    return held, tensors


def bits_of(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def assert_rows(tensors, held, values):
    for name, tensor in tensors.items():
        for piece in held[name].pieces:
            part = values[name][piece.box.slices(whole_box(values[name].shape))]
            assert torch.equal(bits_of(tensor), bits_of(part.to(tensor.dtype))), name


def infos(values, dtype=None):
    return {name: TensorInfo(tuple(each.shape), dtype or each.dtype) for name, each in values.items()}


@pytest.mark.parametrize("engine", [cs.fully_shard, more(fsdp2)])
@distributed(world=4)
def test_tensor_parallel_receivers_get_the_weights_of_sharded_trainers(rank, world, engine):
    trains = rank < 2
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("job", "rank"))["rank"]
    model = sharded(made(0), mesh, engine) if trains else parallel(made(1), mesh)
    plan = weights.plan_together(**{"sends" if trains else "receives": model})
    for version in range(2):
        if trains:
            train(model, rank, version)
            assert weights.send(model, plan).version == version
        else:
            assert weights.receive(plan, model).version == version
        values = full(model)
        trained = from_rank_0(values)
        assert values.keys() == trained.keys()
        assert all(torch.equal(values[name], each) for name, each in trained.items())
        if not trains:  # and they compute with them
            with torch.no_grad():
                whole = made(2)
                whole.load_state_dict(trained)
                torch.testing.assert_close(model(*token_batch(0, 9)), whole(*token_batch(0, 9)))


@pytest.mark.parametrize("most", [64, more(1000), 1 << 20])
@distributed(world=4)
def test_replicas_send_to_receivers_with_another_dtype_in_small_messages(rank, world, most):
    """Two replicas of two trainers each are receivers, too: every rank does both."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model = sharded(made(0, tied=True), mesh)
    model.register_buffer("seen", torch.tensor(5))
    source = weights.layout(model)
    assert source.ties == {"head.weight": "embed.weight"}
    values = {name: each for name, each in full(model).items() if name != "head.weight"}
    held, tensors = rows_of({name: each for name, each in values.items() if name != "seen"}, 3, max(rank - 1, 0), BF16)
    held["seen"] = LocalTensor((), torch.int64, (Piece("seen", Box((), ()), ()),))
    tensors["seen"] = torch.zeros((), dtype=torch.int64)
    target = WeightLayout(infos(values), {}, {rank: held} if rank else {})
    if rank == 0:
        plan = weights.plan_together(sends=source)
        update = weights.send(model, plan, max_bytes_in_flight=most)
    else:
        plan = weights.plan_together(sends=source, receives=target)
        update = weights.send(model, plan, into=tensors, max_bytes_in_flight=most)
        assert_rows(tensors, held, values)
        assert tensors["seen"] == 5
    sums = torch.tensor([update.sent + update.received])
    dist.all_reduce(sums)
    assert sums == 2 * plan.total_bytes  # of the sender and of the receiver
    assert all(source != target for source, target in plan.links)


@distributed(world=3)
def test_versions_switch_as_a_whole_and_unchanged_parts_are_not_sent(rank, world):
    trains = rank < 2
    mesh = DeviceMesh("cpu", [0, 1])
    model = sharded(made(0), mesh) if trains else made(1)
    values = from_rank_0(full(model) if trains else None)
    own = weights.layout(model) if trains else weights.layout(model).only(rank)
    plan = weights.plan_together(**{"sends" if trains else "receives": own})
    receiver = None if trains else weights.Versions({name: each.clone() for name, each in model.state_dict().items()})
    first = None if trains else receiver.current

    def update(**options):
        if trains:
            return weights.send(model, plan, skip_unchanged=True, max_bytes_in_flight=4096)
        return weights.receive(plan, receiver, max_bytes_in_flight=4096, **options)

    def check(version, result, bytes_of_names):
        """The version has all new values, and only tensors of these names were received."""
        assert result.version == version
        if not trains:
            number, tensors = receiver.current
            assert number == version
            assert all(torch.equal(tensors[name], each) for name, each in values.items())
            moved = {name for name in values if any(name.startswith(part) for part in bytes_of_names)}
            assert result.received == sum(values[name].nbytes for name in moved)
            assert result.received + result.skipped == sum(each.nbytes for each in values.values())

    check(0, update(), [""])
    if not trains:
        assert first[0] == -1
        assert not any(torch.equal(first[1][name], each) for name, each in values.items() if each.ndim > 1)
    check(1, update(), [])
    with torch.no_grad():
        torch._foreach_mul_([each for name, each in model.named_parameters() if "blocks.1" in name], -1)
    values |= {name: -each for name, each in values.items() if "blocks.1" in name}
    check(2, update(), ["blocks.1"])  # a change of signs only, in place, which version counters do not count
    check(3, update(), [])
    with torch.no_grad():
        model.norm.weight.mul_(2)
    values["norm.weight"] = values["norm.weight"] * 2
    check(4, update(), ["norm"])
    check(5, update(**({} if trains else {"refresh": True})), [""])
    if not trains:
        receiver = weights.Versions(made(3).state_dict())
    check(6, update(), [""])  # other tensors
    check(7, update(), [])


@distributed(world=2)
def test_other_tensors_at_the_same_address_get_everything(rank, world):
    memory = bytearray(400)

    def made():
        return {"weight": torch.frombuffer(memory, dtype=F32)}

    tensors = made()
    own = WeightLayout(infos(tensors), {}, {rank: rows_of(tensors, 1, 0)[0]})
    plan = weights.plan_together(**{"receives" if rank else "sends": own})
    if rank == 0:
        tensors["weight"].fill_(1.0)
        for _ in range(3):
            weights.send(tensors, plan, skip_unchanged=True)
        return
    weights.receive(plan, tensors)
    assert weights.receive(plan, tensors).skipped == 400
    place = tensors.pop("weight").data_ptr()
    tensors = made()
    tensors["weight"].zero_()
    assert tensors["weight"].data_ptr() == place
    assert weights.receive(plan, tensors).skipped == 0
    assert (tensors["weight"] == 1).all()


@distributed(world=2)
def test_parts_that_are_skipped_keep_their_values_in_place(rank, world):
    """With ties, padding, tensors of several parts, and updates that do not skip in between."""
    values = {"a": torch.arange(6.0).view(3, 2), "b": torch.arange(4.0).view(2, 2) - 9, "c": torch.ones(5)}
    source = WeightLayout(infos(values), {"tied": "c"}, {0: rows_of(values, 1, 0)[0]})
    both = LocalTensor(
        (6, 2),
        F32,
        (Piece("a", Box((0, 0), (3, 2)), (0, 0)), Piece("b", Box((0, 0), (2, 2)), (3, 0))),
        (Box((5, 0), (1, 2)),),
    )
    held = {"both": both, "tied": LocalTensor((5,), F32, (Piece("tied", Box((0,), (5,)), (0,)),))}
    plan = weights.plan_together(**({"receives": held} if rank else {"sends": source}))
    tensors = {name: torch.full(each.shape, 3.0) for name, each in held.items()}
    first = {name: each.clone() for name, each in values.items()}
    for step, (changes, skips) in enumerate([("abc", 1), ("b", 1), ("c", 1), ("a", 0), ("back", 1), ("", 1)]):
        for name in values:
            if name in changes or changes == "back":
                values[name].copy_(first[name] if changes == "back" else values[name] + step + 1)
        if rank == 0:
            weights.send(values, plan, skip_unchanged=bool(skips))
        else:
            update = weights.receive(plan, tensors)
            assert (update.skipped > 0) == (step in (1, 2, 5))
            assert torch.equal(tensors["both"], torch.cat([values["a"], values["b"], torch.zeros(1, 2)]))
            assert torch.equal(tensors["tied"], values["c"])


@distributed(world=2)
def test_two_plans_into_the_same_tensors_and_changes_by_other_code_are_noticed(rank, world):
    one, two = ({"x": torch.full((4,), value), "y": torch.full((3,), value)} for value in (1.0, 2.0))
    own = WeightLayout(infos(one), {}, {rank: rows_of(one, 1, 0)[0]})
    plans = [weights.plan_together(**{"receives" if rank else "sends": own}) for _ in range(2)]
    into = {name: torch.zeros_like(each) for name, each in one.items()}
    for number in (0, 1, 0, 0):
        if rank == 0:
            weights.send((one, two)[number], plans[number], skip_unchanged=True)
        else:
            weights.receive(plans[number], into)
            assert all((each == number + 1).all() for each in into.values())
            into["y"].zero_()


@distributed(world=2)
def test_versions_keep_tensors_that_a_plan_does_not_have(rank, world):
    values = {"x": torch.full((4,), 1.0), "y": torch.full((3,), 2.0)}
    versions = weights.Versions({**{name: torch.zeros_like(each) for name, each in values.items()}, "z": torch.ones(2)})
    for version, name in enumerate("xyx"):
        own = WeightLayout(infos({name: values[name]}), {}, {rank: rows_of({name: values[name]}, 1, 0)[0]})
        plan = weights.plan_together(**{"receives" if rank else "sends": own})
        if rank == 0:
            weights.send(values, plan)
        else:
            assert weights.receive(plan, versions).version == version == versions.version
    if rank:
        assert all(torch.equal(versions.tensors[name], each) for name, each in values.items())
        assert torch.equal(versions.tensors["z"], torch.ones(2))


@pytest.mark.parametrize("kind", ["Versions", "inference tensors"])
@distributed(world=2)
def test_two_plans_do_not_skip_what_the_other_has_overwritten(rank, world, kind):
    """Neither a message that arrives in a tensor nor a write to an inference tensor is counted by torch."""
    one, two = {"x": torch.full((4,), 1.0)}, {"x": torch.full((4,), 2.0)}
    own = WeightLayout(infos(one), {}, {rank: rows_of(one, 1, 0)[0]})
    plans = [weights.plan_together(**{"receives" if rank else "sends": own}) for _ in range(2)]
    with torch.inference_mode(kind != "Versions"):
        into = {"x": torch.zeros(4)}
    into = weights.Versions(into) if kind == "Versions" else into
    for step, number in enumerate((0, 1, 1, 0)):
        if number:
            two["x"].fill_(2.0 + step)
        if rank == 0:
            weights.send((one, two)[number], plans[number], skip_unchanged=True)
        else:
            weights.receive(plans[number], into)
            assert torch.equal((into.tensors if kind == "Versions" else into)["x"], (one, two)[number]["x"])


@distributed(world=3)
def test_one_rank_sends_all_buffers(rank, world):
    """The statistics of a batch norm differ between ranks: those of one rank belong together."""
    mesh = DeviceMesh("cpu", [0, 1])
    model = nn.BatchNorm1d(4)
    for value in (model.running_mean, model.running_var):
        value.fill_(10 * (rank + 1))
    if rank < 2:
        cs.fully_shard(model, mesh=mesh)
    plan = weights.plan_together(**{"sends" if rank < 2 else "receives": model})
    weights.send(model, plan) if rank < 2 else weights.receive(plan, model)
    if rank == 2:
        assert model.running_mean.unique() == 10
        assert model.running_var.unique() == 10


class WithExtraState(nn.Linear):
    def get_extra_state(self):
        return torch.ones(3)

    def set_extra_state(self, state):
        pass


def test_receivers_that_would_not_get_the_values_are_refused():
    def problem(into, given=None, held=None):
        layout = WeightLayout(infos(given), {}, {0: held or rows_of(given, 1, 0)[0]}) if given else weights.layout(into)
        plan = weights.plan_transfer(layout, layout)
        with pytest.raises((cs.errors.ShardConfigValueError, cs.errors.ShardConfigTypeError)) as caught:
            _targets.target_of(into, plan, 0, None)
        return str(caught.value)

    assert problem(WithExtraState(2, 2)).startswith("into: _extra_state: a hook of the state dict or get_extra_state")
    hooked = nn.Linear(2, 2)
    hooked.register_state_dict_post_hook(lambda module, state, *_: state.update(weight=state["weight"].clone()))
    assert problem(hooked).startswith("into: weight: a hook of the state dict")
    x = {"x": torch.zeros(4)}
    assert "one place in memory (strides (0,))" in problem({"x": torch.zeros(1).expand(4)}, x)
    assert "y: has the memory of x, but other weights" in problem({"x": x["x"], "y": x["x"]}, {**x, "y": x["x"]})
    layout = WeightLayout(infos(x), {}, {0: rows_of(x, 1, 0)[0]})
    plan = weights.plan_transfer(layout, layout)
    with pytest.raises(cs.errors.ShardConfigValueError, match="staging: Versions"):
        _targets.target_of(weights.Versions(x), plan, 0, "cpu")
    assert _targets.target_of(x, plan, 0, "meta").staged(["x"])["x"].is_meta
    with pytest.raises(cs.errors.ShardConfigTypeError, match=r"unused: is the string 'a\*'; pass a list"):
        weights.plan_transfer(layout, layout, unused="a*")


@distributed(world=3)
def test_shards_of_a_layout_with_other_numbers_are_refused(rank, world):
    """Two shards of one shape: without a check, receivers would get them in the wrong order."""
    mesh = DeviceMesh("cpu", [0, 1])
    torch.manual_seed(0)
    model = nn.Linear(2, 4, bias=False)
    if rank < 2:
        cs.fully_shard(model, mesh=mesh)
        renamed = weights.layout(model, rename=lambda name: f"model.{name}")
        plan = weights.plan_together(sends=renamed.on([1, 0]))
        with pytest.raises(
            cs.errors.StaleStateError, match=r"weight is \[\d:\d, 0:2\] of the full tensor on this rank"
        ):
            weights.send(model, plan)
        with pytest.raises(cs.errors.ShardConfigTypeError, match=r"weight: is a DTensor; pass the model"):
            weights.send(model.state_dict(), plan)
        plan = weights.plan_together(sends=renamed)
        weights.send(model, plan)
        whole = model.weight.full_tensor()
    else:
        into = {"model.weight": torch.zeros(4, 2)}
        held = rows_of(into, 1, 0)[0]
        plan = weights.plan_together(receives=held)
        for _ in range(2):
            with pytest.raises(cs.errors.RankMismatchError, match=r"rank 0 cannot send .*Nothing was sent"):
                weights.receive(plan, into)
        weights.receive(weights.plan_together(receives=held), into)
        whole = into["model.weight"]
    everyone = [None] * world
    dist.all_gather_object(everyone, whole)
    assert all(torch.equal(each, everyone[0]) for each in everyone)


@distributed(world=2)
def test_meshes_with_descending_ranks_are_refused(rank, world):
    """Torch's process groups sort ranks: rank 0 holds the first rows, but is the second rank of the mesh."""
    meshes = [DeviceMesh("cpu", ranks) for ranks in ([1, 0], [0, 1])]
    for mesh in meshes:
        torch.manual_seed(0)
        model = nn.Linear(2, 4, bias=False)
        whole = model.weight.detach().clone()
        cs.fully_shard(model, mesh=mesh)
        if mesh is meshes[0]:
            with pytest.raises(cs.errors.ShardConfigUnsupportedError, match=r"its ranks \[1, 0\] do not ascend"):
                weights.layout(model)
            with pytest.raises(cs.errors.ComposableShardError, match=r"its ranks \[1, 0\] do not ascend"):
                checkpoint.save("unused", {"model": model.state_dict()}, step=1)
        else:
            [piece] = weights.layout(model).ranks[rank]["weight"].pieces
            assert torch.equal(model.weight.to_local(), whole[piece.box.slices(whole_box(whole.shape))])


@distributed(world=2)
def test_ranks_that_do_different_things_get_advice_about_weights(rank, world):
    model = made(rank)
    group = dist.new_group([0, 1])
    plan = weights.plan_together(group, **roles(rank, model))
    words = (
        "ranks 0 and 1 do different things: rank 0 is about to send or receive weights, update 0, and rank 1 is about "
        "to plan how to send weights. Call plan_together, send and receive in the same order on all ranks. Training can"
    )
    with pytest.raises(cs.errors.RankMismatchError, match=words):
        weights.plan_together(group, receives=model) if rank else weights.send(model, plan, group)
    with pytest.raises(
        cs.errors.PeerLostError, match="weights can no longer be sent in this process group: ranks 0 and"
    ):
        weights.receive(plan, model, group) if rank else weights.send(model, plan, group)
    other = dist.new_group([0, 1])
    plans = [weights.plan_together(other, **roles(rank, each)) for each in (model, nn.Linear(2, 2))]
    with pytest.raises(cs.errors.RankMismatchError, match=r"has plan .* pass the same plan .*Nothing was sent"):
        weights.receive(plans[1], nn.Linear(2, 2), other) if rank else weights.send(model, plans[0], other)
    weights.receive(plans[0], model, other) if rank else weights.send(model, plans[0], other)


@distributed(world=2)
def test_many_updates_keep_few_notes_and_mismatches_are_still_noticed(rank, world):
    model, group = nn.Linear(2, 2), dist.new_group([0, 1])
    plan = weights.plan_together(group, **roles(rank, model))
    update = weights.receive if rank else weights.send
    with patch.object(ledger, "_MOST_NOTES_OF_TRANSFERS", 10):
        for version in range(25):
            with torch.no_grad():
                model.weight.fill_(-1 if rank else version)
            assert update(*((plan, model) if rank else (model, plan)), group).version == version
            assert torch.equal(model.weight, torch.full((2, 2), float(version)))
    tail = _channel.channel_of(group).ledger.tail(100)
    assert tail.place > 50
    assert len(tail.notes) <= 14
    with pytest.raises(cs.errors.RankMismatchError, match="about to send or receive weights, update 25, and rank 1 is"):
        weights.plan_together(group, receives=model) if rank else weights.send(model, plan, group)


@distributed(world=2)
def test_offloaded_and_mixed_precision_trainers_send_between_forward_and_backward(rank, world):
    mesh = DeviceMesh("cpu", [0, 1])
    policies = {"mp_policy": cs.MixedPrecisionPolicy(param_dtype=BF16), "offload_policy": cs.CPUOffloadPolicy()}
    model, engine = made(0), made(1)
    for block in model.blocks:
        cs.fully_shard(block, mesh=mesh, **policies)
    cs.fully_shard(model, mesh=mesh, **policies)
    own = WeightLayout(ranks={rank: weights.layout(engine).only(rank).ranks[rank]})
    plan = weights.plan_together(sends=model, receives=own)
    grads = []
    for sends in (False, True):
        loss = next_token_loss(model, *token_batch(rank, 0))
        if sends:
            weights.send(model, plan, into=engine)
        loss.backward()
        grads.append([each.grad.full_tensor().clone() for each in model.parameters()])
        model.zero_grad()
    assert all(map(torch.equal, *grads))
    assert all(torch.equal(each, made(0).state_dict()[name]) for name, each in engine.state_dict().items())


@distributed(world=2)
def test_receivers_may_hold_inference_tensors_and_unsharded_parameters(rank, world):
    with torch.inference_mode():
        into = {"x": torch.zeros(4)}
    values = {"x": torch.arange(4.0)}
    own = WeightLayout(infos(values), {}, {rank: rows_of(values, 1, 0)[0]})
    plan = weights.plan_together(**{"receives" if rank else "sends": own})
    weights.receive(plan, into) if rank else weights.send(values, plan)
    assert rank == 0 or torch.equal(into["x"], values["x"])
    torch.manual_seed(rank)
    model, mesh = nn.Linear(4, 3), DeviceMesh("cpu", [1])
    if rank:
        cs.fully_shard(model, mesh=mesh)
        model.unshard()
    plan = weights.plan_together(**roles(rank, model))
    weights.receive(plan, model) if rank else weights.send(model, plan)
    torch.manual_seed(0)
    assert torch.equal(model(torch.ones(4)), nn.Linear(4, 3)(torch.ones(4)))


@distributed(world=2)
def test_nothing_changes_before_a_version_is_complete(rank, world):
    """A receiver's tensors are old until it has received the last message."""
    model = made(rank)
    plan = weights.plan_together(**roles(rank, model))
    before = full(model)
    if rank == 0:
        weights.send(model, plan, max_bytes_in_flight=256, version=41)
        return
    seen = []
    finish = _moves.Mover._finish

    def watched(mover, flight):
        finish(mover, flight)
        seen.append(all(torch.equal(each, before[name]) for name, each in model.state_dict().items()))

    _moves.Mover._finish = watched
    versions = []
    options = {"staging": "cpu", "before_switch": lambda version: versions.append((version, seen[-1]))}
    try:
        assert weights.receive(plan, model, max_bytes_in_flight=256, **options).version == 41
    finally:
        _moves.Mover._finish = finish
    assert versions == [(41, True)]
    assert len(seen) > 20
    assert all(seen)
    assert all(torch.equal(each, made(0).state_dict()[name]) for name, each in model.state_dict().items())


@distributed(world=3)
def test_ranks_that_train_and_receive_can_stage_refresh_and_call_a_hook(rank, world):
    mesh = init_device_mesh("cpu", (3,))
    model, engine = sharded(made(0), mesh), made(1).to(BF16)
    own = WeightLayout(ranks={rank: weights.layout(engine).only(rank).ranks[rank]})
    plan = weights.plan_together(sends=model, receives=own)
    calls = []

    def hook(version):
        calls.append(version)
        assert any(not torch.equal(each, before[name]) for name, each in full(model).items())
        assert all(torch.equal(each, before[name]) for name, each in engine.state_dict().items())
        if rank == 1 and len(calls) == 2:
            raise OSError("requests do not end")

    def update(**options):
        return weights.send(model, plan, into=engine, staging="cpu", before_switch=hook, skip_unchanged=True, **options)

    for version in (3, 5):
        before = {name: each.clone() for name, each in engine.state_dict().items()}
        train(model, rank, version)
        if version == 5:  # no rank switches, and all can try again
            error = OSError if rank == 1 else cs.errors.RankMismatchError
            words = "requests do not end" + ("" if rank == 1 else ". No receiver has changed")
            with pytest.raises(error, match=f"{words}$"):
                update(version=version)
            assert all(torch.equal(each, before[name]) for name, each in engine.state_dict().items())
        result = update(version=version)
        assert result.version == version
        assert result.skipped == 0
        assert all(torch.equal(each.to(BF16), engine.state_dict()[name]) for name, each in full(model).items())
    assert calls == [3, 5, 5]
    before = {name: each + 1 for name, each in engine.state_dict().items()}  # for the hook
    engine.load_state_dict(before)
    assert update(refresh=True).skipped == 0
    assert all(torch.equal(each.to(BF16), engine.state_dict()[name]) for name, each in full(model).items())
    sender = weights.plan_together(**({"receives": own} if rank else {"sends": weights.layout(made(0)).only(0)}))
    if rank == 0:
        with pytest.raises(cs.errors.ShardConfigValueError, match="only receivers have these"):
            weights.send(made(0), sender, refresh=True)
    else:
        with pytest.raises(cs.errors.RankMismatchError, match=r"rank 0 cannot .*only receivers have these"):
            weights.receive(sender, engine)


@distributed(world=3)
def test_all_receivers_get_everything_if_one_of_them_has_other_values(rank, world):
    """And in a process group of its own, in which rank 0 is not."""
    values = {"x": torch.full((4,), 1.0), "y": torch.full((3,), 2.0)}
    own = WeightLayout(infos(values), {}, {rank: rows_of(values, 1, 0)[0]})
    plan = weights.plan_together(**{"receives" if rank else "sends": own})
    into = {name: torch.zeros_like(each) for name, each in values.items()}
    for number, skips in enumerate([False, True, False, True]):
        if rank == 0:
            update = weights.send(values, plan, skip_unchanged=True)
        else:
            update = weights.receive(plan, into)
            assert all(torch.equal(each, values[name]) for name, each in into.items())
        assert (update.skipped > 0) == skips, number
        if number == 1 and rank == 2:
            into["y"].zero_()
    others = dist.new_group([1, 2])
    if rank:
        values = {name: each + 1 for name, each in values.items()}
        plan = weights.plan_together(others, **{"receives" if rank == 2 else "sends": own})
        assert plan.links == {(1, 2): 28}
        weights.receive(plan, into, others) if rank == 2 else weights.send(values, plan, others)
        assert rank == 1 or all(torch.equal(each, values[name]) for name, each in into.items())


def roles(rank, model):
    """Rank 0 sends, and rank 1 receives; both hold the full model."""
    return {"receives" if rank else "sends": model}


@distributed(world=2)
def test_bits_survive(rank, world):
    """NaNs with a payload, infinities, negative zeros and integers; and casts round to the nearest value."""
    bits = torch.tensor([0x7FC0_1234, -1, -(1 << 31), 0x7F80_0000, 0x3F80_8001], dtype=torch.int32)
    names = {"f32": bits.view(F32), "i32": bits, "signs": bits > 0, "bf16": bits.view(F32)[1:].to(BF16)}
    module = nn.Module()
    for name, value in names.items():
        module.register_buffer(name, value if rank == 0 else torch.zeros_like(value))
    weights_of = weights.layout(module).only(rank)
    plan = weights.plan_together(**{"receives" if rank else "sends": weights_of})
    weights.receive(plan, module) if rank else weights.send(module, plan)
    for name, value in names.items():
        assert torch.equal(bits_of(getattr(module, name)), bits_of(value))


@distributed(world=2)
def test_wrong_roles_and_versions_are_errors_on_all_ranks(rank, world):
    model = made(rank)
    plan = weights.plan_together(**roles(rank, model))

    def fails(error, words, call):
        with pytest.raises(error, match=words):
            call()

    lost = cs.errors.RankMismatchError
    if rank == 0:
        words = r"ranks \[0\] send and ranks \[1\] receive, and this is rank 0"
        fails(cs.errors.ShardConfigValueError, words, lambda: weights.receive(plan, model))
    else:
        fails(
            lost,
            "rank 0 cannot send or receive weights: ShardConfigValueError: plan: ranks",
            lambda: weights.receive(plan, model),
        )
    weights.receive(plan, model) if rank else weights.send(model, plan, version=7)  # the ranks can continue
    if rank == 0:
        words = "version: 7 is not higher than the last one, 7"
        fails(cs.errors.ShardConfigValueError, words, lambda: weights.send(model, plan, version=7))
    else:
        fails(lost, "rank 0 cannot send or receive weights: .*version: 7", lambda: weights.receive(plan, model))
    other = made(0, vocabulary=38)
    with pytest.raises(cs.errors.LayoutMismatchError) as caught:
        weights.plan_together(**roles(rank, other if rank else model))
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["embed.weight", "head.weight"] * 2
    own = weights.layout(model)
    with pytest.raises(cs.errors.ShardConfigValueError if rank == 0 else lost, match=r"layout.on\(\[0\]\)"):
        weights.plan_together(**({"receives": own} if rank else {"sends": own.only(1)}))


@distributed(world=3)
def test_ranks_without_a_role_and_other_groups_are_errors(rank, world):
    model = made(rank)
    with pytest.raises(
        cs.errors.ShardConfigValueError, match=r"has ranks \[0, 1, 2\], but ranks \[0, 1\] send or receive"
    ):
        weights.plan_together(**(roles(rank, model) if rank < 2 else {}))
    both = dist.new_group([0, 1])
    if rank == 2:
        with pytest.raises(cs.errors.ShardConfigStateError, match="this rank is not in the process group"):
            weights.plan_together(both)
        return
    plan = weights.plan_together(both, **roles(rank, model))
    weights.receive(plan, model, both) if rank else weights.send(model, plan, both)
    assert all(torch.equal(each, made(0).state_dict()[name]) for name, each in model.state_dict().items())


@simulated(world=6)
def test_a_layout_describes_the_memory_of_every_rank(rank, world):
    """After tensor parallelism of sizes that no mesh divides, with shards of another dim and with replicated norms."""
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 4), nn.LayerNorm(4))
    values = {name: each.clone() for name, each in model.state_dict().items()}
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    for layer in model:
        cs.fully_shard(layer, mesh=mesh["dp"])
    layout = weights.layout(model)
    said = [None] * world
    dist.all_gather_object(said, layout.only(rank))
    merged = WeightLayout.merged(said)
    assert merged.tensors == dict(sorted(infos(values).items()))
    for name, local in merged.ranks[rank].items():
        tensor = dict(model.named_parameters())[name].to_local()
        assert tuple(tensor.shape) == local.shape
        for piece in local.pieces:
            part = values[name][piece.box.slices(whole_box(values[name].shape))]
            assert torch.equal(tensor[piece.local.slices(whole_box(tensor.shape))], part)
    for other in layout.ranks:
        for name, local in layout.ranks[other].items():
            assert merged.ranks[other][name] == local
    for name, box, value in weights.local_slices(model):
        assert torch.equal(value, values[name][box.slices(whole_box(values[name].shape))])
    rows = WeightLayout(infos(values), {}, {each: rows_of(values, 2, each, BF16)[0] for each in range(2)})
    found = [None] * world
    dist.all_gather_object(found, list(weights.local_slices(model, rows)))
    for name, value in values.items():
        covered = torch.zeros(value.shape, dtype=torch.int32)
        for own, box, part in {(each[0], each[1]): each for some in found for each in some}.values():
            if own == name:
                place = box.slices(whole_box(value.shape))
                covered[place] += 1
                assert torch.equal(part, value[place].to(BF16))
        assert (covered == 1).all()
    whole = [None] * world
    dist.all_gather_object(whole, list(weights.local_slices(model)))
    for slices in (found, whole):
        for each in range(2):
            held, tensors = rows_of(values, 2, each, BF16)
            weights.fill(tensors, held, (part for some in slices for part in some))
            assert_rows(tensors, held, values)
    with pytest.raises(cs.errors.LayoutMismatchError) as caught:
        weights.fill(tensors, held, whole[0])
    assert "0.weight: no part fills [0:3, 0:5]" in caught.value.problems  # rank 0 has none of the last rows


def test_layouts_of_models_on_the_meta_device():
    with torch.device("meta"):
        model = made(0)
    assert weights.layout(model) == weights.layout(made(0))
    renamed = weights.layout(model, rename=lambda name: f"model.{name}" if name.endswith("norm.weight") else None)
    assert [*renamed.tensors] == [
        f"model.{name}" for name in sorted(model.state_dict()) if name.endswith("norm.weight")
    ]
    tied = weights.layout(made(0, tied=True), rename=lambda name: None if name == "embed.weight" else name)
    assert "head.weight" in tied.tensors
    assert not tied.ties
    with pytest.raises(cs.errors.ShardConfigValueError, match="both get the name x"):
        weights.layout(model, rename=lambda name: "x")
    with pytest.raises(cs.errors.ShardConfigStateError, match="there is no process group"):
        weights.plan_together(sends=weights.layout(model))
