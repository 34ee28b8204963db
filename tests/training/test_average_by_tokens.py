"""`average_by_tokens`: gradients of all ranks compared with those of one process that has all tokens.

The one process adds in another order, so the gradients differ by rounding. The tolerances are for that.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import composable_shard as cs
from _engines import ENGINES, mesh_of
from _models import Stack, generator, shard_blocks
from _pool import distributed, simulated
from composable_shard.testing import spmd

ROWS = 8  # rows of a batch
TOKENS = (3, 0, 8, 1)  # number of rows that count in the loss, for each rank
CLOSE = {"rtol": 1e-5, "atol": 1e-7}


def batch_of(rank, micro=0):
    draw = generator(rank, micro)
    return torch.randn(ROWS, 4, generator=draw), torch.randint(0, 4, (ROWS,), generator=draw)


def tokens_of(rank, micro=0):
    return TOKENS[(rank + micro) % len(TOKENS)]


def masked_mean(logits, targets, tokens):
    """Mean by a mask. Without any row it is 0/0, so NaN in forward and backward."""
    mask = (torch.arange(ROWS) < tokens).float()
    return (F.cross_entropy(logits, targets, reduction="none") * mask).sum() / mask.sum()


def ignoring_mean(logits, targets, tokens):
    """Mean by `ignore_index`. Without any row it is NaN, only in forward."""
    return F.cross_entropy(logits, targets.where(torch.arange(ROWS) < tokens, -100))


def filtered_mean(logits, targets, tokens):
    """Mean of selected rows. Without any row it is the mean of an empty tensor."""
    return F.cross_entropy(logits, targets, reduction="none")[:tokens].mean()


MEANS = {"masked": masked_mean, "ignoring": ignoring_mean, "filtered": filtered_mean}


def sum_of(model, rank, micro=0):
    x, targets = batch_of(rank, micro)
    return F.cross_entropy(model(x), targets, reduction="none")[: tokens_of(rank, micro)].sum()


def alone(model, ranks, micros=1):
    """Run backward of the loss over all tokens in one process. Returns the loss."""
    parts = [(rank, micro) for rank in range(ranks) for micro in range(micros)]
    loss = sum(sum_of(model, *part) for part in parts) / sum(tokens_of(*part) for part in parts)
    loss.backward()
    return loss.detach()


def pair(engine, **options):
    """A sharded model, and an unsharded copy."""
    torch.manual_seed(3)
    plain = Stack()
    model = copy.deepcopy(plain)
    shard_blocks(model, ENGINES[engine], **options)
    return model, plain


def compare(model, plain):
    for name, param in plain.named_parameters():
        grad = model.get_parameter(name).grad.full_tensor()
        torch.testing.assert_close(grad, param.grad, **CLOSE, msg=lambda m, n=name: f"{n}: {m}")


def check_a_step(rank, world, mean, counted=int):
    for engine in ENGINES:
        model, plain = pair(engine, mesh=mesh_of(world))
        x, targets = batch_of(rank)
        loss = mean(model(x), targets, tokens_of(rank))
        assert loss.isnan() == (tokens_of(rank) == 0)
        averaged = cs.average_by_tokens(loss, counted(tokens_of(rank)))
        averaged.backward()
        torch.testing.assert_close(averaged.detach(), alone(plain, world), **CLOSE)
        compare(model, plain)


@pytest.mark.parametrize("way", MEANS)
@pytest.mark.parametrize("counted", [int, torch.tensor], ids=["int", "tensor"])
@simulated(world=4)
def test_gradients_and_loss_match_one_process_with_all_tokens(rank, world, way, counted):
    check_a_step(rank, world, MEANS[way], counted)


@distributed(world=2)
def test_gradients_and_loss_match_in_real_processes(rank, world):
    check_a_step(rank, world, masked_mean)
    assert cs.total_tokens(tokens_of(rank)).item() == sum(TOKENS[:2])


@simulated(world=4)
def test_plain_averages_over_uneven_ranks_differ(rank, world):
    model, plain = pair("ours")
    x, targets = batch_of(rank)
    ignoring_mean(model(x), targets, max(1, tokens_of(rank))).backward()
    alone(plain, world)
    with pytest.raises(AssertionError, match="not close"):
        compare(model, plain)


@simulated(world=4)
def test_accumulated_microbatches_weight_tokens_equally_with_the_total_of_the_step(rank, world):
    for engine in ENGINES:
        model, plain = pair(engine, mesh=mesh_of(4))
        total = cs.total_tokens(sum(tokens_of(rank, micro) for micro in range(3)))
        assert (total.dtype, total.item()) == (torch.int64, 3 * sum(TOKENS))
        value = 0
        for micro in range(3):
            model.set_requires_gradient_sync(micro == 2)
            x, targets = batch_of(rank, micro)
            loss = masked_mean(model(x), targets, tokens_of(rank, micro))
            part = cs.average_by_tokens(loss, tokens_of(rank, micro), total=total)
            part.backward()
            value += part.detach()
        torch.testing.assert_close(value, alone(plain, world, micros=3), **CLOSE)
        compare(model, plain)


@simulated(world=4)
def test_with_equal_numbers_of_tokens_gradients_are_bitwise_those_of_plain_averages(rank, world):
    model, _ = pair("ours")
    other = copy.deepcopy(model)
    x, targets = batch_of(rank)
    cs.average_by_tokens(ignoring_mean(model(x), targets, 5), 5).backward()
    ignoring_mean(other(x), targets, 5).backward()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.grad.to_local(), q.grad.to_local())


@pytest.mark.parametrize("given", ["model", "mesh", "nothing"])
@simulated(world=4)
def test_replicas_of_shards_count_as_data_parallel_ranks(rank, world, given):
    mesh = mesh_of(2, 2)
    for engine in ENGINES:
        model, plain = pair(engine, mesh=mesh)
        group = {"model": model if engine == "ours" else mesh, "mesh": mesh, "nothing": None}[given]
        x, targets = batch_of(rank)
        loss = masked_mean(model(x), targets, tokens_of(rank))
        averaged = cs.average_by_tokens(loss, tokens_of(rank), group)
        averaged.backward()
        torch.testing.assert_close(averaged.detach(), alone(plain, world), **CLOSE)
        compare(model, plain)
        assert cs.total_tokens(tokens_of(rank), group).item() == sum(TOKENS)


@pytest.mark.parametrize("given", ["model", "mesh", "group", "nothing"])
@simulated(world=4)
def test_ranks_that_share_a_batch_count_it_once(rank, world, given):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for engine in ENGINES:
        model, plain = pair(engine, mesh=mesh["dp"])
        known = {"model": model, "mesh": mesh["dp"], "group": mesh.get_group("dp"), "nothing": None}
        group = mesh["dp"] if (given, engine) == ("model", "fsdp2") else known[given]
        replica = mesh["dp"].get_local_rank()
        x, targets = batch_of(2 * replica)  # 3 and 8 tokens
        loss = ignoring_mean(model(x), targets, tokens_of(2 * replica))
        averaged = cs.average_by_tokens(loss, tokens_of(2 * replica), group)
        averaged.backward()
        expected = (sum_of(plain, 0) + sum_of(plain, 2)) / 11
        expected.backward()
        torch.testing.assert_close(averaged, expected, **CLOSE)
        compare(model, plain)


@simulated(world=2)
def test_a_step_without_tokens_has_zero_loss_and_zero_gradients(rank, world):
    model, _ = pair("ours")
    x, targets = batch_of(rank)
    loss = cs.average_by_tokens(masked_mean(model(x), targets, 0), torch.tensor(0))
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad.full_tensor().eq(0).all() for p in model.parameters())


@simulated(world=2)
def test_other_losses_of_a_rank_without_tokens_keep_their_gradients(rank, world):
    model, plain = pair("ours")
    tokens = 4 * rank
    for each, mean in ((model, masked_mean), (plain, None)):
        logits = each(batch_of(0)[0])
        penalty = logits.square().mean()
        if mean is None:
            loss = masked_mean(logits, batch_of(0)[1], 4)
        else:
            loss = cs.average_by_tokens(mean(logits, batch_of(0)[1], tokens), tokens)
        (loss + penalty).backward()
    compare(model, plain)


@simulated(world=2)
def test_a_nan_in_the_loss_of_tokens_is_kept(rank, world):
    model, _ = pair("ours")
    x, targets = batch_of(rank)
    loss = cs.average_by_tokens(masked_mean(model(x * float("nan")), targets, 3), torch.tensor(3))
    loss.backward()
    assert loss.isnan()
    assert all(p.grad.full_tensor().isnan().any() for p in model.parameters())


def test_one_process_without_a_process_group_averages_over_its_own_tokens():
    x = torch.tensor(2.0, requires_grad=True)
    loss = cs.average_by_tokens(3 * x, 5)
    loss.backward()
    assert (loss.item(), x.grad.item()) == (6, 3)
    x.grad = None
    cs.average_by_tokens(3 * x, 5, total=cs.total_tokens(10)).backward()
    assert x.grad.item() == 1.5


@simulated(world=2)
def test_average_by_tokens_is_traced_into_one_graph(rank, world):
    model, plain = pair("ours")
    tokens = torch.tensor(TOKENS[2 * rank])

    def loss_of(logits, targets, tokens):
        loss = F.cross_entropy(logits, targets.where(torch.arange(ROWS) < tokens, -100))
        return cs.average_by_tokens(loss, tokens)

    torch._dynamo.reset()
    x, targets = batch_of(2 * rank)
    logits = model(x)
    leaf = logits.detach().requires_grad_()
    loss = torch.compile(loss_of, fullgraph=True, backend="aot_eager")(leaf, targets, tokens)
    loss.backward()
    logits.backward(leaf.grad)
    expected = (sum_of(plain, 0) + sum_of(plain, 2)) / 11
    expected.backward()
    torch.testing.assert_close(loss, expected, **CLOSE)
    compare(model, plain)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.ones(2), 3), cs.errors.ShardConfigValueError, r"loss: expected the mean .* 0-dim, got \(2,\)"),
        ((torch.ones(()), -1), cs.errors.ShardConfigValueError, "tokens=-1: expected a number of tokens of at least 0"),
        (
            (torch.ones(()), torch.ones(2)),
            cs.errors.ShardConfigValueError,
            r"tokens: expected an int or a 0-dim .* got \(2",
        ),
        ((torch.ones(()), 2.5), cs.errors.ShardConfigTypeError, "tokens: expected an int or a 0-dim tensor, got float"),
        ((torch.ones(()), 2, "dp"), cs.errors.ShardConfigTypeError, "group: expected a sharded model, .* got str"),
        (
            (torch.ones(()), 2, nn.Linear(2, 2)),
            cs.errors.ShardConfigValueError,
            "group: Linear contains no sharded module",
        ),
    ],
)
def test_invalid_arguments_of_average_by_tokens_raise_an_error(arguments, error, message):
    with pytest.raises(error, match=message):
        cs.average_by_tokens(*arguments)
    with pytest.raises(cs.errors.ShardConfigValueError, match="total=-2: expected a number of tokens"):
        cs.average_by_tokens(torch.ones(()), 1, total=-2)


def test_on_one_rank_average_by_tokens_changes_nothing():
    def body(world):
        layer = cs.fully_shard(nn.Linear(4, 4), mesh=world.mesh)
        loss = layer(torch.ones(3, 4)).mean()
        assert torch.equal(cs.average_by_tokens(loss, 3, layer), loss)

    spmd(1)(body)
