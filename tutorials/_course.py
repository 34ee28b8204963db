"""What any training needs beside its step: how far it is, the learning rate, the held-out loss, and text to look at."""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from _gpt import spaced_windows

EVALUATION_BATCH = 8  # windows a rank


def adamw(model: nn.Module, rate: float = 0.0) -> torch.optim.AdamW:
    """AdamW over what trains of a model, with weight decay on matrices alone; call it when the model is sharded."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)


def learning_rate(progress: float, peak: float, warm_up: float = 0.05) -> float:
    """A straight line up to `peak`, then half a cosine down to a fiftieth of it."""
    if progress < warm_up:
        return peak * (0.02 + 0.98 * progress / warm_up)
    fall = (progress - warm_up) / max(1 - warm_up, 1e-9)
    return peak * (0.02 + 0.98 * (1 + math.cos(math.pi * min(fall, 1.0))) / 2)


def how_far(
    steps: int, seconds: float, ahead: float, *, most_steps: int | None, minutes: float | None
) -> tuple[float, bool]:
    """The share of a training of `most_steps`, or else of `minutes`, that is over, and whether to stop here.

    `steps` are done, in `seconds`; one more would end at `ahead`.
    """
    if most_steps is not None:
        return min(steps / most_steps, 1.0), steps >= most_steps
    limit = 60 * minutes
    return (1.0, True) if ahead > limit else (seconds / limit, False)


def settle(
    loss: Tensor | float, progress: float, vote: bool, seconds: float, device: torch.device | str = "cpu"
) -> tuple[float, float, bool, float]:
    """The mean loss, rank 0's clock, and whether any rank wants to stop: one small all-reduce.

    Ranks must never decide such things alone: clocks differ, and a rank that stops a step earlier
    leaves the others waiting.
    """
    first = dist.get_rank() == 0
    facts = torch.tensor(
        [0.0, progress if first else 0.0, float(vote), seconds if first else 0.0],
        dtype=torch.float64,
        device=device,
    )
    facts[0] = loss / dist.get_world_size()
    dist.all_reduce(facts)
    mean_loss, progress, votes, seconds = facts.tolist()
    return mean_loss, progress, votes > 0, seconds


@torch.no_grad()
def held_out_loss(
    loss_of: Callable[[Tensor], Tensor], text: Tensor, count: int, length: int, device: torch.device
) -> float:
    """The mean loss on `count` windows of `length` tokens, rounded to full batches, of all ranks together."""
    rank, world = dist.get_rank(), dist.get_world_size()
    batches = max(1, count // (world * EVALUATION_BATCH))
    windows = spaced_windows(text, batches * world * EVALUATION_BATCH, length)
    total = torch.zeros((), device=device)
    for batch in windows[rank::world].to(device).chunk(batches):
        total += loss_of(batch)
    dist.all_reduce(total)
    return total.item() / (batches * world)


@torch.no_grad()
def continued(
    logits_of: Callable[[Tensor], Tensor], prompt: list[int], count: int, context: int, seed: int, device: torch.device
) -> list[int]:
    """`prompt`, and `count` tokens that a model writes after it; every rank takes part, for each has a part of it."""
    generator = torch.Generator().manual_seed(seed)
    written = torch.tensor(prompt, device=device)
    for _ in range(count):
        logits = logits_of(written[None, -context:])[0, -1]
        chances = (logits.float().cpu() / 0.8).softmax(dim=0)  # a little bolder than the model is
        following = torch.multinomial(chances, 1, generator=generator)
        written = torch.cat([written, following.to(device)])
    return written.tolist()
