"""Learning rates, gradients and replicas that differ between ranks: an error before any rank gathers again."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import composable_shard as cs
from _decoders import Training
from _pool import distributed, more
from composable_shard._faults import replicas, settings
from composable_shard._faults.watch import WATCHER

LIMIT_S = 60.0


def everywhere(world, what):
    found = [None] * world
    dist.all_gather_object(found, what)
    return found


def differ(words, world, do):
    with pytest.raises(cs.errors.RankMismatchError, match=words) as caught:
        do()
    assert len({*everywhere(world, str(caught.value))}) == 1


def other_rate(run):
    run.optimizer.param_groups[0]["lr"] = 0.5


def other_rate_in_a_tensor(run):
    run.optimizer.param_groups[0]["lr"] = torch.tensor(0.5)


def no_gradient(run):
    run.model.blocks[1].attention.q.weight.grad = None


CASES = {
    other_rate: "learning rate 0.001, 30 of 30 gradients, and rank 1 has stepped .*learning rate 0.5, 30 of 30",
    other_rate_in_a_tensor: "learning rate 0.001, .* and rank 1 has stepped .*learning rate 0.5, ",
    no_gradient: "30 of 30 gradients, and rank 1 has stepped .*29 of 30 gradients",
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@distributed(world=2, limit_s=LIMIT_S)
def test_a_step_with_values_of_only_one_rank_is_an_error_on_all_ranks(rank, world, case):
    run = Training(rank, world)
    run.step()
    run.step()
    run.backward()
    if rank:
        case(run)
    run.optimizer.step()
    differ(CASES[case] + ".*Weights may differ between ranks since then", world, run.forward)


@pytest.mark.matrix
@distributed(world=2, limit_s=LIMIT_S)
def test_a_schedule_that_changes_the_rate_in_each_step_soon_asks_only_occasionally(rank, world):
    run = Training(rank, world)
    asked = []
    for at in range(160):
        for _, optimizer in run.sides:
            optimizer.param_groups[0]["lr"] = 1e-4 / (1 + at)
        if at % 20 == 0:
            run.step()
        else:  # the same for the ledger, at lower cost
            run.optimizer.step()
            run.forward()
        asked.append(sum(len(ledger._asked) for ledger in WATCHER.ledgers()))
    assert asked[158] - asked[118] <= 8
    run.optimizer.param_groups[0]["lr"] = 0.1 * (1 + rank)

    def go_on():
        for _ in range(25):
            run.optimizer.step()
            run.forward()

    differ("learning rate 0.[12], ", world, go_on)


@distributed(world=2, limit_s=LIMIT_S)
def test_optimizers_that_step_in_backward_have_separate_credits(rank, world):
    run = Training(rank, world)
    own = {param: torch.optim.SGD([param], lr=0.01) for param in run.model.parameters()}
    for param, optimizer in own.items():

        def step(param, optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()

        param.register_post_accumulate_grad_hook(step)
    asked = []
    for _ in range(6):
        run.backward()
        asked.append(sum(len(ledger._asked) for ledger in WATCHER.ledgers()))
    assert asked[-1] == asked[2]


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        return self.down(self.norm(self.up(x))) * self.scale.mean()


@pytest.mark.parametrize("debug", [False, more(True)])
@distributed(world=2, limit_s=LIMIT_S)
def test_the_rolling_check_finds_a_buffer_changed_by_one_rank_and_skips_statistics(rank, world, debug):
    with pytest.MonkeyPatch.context() as patch:
        if not debug:
            patch.setenv(replicas.PERIOD, "2")
        before = cs.set_debug(debug)
        try:
            model = cs.fully_shard(Normed())
            data = torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))
            for _ in range(20):
                model(data).sum().backward()
            if rank:
                model.scale[1] = 2.0

            def go_on():
                for _ in range(20):
                    model(data).sum().backward()

            differ("holds buffer scale of fingerprint .*broadcast_state", world, go_on)
        finally:
            cs.set_debug(before)


@pytest.mark.parametrize("world", [2, more(4)])
@distributed(world=None, limit_s=LIMIT_S)
def test_the_rolling_check_finds_a_shard_that_differs_between_replicas(rank, world):
    shape = (2, world // 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(replicas.PERIOD, "1")
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        model = cs.fully_shard(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), mesh=mesh)
        data = torch.randn(2, 8, generator=torch.Generator().manual_seed(rank))
        for _ in range(6):
            model(data).sum().backward()
        if rank == shape[1]:
            model[2].weight.data.to_local()[0, 0] += 1.0

        def go_on():
            for _ in range(6):
                model(data).sum().backward()

        differ("holds parameter 2.weight of fingerprint", world, go_on)


@distributed(world=1)
def test_a_period_that_is_not_a_number_is_refused(rank, world):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(replicas.PERIOD, "often")
        with pytest.raises(
            cs.errors.ShardConfigValueError, match=r"COMPOSABLE_SHARD_CHECK_REPLICAS=often: expected the number"
        ):
            cs.fully_shard(nn.Linear(2, 2))(torch.ones(1, 2))


def test_a_digest_of_learning_rates_is_the_same_in_every_process():
    rates = ("on a device", 0.1, "none", 0.2, 0.3)
    assert settings._in_words(rates, (True, False)) == (
        ", learning rate on a device, 0.1, none, 0.2, ... (5 in all, bcdec377), 1 of 2 gradients (18e6be59)"
    )
