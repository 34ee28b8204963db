"""Compare a sharded model in eager mode with its compiled copy, step by step, and describe the graphs as short text.

A case is a function that runs on every rank and returns the text of its graphs. `graphs_of` runs it and returns the
text, which must be the same on all ranks.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

import composable_shard as cs
from _engines import fully_shard
from _models import Stack
from _pool import POOL
from composable_shard._torch.core import GRAPHS_GIVE_NONE
from composable_shard.report import watch_graphs

LIMIT_S = 150.0


def even(blocks: int = 2) -> nn.Module:
    """A model whose sizes are divisible by 2 and 4."""
    return Stack(blocks, dim=8, hidden=16, out=4)


def graphs_of(body: Callable[..., str], world: int = 2, **kwargs: Any) -> str:
    """Run `body(rank, world, **kwargs)` on every rank. Returns the text, which must be the same on all ranks."""
    texts = POOL.run(f"{body.__module__}:{body.__qualname__}", world, kwargs, LIMIT_S)
    assert len(set(texts)) == 1, f"ranks have different graphs: {texts}"
    return texts[0]


def make_twins(model: nn.Module, shard: Callable[..., Any], **options: Any) -> tuple[nn.Module, nn.Module]:
    """Create two equal sharded models."""
    torch.manual_seed(3)
    for param in model.parameters():
        nn.init.normal_(param, std=0.3) if param.is_floating_point() else None
    other = copy.deepcopy(model)
    for each in (model, other):
        shard(each, fully_shard, **options)
    return model, other


_way, _tolerance = "aot_eager", 0.0


@contextlib.contextmanager
def under_inductor(tolerance: float) -> Iterator[None]:
    """Use Inductor instead of aot_eager. Inductor fuses operators, so values only need to be close."""
    global _way, _tolerance
    _way, _tolerance = "inductor", tolerance
    try:
        with (
            torch._functorch.config.patch(enable_autograd_cache=False),
            torch._inductor.config.patch(fx_graph_cache=False),
        ):
            yield
    finally:
        _way, _tolerance = "aot_eager", 0.0


def same(eager: torch.Tensor, compiled: torch.Tensor) -> bool:
    """Whether two tensors are bitwise identical, or close under Inductor."""
    if _way == "aot_eager":
        return torch.equal(eager, compiled)
    return torch.allclose(eager, compiled, rtol=_tolerance, atol=_tolerance / 10)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def same_gradients(eager: nn.Module, model: nn.Module, when: str = "") -> None:
    """Check that gradients are bitwise identical or None for both models, and that they are DTensors."""
    for name, param in eager.named_parameters():
        twin = model.get_parameter(name)
        assert type(twin) is type(param), name
        if not GRAPHS_GIVE_NONE and param.grad is None and twin.grad is not None:
            assert not local(twin.grad).any(), f"{name} {when}"
            continue
        assert (param.grad is None) == (twin.grad is None), f"{name} {when}: {param.grad} and {twin.grad}"
        if param.grad is not None:
            assert type(param.grad) is type(twin.grad), name
            assert param.grad.dtype == twin.grad.dtype, name
            assert same(local(param.grad), local(twin.grad)), f"gradient of {name} {when}"


def same_values(eager: nn.Module, model: nn.Module) -> None:
    """Check that parameters and buffers are bitwise identical."""
    for name, value in eager.state_dict().items():
        assert same(local(value), local(model.state_dict()[name])), name


class Sides:
    """An eager model and an equal compiled one, which are trained together."""

    def __init__(self, eager: nn.Module, model: nn.Module, backend: str = "aot_eager", **compile_options: Any) -> None:
        torch._dynamo.reset()
        self.eager, self.model = eager, model
        self.run = cs.compile(model, backend=backend, **compile_options)
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (eager, model)]

    @property
    def both(self) -> tuple[nn.Module, nn.Module]:
        return self.eager, self.run

    def train(self, loss_of: Callable[[nn.Module, int], torch.Tensor], steps: int = 3) -> None:
        for step in range(steps):
            losses = [loss_of(each, step) for each in self.both]
            assert same(*losses), f"loss of step {step}: {losses}"
            for loss in losses:
                loss.backward()
            same_gradients(self.eager, self.model, f"in step {step}")
            self.update()

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        same_values(self.eager, self.model)


def text_of(reports: Any) -> str:
    """One line per graph. That of a forward graph has the bytes that it saves for backward."""
    lines = []
    for report in reports:
        saves = f", saves {report.saved} bytes" if report.direction == "forward" else ""
        lines.append(f"{report.direction} {report.sequence or '-'}{saves}\n")
    return "".join(lines)


def three_steps(
    rank: int,
    model: nn.Module,
    shard: Callable[..., Any],
    inputs: Callable[[int, int], Any],
    *,
    loss_of: Callable[[nn.Module, int], torch.Tensor] | None = None,
    before: Callable[[nn.Module], None] | None = None,
    steps: int = 3,
    **options: Any,
) -> str:
    """Train an eager and a compiled model for some steps. Returns the text of all compiled graphs."""
    eager, twin = make_twins(model, shard, **options)
    for each in (eager, twin):
        if before is not None:
            before(each)
    sides = Sides(eager, twin, _way)
    with watch_graphs() as found:
        sides.train(loss_of or (lambda each, step: each(*inputs(rank, step)).float().square().mean()), steps)
    return text_of(found)


def quiet(body: Callable[[], Any]) -> Any:
    """Call `body` with warnings ignored."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return body()
