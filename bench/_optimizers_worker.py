"""Muon on sharded matrices, for the ranks and the simulated network of `optimizers.py`. Implementations:

owner      `cs.optim.owned`, optimizer state at the owners
shards     `cs.optim.owned`, sharded optimizer state
gathered   momentum is sharded; every rank gathers all updates (one is prefetched), computes all, and uses its rows
dtensor    `torch.optim.Muon` on DTensors, which communicate in each product
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import _launch
import composable_shard as cs

SIDES = ("owner", "shards", "gathered", "dtensor")
LR, MOMENTUM = 0.02, 0.95
STEPS = 5  # steps of Newton-Schulz
A, B, C = 3.4445, -4.7750, 2.0315
GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # newer or older name


def matrices_of(width: int, layers: int) -> nn.Module:
    """Return the matrices of a decoder: per layer four of attention and three of a gated feed-forward."""
    hidden = 8 * width // 3 // 64 * 64
    block = [(width, width)] * 4 + [(hidden, width)] * 2 + [(width, hidden)]
    return nn.Sequential(
        *[nn.Sequential(*[nn.Linear(columns, rows, bias=False) for rows, columns in block]) for _ in range(layers)]
    )


def orthogonal(update: torch.Tensor) -> torch.Tensor:
    """Orthogonalize an update by Newton-Schulz in bfloat16, as in `torch.optim.Muon`."""
    x = update.bfloat16()
    tall = x.size(0) > x.size(1)
    x = x.T if tall else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x.T if tall else x


def flops(shape: Sequence[int]) -> float:
    """Return the floating-point operations of `orthogonal`."""
    short, long = sorted(shape)
    return STEPS * (4.0 * short * short * long + 2.0 * short**3)


class Gathered(torch.optim.Optimizer):
    """Muon that gathers all updates on every rank.

    Args:
        params: parameters, evenly sharded along dim 0.
        compute: orthogonalizes an update.
    """

    def __init__(self, params: Sequence[torch.Tensor], compute: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(params, {"lr": LR, "momentum": MOMENTUM, "weight_decay": 0.1})
        self._compute = compute
        self.sent_bytes = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        self.sent_bytes = 0
        arriving: tuple[DTensor, torch.Tensor, Any] | None = None
        for param in [*group["params"], None]:
            launched = None if param is None else self._launch(param)
            if arriving is not None:
                self._finish(*arriving)
            arriving = launched

    def _launch(self, param: DTensor) -> tuple[DTensor, torch.Tensor, Any]:
        state, grad = self.state[param], param.grad.to_local()
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        buffer = state["momentum_buffer"]
        buffer.lerp_(grad, 1 - MOMENTUM)
        update = grad.lerp(buffer, MOMENTUM)
        whole = torch.empty(param.shape, dtype=update.dtype, device=update.device)
        group = param.device_mesh.get_group()
        self.sent_bytes += update.nbytes * (group.size() - 1)
        return param, whole, GATHER(whole, update, group=group, async_op=True)

    def _finish(self, param: DTensor, whole: torch.Tensor, handle: Any) -> None:
        handle.wait()
        (group,) = self.param_groups
        update = self._compute(whole)
        mesh, local = param.device_mesh, param.to_local()
        rows = update.chunk(mesh.size())[mesh.get_local_rank()]
        local.mul_(1 - group["lr"] * group["weight_decay"])
        local.add_(rows, alpha=-group["lr"] * max(1, param.shape[0] / param.shape[1]) ** 0.5)


def optimizer_of(side: str, model: nn.Module, bucket_bytes: int) -> torch.optim.Optimizer:
    """Create the optimizer of an implementation for a sharded model."""
    if side == "gathered":
        return Gathered(list(model.parameters()), orthogonal)
    if side == "dtensor":
        return torch.optim.Muon(model.parameters(), lr=LR, momentum=MOMENTUM)
    return cs.optim.owned(
        torch.optim.Muon, model, lr=LR, momentum=MOMENTUM, state=side if side == "shards" else "owner",
        bucket_bytes=bucket_bytes,
    )  # fmt: skip


def with_gradients(width: int, layers: int) -> nn.Module:
    """Build a sharded model whose parameters have gradients."""
    torch.manual_seed(0)
    model = matrices_of(width, layers)
    for layer in model:
        cs.fully_shard(layer)
    cs.fully_shard(model)
    for param in model.parameters():
        param.grad = param.detach().clone()  # the values do not matter
    return model


def seconds_of(step: Callable[[], Any]) -> float:
    """Return the wall time of `step` on the slowest rank in seconds, after a barrier."""
    dist.barrier()
    begin = time.perf_counter()
    step()
    return float(_launch.everyone(torch.tensor([time.perf_counter() - begin])).max())


def main() -> None:
    settings = json.loads(sys.argv[1])
    rank, _ = _launch.join()
    sides = settings["sides"]
    models = {side: with_gradients(settings["width"], settings["layers"]) for side in sides}
    optimizers = {side: optimizer_of(side, models[side], settings["bucket_bytes"]) for side in sides}
    rounds: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(settings["rounds"] + 1):
        for side in [*sides[number % len(sides) :], *sides[: number % len(sides)]]:
            seconds = seconds_of(optimizers[side].step)
            if number:  # the first round creates optimizer state
                rounds[side].append(seconds)
    sent = {side: torch.tensor([getattr(optimizers[side], "sent_bytes", -1)]) for side in sides}
    of_ranks = {side: _launch.everyone(each).flatten().tolist() for side, each in sent.items()}
    whole = {side: [p.full_tensor().detach() for p in models[side].parameters()] for side in sides}
    apart = {
        side: max(float((one - two).abs().max()) for one, two in zip(whole[side], whole[sides[0]], strict=True))
        for side in sides
    }
    if rank == 0:
        _launch.answer(json.dumps({"rounds": rounds, "sent": of_ranks, "apart": apart}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
