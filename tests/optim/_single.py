"""An optimizer of one process with all matrices, compared with one that steps them on their owners."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from _blocks import Transformer, next_token_loss, token_batch
from composable_shard import fully_shard


class Mixture(nn.Module):
    """All experts see all tokens; their weights are stacks of matrices."""

    def __init__(self, experts=3, dim=16, hidden=8):
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, dim, hidden) / 4)
        self.down = nn.Parameter(torch.randn(experts, hidden, dim) / 4)

    def forward(self, x):
        return x + torch.einsum("bteh,ehd->btd", torch.einsum("btd,edh->bteh", x, self.up).relu(), self.down)


class Net(Transformer):
    """A decoder whose blocks have a fused projection and a mixture of experts after the attention."""

    def __init__(self, layers=1, **sizes):
        super().__init__(layers=layers, **sizes)
        for block in self.blocks:
            block.fused = nn.Linear(16, 24, bias=False)
            block.narrow = nn.Linear(24, 16)
            block.experts = Mixture()
            block.attention_norm.register_forward_hook(self._around(block))

    @staticmethod
    def _around(block):
        return lambda module, inputs, output: block.experts(output + block.narrow(block.fused(output).tanh()))


def pair(shard, net=Net, seed=0, dtype=torch.float32):
    """An unsharded net, and a sharded one with equal values."""
    torch.manual_seed(seed)
    plain, model = net().to(dtype), net().to(dtype)
    model.load_state_dict(plain.state_dict())
    shard(model)
    return plain, model


def sharded(model, **options):
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)


def matrices(model, fewest=2):
    """Named parameters with two or more dimensions."""
    return [(name, param) for name, param in model.named_parameters() if param.ndim >= fewest]


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Single:
    """An optimizer of one process, for which each matrix of a stack and each block of rows is a separate parameter.

    Args:
        kind, options: class and options of the optimizer.
        params: parameters by name.
        rows: number of rows of each block, by suffix of the parameter's name.
    """

    def __init__(self, kind, params, rows=None, **options):
        self.params = params
        self.parts = [(param, index) for name, param in params for index in self._indices(name, param, rows or {})]
        self.leaves = [nn.Parameter(param.detach()[index].clone()) for param, index in self.parts]
        self.inner = kind(self.leaves, **options)

    @staticmethod
    def _indices(name, param, rows):
        step = next((size for end, size in rows.items() if name.endswith(end)), None)
        if param.ndim == 3:
            return list(range(len(param)))
        return [...] if step is None else [slice(begin, begin + step) for begin in range(0, len(param), step)]

    @torch.no_grad()
    def step(self, gradients):
        """Step with the given gradients by name. None for no gradient."""
        by_param = {param: gradients[name] for name, param in self.params}
        for (param, index), leaf in zip(self.parts, self.leaves, strict=True):
            leaf.copy_(param[index])
            leaf.grad = None if by_param[param] is None else by_param[param][index].clone()
        self.inner.step()
        for (param, index), leaf in zip(self.parts, self.leaves, strict=True):
            param[index] = leaf


def gradients_of(model):
    return {name: None if p.grad is None else whole(p.grad).clone() for name, p in model.named_parameters()}


def backward(model, rank, step):
    next_token_loss(model, *token_batch(rank, step)).backward()


def assert_equal(model, plain):
    for (name, ours), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(ours), other, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")


def check_steps(model, optimizer, single, plain, rank, steps=2, first=0):
    """Step both optimizers with the gradients of the sharded model, and check that weights are bitwise identical."""
    for step in range(first, first + steps):
        backward(model, rank, step)
        gradients = gradients_of(model)
        optimizer.step()
        optimizer.zero_grad()
        single.step(gradients)
        assert_equal(model, plain)


class Shampoo(torch.optim.Optimizer):
    """Preconditions matrices from the left and right (Gupta et al., 2018). Its state has several types and shapes."""

    def __init__(self, params, lr=0.1, eps=1e-4):
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step(param, self.state[param], group["lr"], group["eps"])

    @staticmethod
    def _step(param, state, lr, eps):
        if not state:
            state["step"] = 0
            state["count"] = torch.tensor(0.0)
            state["sides"] = [eps * torch.eye(size) for size in param.shape]
            state["sum"] = torch.zeros_like(param)
        left, right = state["sides"]
        left += param.grad @ param.grad.T
        right += param.grad.T @ param.grad
        state["step"] += 1
        state["count"] += 1
        state["sum"] += param.grad
        scale = (1 + left.diagonal().sqrt()).outer(1 + right.diagonal().sqrt()) * state["step"]
        param -= lr * state["sum"] / scale
