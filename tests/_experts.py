"""A transformer block with experts on other ranks. Tokens are sent to them and back by all-to-all."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

DIM, HIDDEN = 8, 12


def exchange(x: Tensor, received: list[int], sent: list[int], group: ProcessGroup) -> Tensor:
    """Send consecutive rows of `x` to the ranks of a group. In backward, gradients are sent back."""
    return wait_tensor(all_to_all_single_autograd(x, received, sent, group))


def local(param: Tensor) -> Tensor:
    return param.to_local() if isinstance(param, DTensor) else param


class Experts(nn.Module):
    """Experts with stacked weights. Rows must be sorted by expert."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, DIM, HIDDEN) / 3)
        self.down = nn.Parameter(torch.randn(count, HIDDEN, DIM) / 3)

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        pairs = zip(rows.split(counts), local(self.up), local(self.down), strict=True)
        return torch.cat([(x @ up).relu() @ down for x, up, down in pairs])


class ListedExperts(nn.Module):
    """Experts as separate modules. Experts without rows do not run and have no gradient."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.each = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(count))

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        pairs = zip(rows.split(counts), self.each, strict=True)
        return torch.cat([expert(x).tanh() if len(x) else x for x, expert in pairs])


class MoE(nn.Module):
    """A mixture of experts: each token goes to its best expert, on any rank.

    Attributes:
        group: the ranks with experts, in order; None if this rank has all experts.
        preference: is added to the scores for choosing an expert.
    """

    def __init__(self, count: int, experts: type[nn.Module]) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, count)
        self.experts = experts(count)
        self.count = count
        self.group: ProcessGroup | None = None
        self.register_buffer("preference", torch.zeros(count))

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The gate value and the expert of each token."""
        gates = self.router(x).softmax(-1)
        chosen = (gates + self.preference).argmax(-1)
        return gates.gather(-1, chosen[:, None]), chosen

    def forward(self, x: Tensor) -> Tensor:
        gates, chosen = self.choose(x)
        order = chosen.argsort(stable=True)
        rows = self._run(x[order], torch.bincount(chosen, minlength=self.count))
        return torch.zeros_like(x).index_copy(0, order, rows) * gates

    def _run(self, rows: Tensor, counts: Tensor) -> Tensor:
        if self.group is None:
            return self.experts(rows, counts.tolist())
        ranks = self.group.size()
        arriving = wait_tensor(all_to_all_single_autograd(counts, None, None, self.group)).view(ranks, -1)
        sent, received = counts.view(ranks, -1).sum(1).tolist(), arriving.sum(1).tolist()
        rows = exchange(rows, received, sent, self.group)
        # Rows arrive sorted by rank and then by expert. Experts need them sorted by expert and then by rank.
        expert = torch.arange(arriving.shape[1]).repeat(ranks).repeat_interleave(arriving.flatten())
        order = expert.argsort(stable=True)
        done = self.experts(rows[order], arriving.sum(0).tolist())
        return exchange(torch.empty_like(done).index_copy(0, order, done), sent, received, self.group)


class SlottedMoE(MoE):
    """A mixture with a slot for each token at each expert, so that no shape depends on data when it is compiled."""

    def forward(self, x: Tensor) -> Tensor:
        gates, chosen = self.choose(x)
        mask = F.one_hot(chosen, self.count).to(x.dtype)  # tokens, experts
        slots = torch.einsum("te,td->etd", mask, x)
        ranks = 1 if self.group is None else self.group.size()
        here = self.count // ranks
        if self.group is not None:
            even = [here] * ranks
            slots = exchange(slots, even, even, self.group)
            slots = slots.view(ranks, here, *x.shape).transpose(0, 1)
        up, down = local(self.experts.up), local(self.experts.down)
        done = torch.bmm(torch.bmm(slots.reshape(here, -1, DIM), up).relu(), down)
        if self.group is not None:
            done = done.view(here, ranks, *x.shape).transpose(0, 1).reshape(self.count, *x.shape)
            done = exchange(done, even, even, self.group)
        return torch.einsum("te,etd->td", mask, done.reshape(self.count, *x.shape)) * gates


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x))[None].chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v)[0])


class Block(nn.Module):
    """A block of attention and experts. Tokens are the rows of a matrix."""

    def __init__(self, count: int, experts: type[nn.Module], moe: type[MoE]) -> None:
        super().__init__()
        self.attention = Attention()
        self.norm = nn.LayerNorm(DIM)
        self.moe = moe(count, experts)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.moe(self.norm(x))


class Net(nn.Module):
    def __init__(
        self, count: int = 4, experts: type[nn.Module] = Experts, moe: type[MoE] = MoE, blocks: int = 2
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(count, experts, moe) for _ in range(blocks))
        self.head = nn.Linear(DIM, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def distribute(model: Net, mesh: DeviceMesh) -> Net:
    """Keep on each rank of a mesh only its experts."""
    for block in model.blocks:
        moe = block.moe
        moe.group = mesh.get_group()
        if isinstance(moe.experts, ListedExperts):
            here = moe.count // mesh.size()
            first = here * mesh.get_local_rank()
            moe.experts.each = moe.experts.each[first : first + here]
            continue
        for name, param in list(moe.experts._parameters.items()):
            whole = nn.Parameter(distribute_tensor(param.detach(), mesh, [Shard(0)]))
            moe.experts._parameters[name] = whole
    return model
