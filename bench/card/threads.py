"""Backward in another thread than forward, as autograd has it on a card: are the losses those of one thread?

    python bench/card/threads.py

On a card, autograd runs the nodes of backward in a thread of the device. Here the whole of `backward` is called in a
thread of its own, which is stricter: autograd copies the state of the thread that calls it, and this one has none. The
world is that of `race.py`, and losses are compared to the bit.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from card import race, scenarios

WAYS = ("plain", "checkpoint", "root in a checkpoint", "reentrant checkpoint", "no sync", "optimizer in backward")
STEPS = 6


def in_thread(call: Callable[[], object]) -> None:
    """Calls it in a thread of its own, waits, and raises its error here."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def forward(model: nn.Sequential, x: Tensor, way: str) -> Tensor:
    if way == "checkpoint":
        for block in model:
            x = checkpoint(block, x, use_reentrant=False)
        return x
    if way in ("root in a checkpoint", "reentrant checkpoint"):
        return checkpoint(model, x, use_reentrant=way == "reentrant checkpoint")
    return model(x)


def step_now(parameter: nn.Parameter) -> None:
    """SGD of one parameter, as soon as its gradient is there."""
    parameter._local_tensor.sub_(parameter.grad._local_tensor, alpha=0.1)
    parameter.grad = None


def losses(way: str, call: Callable[[Callable[[], object]], object]) -> list[float]:
    """Of some steps, whose backward is called by `call`."""
    found = []
    with race.simulated(scenarios.WORLD), race.transport("direct"):
        model = scenarios.build(scenarios.Scenario())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if way == "optimizer in backward":
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(step_now)
        for step in range(STEPS):
            x = torch.randn(8, scenarios.WIDTH, generator=torch.Generator().manual_seed(step)).requires_grad_()
            is_last = way != "no sync" or step % 2 == 1
            model.set_requires_gradient_sync(is_last)
            loss = forward(model, x, way).square().mean()
            call(loss.backward)
            found.append(loss.item())
            if is_last and way != "optimizer in backward":
                optimizer.step()
                optimizer.zero_grad()
    return found


def main() -> int:
    torch.set_num_threads(1)
    apart = []
    for way in WAYS:
        one, two = losses(way, lambda backward: backward()), losses(way, in_thread)
        if one != two:
            apart.append(way)
        print(f"{way}: {'same' if one == two else f'DIFFER, {one} and in a thread {two}'}", flush=True)
    return int(bool(apart))


if __name__ == "__main__":
    sys.exit(main())
