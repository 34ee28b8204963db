"""Expert parallelism: experts are groups on a separate mesh, and tokens are sent to them. All ranks shard the rest."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch.distributed.tensor import Shard

import composable_shard as cs
from _compiling import graphs_of, three_steps
from _engines import fully_shard, named_mesh
from _experts import DIM, Experts, ListedExperts, Net, SlottedMoE, distribute
from _pool import distributed
from _stepping import assert_at_rest
from composable_shard import FSDPMeshInfo, ShardPlacementResult, errors, testing


def meshes():
    """A mesh of all ranks, and a 2D mesh: ranks with the same experts, and ranks with different experts."""
    return named_mesh((4,), ("dp",)), named_mesh((2, 2), ("edp", "ep"))


def shard(model, engine, dense, sparse, dim=0, **options):
    """Shard each block by one call, into two groups. The gradients of both are means over all ranks."""
    info = FSDPMeshInfo(sparse["edp"], shard_mesh_dim=0)
    experts = {id(p) for block in model.blocks for p in block.moe.experts.parameters()}

    def choose(param):
        return ShardPlacementResult(Shard(min(dim, param.ndim - 1)), info) if id(param) in experts else None

    for block in model.blocks:
        engine(block, mesh=dense, shard_placement_fn=choose, **options)
        block.set_gradient_divide_factor(4)
    return engine(model, mesh=dense, **options)


def make(*args, **options):
    torch.manual_seed(3)
    return Net(*args, **options)


PREFERRED = {1: {0: (0, 1), 1: (0, 1)}, 2: dict.fromkeys(range(4), (3,))}  # by step and rank


def loss_of(model, rank, step):
    """The loss of a step with given routing.

    In the second step, the experts of rank 1 get tokens only from the other pair of ranks. In the third step, only one
    expert gets tokens.
    """
    x = torch.randn(6 + rank % 2, DIM, generator=torch.Generator().manual_seed(10 * step + rank))
    for block in model.blocks:
        preference = torch.zeros(block.moe.count)
        preference[list(PREFERRED.get(step, {}).get(rank, ()))] = 2.0
        block.moe.preference.copy_(preference)
    return model(x).square().mean()


def mean_gradients(plain, step):
    """Gradients of the model with all experts, averaged over the batches of all ranks."""
    total = {}
    for rank in range(4):
        plain.zero_grad()
        loss_of(plain, rank, step).backward()
        for name, p in plain.named_parameters():
            total[name] = total.get(name, 0) + (torch.zeros_like(p) if p.grad is None else p.grad) / 4
    return total


def full_names(plain, model, sparse):
    """Pairs of names for each parameter of this rank: here, and in the model with all experts."""
    for name, _ in model.named_parameters():
        own = name
        if ".each." in name:
            head, _, tail = name.partition(".each.")
            index, _, leaf = tail.partition(".")
            own = f"{head}.each.{int(index) + 2 * sparse.get_local_rank('ep')}.{leaf}"
        yield name, own


def check(model, want, names, of):
    for name, whole in names:
        got = of(model.get_parameter(name))
        torch.testing.assert_close(got.full_tensor(), want[whole], msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    ("experts", "count", "dim", "reshard"),
    [(Experts, 4, 0, True), (Experts, 6, 0, False), (Experts, 4, 2, False), (ListedExperts, 4, 0, True)],
    ids=["stacked", "uneven", "along another dim", "listed"],
)
@distributed(world=4)
def test_training_is_exact(rank, world, experts, count, dim, reshard):
    dense, sparse = meshes()
    plain = make(count, experts)
    model = distribute(make(count, experts), sparse["ep"])
    shard(model, fully_shard, dense, sparse, dim, reshard_after_forward=reshard)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (plain, model)]
    model.set_reduce_scatter_unused_params(experts is ListedExperts)  # unused experts have no gradient
    names = list(full_names(plain, model, sparse))
    for step in range(3):
        want = mean_gradients(plain, step)
        loss = loss_of(model, rank, step)
        torch.testing.assert_close(loss, loss_of(plain, rank, step))
        loss.backward()
        check(model, want, names, lambda p: p.grad)
        for name, p in plain.named_parameters():
            p.grad = want[name]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    check(model, dict(plain.named_parameters()), names, lambda p: p)
    assert_at_rest(model)


@distributed(world=4)
def test_memory_does_not_grow_as_routing_changes(rank, world):
    dense, sparse = meshes()
    model = shard(distribute(make(), sparse["ep"]), fully_shard, dense, sparse, reshard_after_forward=True)
    found = []
    for step in range(12):
        loss_of(model, rank, step % 5).backward()
        model.zero_grad()
        stats = cs.stats(model)
        found.append([stats[f"pool/{name}"] for name in ("allocations", "peak_bytes", "live_bytes")])
    assert found[2:] == [found[2]] * 10


def one_step(world, told):
    """Run the second step. Rank 1 runs none of its experts, but rank 3, which has the same experts, does."""
    dense, sparse = meshes()
    model = shard(distribute(make(4, ListedExperts), sparse["ep"]), fully_shard, dense, sparse)
    model.set_reduce_scatter_unused_params(told)
    loss_of(model, world.rank, 1).backward()
    return [p.grad is not None for p in model.blocks[0].moe.experts.parameters()]


def test_ranks_hang_if_one_uses_no_experts_unless_unused_gradients_are_reduced():
    assert testing.spmd(4)(one_step, True) == [[True] * 4] * 4
    with pytest.raises((errors.DeadlockError, errors.CollectiveMismatchError)) as caught:
        testing.spmd(4)(one_step, False)
    assert "reduce_scatter" in str(caught.value)


def shard_experts(model, fully_shard):
    dense, sparse = meshes()
    shard(distribute(model, sparse["ep"]), fully_shard, dense, sparse)


def compiled(rank, world):
    def inputs(rank, step):
        return (torch.randn(6, DIM, generator=torch.Generator().manual_seed(10 * step + rank)),)

    return three_steps(rank, make(moe=SlottedMoE, blocks=1), shard_experts, inputs)


@pytest.mark.matrix
def test_experts_with_a_fixed_number_of_slots_compile_into_one_graph():
    assert_expected_inline(
        graphs_of(compiled, world=4),
        """\
forward GwGwGwmmmmmXwwmmXwwmm, saves 4280 bytes
backward GmmmXwmwGmmmXwwmmmmmmmmmmRRwwRw
""",
    )
