"""Parts of a training loop: optimizer, learning rate, progress, held-out loss and text generation."""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from _gpt import spaced_windows

EVALUATION_BATCH = 8  # windows per rank


def adamw(model: nn.Module, rate: float = 0.0) -> torch.optim.AdamW:
    """Return AdamW over the trainable parameters, with weight decay only on matrices. Shard the model first."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)


def learning_rate(progress: float, peak: float, warm_up: float = 0.05) -> float:
    """Return the learning rate: linear warm-up to `peak`, then cosine decay to a fiftieth of it."""
    if progress < warm_up:
        return peak * (0.02 + 0.98 * progress / warm_up)
    fall = (progress - warm_up) / max(1 - warm_up, 1e-9)
    return peak * (0.02 + 0.98 * (1 + math.cos(math.pi * min(fall, 1.0))) / 2)


def how_far(
    steps: int, seconds: float, ahead: float, *, most_steps: int | None, minutes: float | None
) -> tuple[float, bool]:
    """Return the finished part of the training (0 to 1), and whether to stop now.

    Args:
        steps: steps so far.
        seconds: training time so far.
        ahead: estimated training time after one more step, in seconds.
        most_steps: steps of the whole training; None: limit it by `minutes`.
        minutes: duration of the whole training, used if `most_steps` is None.
    """
    if most_steps is not None:
        return min(steps / most_steps, 1.0), steps >= most_steps
    limit = 60 * minutes
    return (1.0, True) if ahead > limit else (seconds / limit, False)


def settle(
    loss: Tensor | float, progress: float, vote: bool, seconds: float, device: torch.device | str = "cpu"
) -> tuple[float, float, bool, float]:
    """Return the mean loss, rank 0's progress and time, and whether any rank votes to stop, in one small all-reduce.

    Ranks must agree on when to stop: clocks differ, and if one rank stopped a step earlier, the others would wait for
    it.
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
    """Return the mean loss of all ranks on `count` windows of `length` tokens, rounded to full batches."""
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
    """Return `prompt` followed by `count` sampled tokens. All ranks must call this, because parameters are sharded."""
    generator = torch.Generator().manual_seed(seed)
    written = torch.tensor(prompt, device=device)
    for _ in range(count):
        logits = logits_of(written[None, -context:])[0, -1]
        chances = (logits.float().cpu() / 0.8).softmax(dim=0)  # temperature 0.8
        following = torch.multinomial(chances, 1, generator=generator)
        written = torch.cat([written, following.to(device)])
    return written.tolist()
