"""The matrix of the compiled path, continued: types of modules that are hard to compile."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn as nn
from expecttest import assert_expected_inline
from torch.distributed.tensor import DTensor

import composable_shard as cs
from _compiling import graphs_of, three_steps
from _engines import fully_shard
from _pool import distributed, more
from composable_shard.report import watch_graphs

# ---- recurrent modules


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.first, self.rnn, self.head = nn.Linear(3, 4), kind(4, 6, batch_first=True), nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.rnn(self.first(x))[0])


def shard_children(model, fully_shard, **options):
    for child in model.children():
        fully_shard(child, **options)
    fully_shard(model, **options)


def sequences(rank, step):
    return torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(10 * step + rank))


@pytest.mark.parametrize("kind", [nn.LSTM, more(nn.GRU), more(nn.RNN)])
@distributed(world=2)
def test_recurrent_modules_are_part_of_the_graph_if_dynamo_allows_them(rank, world, kind):
    """A graph computes them step by step, unlike eager. So the unsharded reference is compiled, too."""
    torch.manual_seed(3)
    plain = Recurrent(kind)
    model = copy.deepcopy(plain)
    shard_children(model, fully_shard, reshard_after_forward=True)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(allow_rnn=True), watch_graphs() as found:  # by default Dynamo skips them
        runs = [torch.compile(plain, backend="aot_eager", fullgraph=True), cs.compile(model, backend="aot_eager")]
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
        for step in range(3):
            for run in runs:
                run(sequences(0, step)).square().mean().backward()
            for (name, want), (_, got) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
                assert torch.equal(got.grad.full_tensor(), want.grad), name
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert [report.sequence.replace("m", "") for report in found] == ["GwGwGw", "GwGRwwGRwwRw"]
        eager = model(sequences(0, 9))  # afterwards, with its flat weights restored
    torch.testing.assert_close(eager, plain(sequences(0, 9)))
    assert all(isinstance(weight, DTensor) for weight in model.rnn._flat_weights)


# ---- mixtures of experts


class Mixture(nn.Module):
    """Experts as one stacked weight; the router's choice depends on data and changes no control flow."""

    def __init__(self, experts=4):
        super().__init__()
        self.router = nn.Linear(8, experts)
        self.up = nn.Parameter(torch.randn(experts, 8, 16) / 4)
        self.down = nn.Parameter(torch.randn(experts, 16, 8) / 4)

    def forward(self, x):
        gates = self.router(x).softmax(-1)
        weight, chosen = gates.max(-1)
        mask = nn.functional.one_hot(chosen, gates.shape[-1]).to(x.dtype)
        hidden = torch.bmm(x.expand(len(self.up), *x.shape), self.up).relu()
        return x + (torch.bmm(hidden, self.down) * (mask * weight[:, None]).T[..., None]).sum(0)


def batches(rank, step):
    return (torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * step + rank)),)


def mixture(rank, world):
    return three_steps(rank, nn.Sequential(Mixture(), Mixture()), shard_children, batches)


def test_data_dependent_experts_are_in_one_graph():
    assert_expected_inline(
        graphs_of(mixture),
        """\
forward GwGmmmwmmm, saves 5016 bytes
backward GmwGmmmmmRmwmmmwRw
""",
    )
