"""Communication of weights and gradients in fewer bits, compared with an unsharded model that rounds explicitly."""

import copy
import inspect
from collections import Counter
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.distributed import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import composable_shard as cs
from _blocks import next_token_loss, token_batch
from _compiling import even, graphs_of, three_steps
from _engines import mesh_of
from _gpt import build_gpt
from _low_bits import (
    BLOCK,
    Ranks,
    gradients_of,
    groups_of,
    plain,
    round_weights,
    rounded,
    sharded,
    trains_as_one_that_rounds,
)
from _models import shard_blocks, vectors
from _pool import distributed, more, simulated
from _stepping import engine_of
from composable_shard import CommPolicy, MixedPrecisionPolicy, Ragged, fully_shard, make_plan, testing
from composable_shard._comm.rounding import Numbers
from composable_shard._policies import Wire
from composable_shard._torch.distributed import local_tensor
from composable_shard._torch.ragged import DISPATCHES


@distributed(world=(2, more(3)))
@pytest.mark.parametrize(
    ("gather", "reduce", "rows"),
    [
        ("fp8", "int8", 1),
        more("int8", "fp8", 1),
        more("bf16", "bf16", 1),
        more(None, "fp8", 1),
        more("fp8", None, 1),
        ("int8", "bf16", 1),
        ("fp8", "int8", 5),
        more("int8", "fp8", 5),
    ],
)
def test_a_step_is_bitwise_identical_to_a_model_that_rounds_explicitly(rank, world, gather, reduce, rows):
    trains_as_one_that_rounds(rank, world, CommPolicy(gather, reduce, block=BLOCK), rows)


def stepped(model, rank, steps=2, optimizer=None, micro=1):
    """Losses of all steps, and the gradients of the last one."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        for index in range(micro):
            model.set_requires_gradient_sync(index == micro - 1)
            loss = next_token_loss(model, *token_batch(rank, micro * step + index))
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
    grads = {name: param.grad.full_tensor() for name, param in model.named_parameters() if param.grad is not None}
    return losses, grads


def same(one, two):
    (losses, grads), (others, expected) = one, two
    assert [*map(float, losses)] == [*map(float, others)]
    assert grads.keys() == expected.keys()
    for name, grad in grads.items():
        assert torch.equal(grad, expected[name]), name


BOTH = CommPolicy(gather="fp8", reduce="int8", block=BLOCK)


@pytest.fixture
def to_nearest(monkeypatch):
    """Round gradients to nearest, so that the results depend neither on the rank nor on the layout of the shards."""
    put = Numbers.put
    monkeypatch.setattr(Numbers, "put", lambda self, numbers, noise=None: put(self, numbers))


@pytest.mark.matrix
@simulated(world=4)
def test_results_do_not_depend_on_which_weights_stay_gathered(rank, world):
    expected = stepped(sharded(BOTH), rank)
    for reshard in (False, 2):
        same(stepped(sharded(BOTH, reshard_after_forward=reshard), rank), expected)
    model = sharded(BOTH)
    model.set_reshard_after_backward(False)
    same(stepped(model, rank), expected)
    model = sharded(BOTH)
    model.set_prefetch_policy(cs.PrefetchPolicy.bytes(1 << 20))
    same(stepped(model, rank), expected)
    model = sharded(BOTH)
    model.set_pool_policy(cs.PoolPolicy(budget=make_plan(model).peak_bytes * 9 // 10))
    same(stepped(model, rank), expected)


@simulated(world=2)
def test_microbatches_without_sync_are_added_before_rounding(rank, world):
    _, grads = stepped(sharded(BOTH), rank, steps=1, micro=3)
    reference = plain()
    round_weights(reference, Wire("fp8", BLOCK))
    sums = []
    for each in range(world):
        parts = [gradients_of(reference, each, index)[1] for index in range(3)]
        sums.append({name: parts[0][name] + parts[1][name] + parts[2][name] for name in parts[0]})
    expected = Ranks(groups_of(sharded(BOTH)), Wire("int8", BLOCK), world).mean(sums)
    assert all(torch.equal(grads[name], expected[name]) for name in grads)


@simulated(world=2)
def test_frozen_and_tied_parameters_are_also_sent_in_few_bits(rank, world):
    arch = {"tied": True}
    model, reference = sharded(BOTH, arch=arch), plain(arch=arch)
    round_weights(reference, Wire("fp8", BLOCK))
    for each in (model, reference):
        each.blocks[0].attention.requires_grad_(False)
        each.blocks[1].requires_grad_(False)
    losses, grads = stepped(model, rank, steps=1)
    assert torch.equal(losses[0], next_token_loss(reference, *token_batch(rank, 0)))
    assert "head.weight" not in grads
    assert not any(name.startswith(("blocks.1", "blocks.0.attention.")) for name in grads)
    wholes = []
    for each in range(world):
        reference.zero_grad()
        next_token_loss(reference, *token_batch(each, 0)).backward()
        wholes.append({name: p.grad for name, p in reference.named_parameters() if p.grad is not None})
    names = [[name for name in group if name in grads] for group in groups_of(model)]
    expected = Ranks([group for group in names if group], Wire("int8", BLOCK), world).mean(wholes)
    assert all(torch.equal(grads[name], expected[name]) for name in grads)


@simulated(world=2)
def test_a_divide_factor_and_half_precision_work_with_few_bits(rank, world):
    model = sharded(CommPolicy(gather="int8", block=BLOCK), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    reference = plain().bfloat16()
    wholes = dict(plain().named_parameters())
    with torch.no_grad():
        for name, param in reference.named_parameters():
            param.copy_(rounded(wholes[name], Wire("int8", BLOCK), dtype=torch.bfloat16))
    assert torch.equal(*[next_token_loss(each, *token_batch(rank, 0)) for each in (model, reference)])
    halves = []
    for factor in (2.0, 4.0):
        model = sharded(BOTH)
        for module in (model, *model.blocks):
            module.set_gradient_divide_factor(factor)
        halves.append(stepped(model, rank, steps=1)[1])
    assert all(torch.equal(grad / 2, halves[1][name]) for name, grad in halves[0].items())


@pytest.mark.usefixtures("to_nearest")
@pytest.mark.parametrize("shape", [(2, 2), (4, 1)])
@simulated(world=4)
def test_sums_are_rounded_between_replicas_and_added_in_the_order_of_the_replicas(rank, world, shape):
    policy = CommPolicy(replicas="int8", block=BLOCK)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    _, grads = stepped(sharded(policy, mesh=mesh), rank, steps=1)
    own = [gradients_of(plain(), each, 0)[1] for each in range(world)]
    for name, grad in grads.items():
        rows = torch.arange(world).view(shape).tolist()
        sums = [sum([own[each][name] for each in row]) for row in rows]
        assert torch.equal(grad, sum([rounded(each, Wire("int8", BLOCK)) for each in sums]) / world), name


@pytest.mark.usefixtures("to_nearest")
@simulated(world=4)
def test_short_and_empty_shards_are_rounded_correctly(rank, world):
    def few_rows():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(32, 3), nn.Linear(3, 48, bias=False), nn.Linear(48, 1), nn.Linear(1, 32))

    model, reference, wire = few_rows(), few_rows(), Wire("int8", BLOCK)
    fully_shard(model)
    model.set_comm_policy(CommPolicy("int8", "int8", block=BLOCK))
    round_weights(reference, wire)
    own = []
    for each in range(world):
        reference.zero_grad()
        reference(torch.full((2, 32), 1.0 + each)).square().mean().backward()
        own.append([param.grad.clone() for param in reference.parameters()])
    model(torch.full((2, 32), 1.0 + rank)).square().mean().backward()
    for param, grads in zip(model.parameters(), zip(*own, strict=True), strict=True):
        expected = sum([rounded(grad, wire) for grad in grads]) / world
        assert torch.equal(param.grad.full_tensor(), expected), tuple(param.shape)


@pytest.mark.usefixtures("to_nearest")
@simulated(world=2)
def test_parameters_sharded_along_another_dim_are_rounded_along_it(rank, world):
    def dim_of(param):
        return Shard(1) if param.dim() == 2 and param.shape[1] % 2 == 0 else None

    model, reference = sharded(BOTH, shard_placement_fn=dim_of), plain()
    with torch.no_grad():
        for param in reference.parameters():
            param.copy_(rounded(param, Wire("fp8", BLOCK), dim=1 if dim_of(param) else 0))
    losses, grads = stepped(model, rank, steps=1)
    own = [gradients_of(reference, each, 0) for each in range(world)]
    assert float(losses[0]) == float(own[rank][0])
    for name, grad in grads.items():
        dim = 1 if dim_of(grad) else 0
        assert torch.equal(grad, sum([rounded(each[name], Wire("int8", BLOCK), dim) for _, each in own]) / world), name


def ragged(param):
    return Ragged(5) if param.ndim == 2 else None


@pytest.mark.matrix
@pytest.mark.usefixtures("to_nearest")
@simulated(world=4)
def test_ragged_and_even_shards_are_bitwise_identical_with_rounding_to_nearest(rank, world):
    policy = CommPolicy("fp8", "int8", "int8", BLOCK)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for options in ({"mesh": mesh}, {"reshard_after_forward": 2}):
        even = sharded(policy, **options)
        model = sharded(policy, shard_placement_fn=ragged, **options)
        assert len({param.to_local().shape for param in model.parameters()}) > 1
        same(stepped(model, rank, steps=3), stepped(even, rank, steps=3))


@simulated(world=2)
def test_the_next_forward_uses_weights_changed_through_data(rank, world):
    model = sharded(CommPolicy(gather="fp8", block=BLOCK))
    before = next_token_loss(model, *token_batch(rank, 0))
    before.backward()
    with torch.no_grad():
        torch._foreach_mul_([param.data for param in model.parameters()], 0.5)
    reference = plain()
    with torch.no_grad():
        torch._foreach_mul_(list(reference.parameters()), 0.5)
    round_weights(reference, Wire("fp8", BLOCK))
    assert torch.equal(*[next_token_loss(each, *token_batch(rank, 0)) for each in (model, reference)])


@pytest.mark.parametrize("between", ["forward", more("forward with gradients"), more("after a backward"), "backward"])
@pytest.mark.parametrize(("gather", "mesh"), [("int8", (4,)), more("fp8", (4,)), ("int8", (2, 2)), more("fp8", (2, 2))])
@distributed(world=4)
def test_swapped_weights_in_between_do_not_change_the_next_backward(rank, world, gather, mesh, between):
    model = sharded(CommPolicy(gather=gather, block=BLOCK), mesh=mesh_of(*mesh), reshard_after_forward=True)
    results = []
    for swaps in (False, True):
        loss = next_token_loss(model, *token_batch(rank, 0))
        if between == "after a backward":
            loss.backward(retain_graph=True)
        if swaps:
            with torch.no_grad():
                torch._foreach_mul_(list(model.parameters()), 2.0)  # does not increase versions
                with torch.set_grad_enabled(between in ("forward with gradients", "backward")):
                    other = next_token_loss(model, *token_batch(rank, 0))
                if between == "backward":
                    other.backward()
                torch._foreach_mul_(list(model.parameters()), 0.5)
        model.zero_grad()
        loss.backward()
        results.append([param.grad.full_tensor() for param in model.parameters()])
        model.zero_grad()
    assert all(map(torch.equal, *results))


TEXT = torch.frombuffer(bytearray(Path(inspect.__file__).read_bytes()), dtype=torch.uint8)


def losses_of_the_demo(rank, world, policy, steps, size="tiny"):
    """Losses of the demo's model on Python source code, averaged over the ranks."""
    model, length = build_gpt(size), 32
    cs.shard_by_class(model, {type(model.blocks[0])}, comm_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2.5e-3, betas=(0.9, 0.95))
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(world * step + rank)
        begins = torch.randint(len(TEXT) - length - 1, (8, 1), generator=generator)
        tokens = TEXT[begins + torch.arange(length + 1)].long()
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        all_reduce(total)
        losses.append(total.item() / world)
    return losses


@distributed(world=2)
def test_the_demo_learns_like_in_float32(rank, world):
    low = CommPolicy("fp8", "int8", block=64)
    exact, others = (losses_of_the_demo(rank, world, policy, steps=30) for policy in (CommPolicy(), low))
    assert exact[0] > 5.4 > 4.5 > exact[-1]
    apart = [one - two for one, two in zip(others, exact, strict=True)]
    assert 0 < max(map(abs, apart)) < 0.06
    assert abs(sum(apart[-10:]) / 10) < 0.02


@pytest.mark.parametrize("choose", [None, ragged])
@pytest.mark.parametrize("policy", [BOTH, CommPolicy("int8", "bf16"), CommPolicy("bf16", "fp8")])
def test_the_plan_predicts_the_exact_number_of_bytes_sent(policy, choose):
    with testing.fabric(4, latency_s=1e-6, bandwidth_Bps=1e9, clock="virtual") as net:
        model = sharded(policy, reshard_after_forward=True, shard_placement_fn=choose)
        plan = make_plan(model)
        for _ in range(2):
            net.reset()
            next_token_loss(model, *token_batch(0, 0)).backward()
        moved = Counter()
        for event in net.events:
            moved[event.kind] += event.nbytes
        groups = [plan.group(fqn).moved for fqn in plan.order]
        exact = make_plan(sharded(CommPolicy(), reshard_after_forward=True, shard_placement_fn=choose))
        uncompressed = [exact.group(fqn) for fqn in plan.order]
    assert moved["all_gather"] == 2 * sum(sum(each.gather) for each in groups)
    assert moved["all_to_all"] == sum(sum(each.reduce) for each in groups)
    assert moved["reduce_scatter"] == 0
    assert sum(sum(each.gather) for each in groups) < 0.6 * sum(sum(each.moved.gather) for each in uncompressed)


@pytest.mark.parametrize("choose", [None, ragged])
@pytest.mark.parametrize("policy", [BOTH, CommPolicy("fp8", "int8", "int8", BLOCK)])
@simulated(world=4)
def test_the_plan_predicts_the_memory_for_rounding(rank, world, policy, choose):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(policy, mesh=mesh, shard_placement_fn=choose)
    next_token_loss(model, *token_batch(rank, 0)).backward()
    groups = engine_of(model).groups
    parcels = [bucket.copies._sent.nbytes for group in groups for bucket in group.buckets]
    assert sum(parcels) == sum(group.rounding_bytes for group in make_plan(model).groups)


def test_a_copy_rounds_like_the_original():
    def run(here):
        model = sharded(BOTH)
        stepped(model, here.rank, steps=1)
        model.zero_grad()
        other = copy.deepcopy(model)
        same(stepped(model, here.rank), stepped(other, here.rank))

    testing.spmd(2)(run)


@distributed(world=2)
def test_different_policies_on_ranks_raise_an_error(rank, world):
    model = sharded(BOTH if rank else CommPolicy(gather="int8"))
    with pytest.raises(cs.errors.RankMismatchError, match=r"comm policy gather int8 -> gather fp8, reduce int8"):
        next_token_loss(model, *token_batch(rank, 0))


@simulated(world=2)
def test_errors_about_conflicting_policies_explain_the_fix(rank, world):
    model = sharded(CommPolicy())
    with pytest.raises(cs.errors.ShardConfigTypeError, match="policy: expected a CommPolicy, got str"):
        model.set_comm_policy("fp8")
    model.blocks[0].set_custom_all_gather(object())
    with pytest.raises(
        cs.errors.ShardConfigValueError, match=r"blocks.*set_custom_all_gather\(None\)|set_custom_all_gather"
    ):
        model.set_comm_policy(BOTH)
    model.set_comm_policy(CommPolicy(reduce="int8"))
    model.blocks[0].set_custom_all_gather(None)
    with pytest.raises(cs.errors.ShardConfigValueError, match="a policy without reduce"):
        model.blocks[0].set_custom_reduce_scatter(object())
    next_token_loss(model, *token_batch(rank, 0)).backward()
    with pytest.raises(cs.errors.ShardConfigStateError, match="before the first forward"):
        model.set_comm_policy(BOTH)


@simulated(world=2)
def test_a_parameter_with_its_own_gather_raises_an_error(rank, world):
    model = nn.Sequential(nn.Linear(32, 8), nn.Linear(8, 8))
    for module in (model[1], model):
        fully_shard(module)
    shard = local_tensor(model[1].weight)
    shard.fsdp_pre_all_gather = lambda mesh: ((shard,), None)
    shard.fsdp_post_all_gather = lambda outputs, metadata, dtype, out=None: (outputs[0], outputs)
    with pytest.raises(cs.errors.ShardConfigValueError, match="parameter weight defines its own all-gather"):
        model.set_comm_policy(BOTH)
    model.set_comm_policy(CommPolicy(gather="fp8"), recurse=False)
    model[1].set_comm_policy(CommPolicy(reduce="int8"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gather": "fp4"}, r"CommPolicy.gather='fp4': expected one of 'bf16', 'fp8', 'int8', or None"),
        ({"reduce": "fp8", "block": 4}, "CommPolicy.block=4: expected a whole number of at least 8"),
    ],
)
def test_invalid_policies_raise_an_error(options, words):
    with pytest.raises(cs.errors.ShardConfigValueError, match=words):
        CommPolicy(**options)


@simulated(world=1)
def test_on_one_rank_nothing_is_rounded(rank, world):
    model = sharded(BOTH)
    loss, grads = gradients_of(plain(), 0, 0)
    losses, ours = stepped(model, 0, steps=1)
    assert float(losses[0]) == float(loss)
    assert all(torch.equal(ours[name], grads[name]) for name in grads)


@simulated(world=2)
def test_shard_by_class_sets_the_policy_for_all_modules(rank, world):
    model = plain()
    cs.shard_by_class(model, {type(model.blocks[0])}, comm_policy=BOTH)
    same(stepped(model, rank), stepped(sharded(BOTH), rank))
    assert "packed, gather fp8, reduce int8" in str(make_plan(model))


def low_bits(model, shard, **options):
    shard_blocks(model, shard, **options)
    model.set_comm_policy(CommPolicy(gather="int8", reduce="int8", block=8))


def compiled(rank, world, **options):
    return three_steps(rank, even(), low_bits, vectors, **options)


def test_the_compiled_graph_has_few_bits_and_is_bitwise_identical_to_eager():
    assert_expected_inline(
        graphs_of(compiled),
        """\
forward GwGmwGmmwmmm, saves 2288 bytes
backward GmmwGmmmmRwmmmmwRmwRw
""",
    )


def compiled_uneven(rank, world, **options):
    return three_steps(rank, even(), low_bits, vectors, shard_placement_fn=lambda param: Ragged(5), **options)


@pytest.mark.skipif(not DISPATCHES, reason="in this version DTensor treats its subclasses like DTensor")
def test_the_compiled_graph_with_ragged_shards_is_bitwise_identical_to_eager():
    assert_expected_inline(
        graphs_of(compiled_uneven),
        """\
forward GwGmwGmmwmmm, saves 2288 bytes
backward GmmwGmmmmRwmmmmwRmwRw
""",
    )


@pytest.mark.parametrize("optimizer", [more("in_backward"), "owned"])
@simulated(world=2)
def test_optimizers_in_backward_and_owned_optimizers_use_rounded_gradients(rank, world, optimizer):
    def sgd(params):
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)

    ordinary, model = (sharded(BOTH, shard_placement_fn=ragged) for _ in range(2))
    if optimizer == "in_backward":
        other = cs.optim.in_backward(model, sgd)
    else:
        other = cs.optim.owned(torch.optim.SGD, model.named_parameters(), lr=0.1, momentum=0.9)
    losses = [
        stepped(net, rank, steps=3, optimizer=how)[0]
        for net, how in ((ordinary, sgd(ordinary.parameters())), (model, other))
    ]
    assert [*map(float, losses[0])] == [*map(float, losses[1])]
    for one, two in zip(ordinary.parameters(), model.parameters(), strict=True):
        assert torch.equal(one.full_tensor(), two.full_tensor())
