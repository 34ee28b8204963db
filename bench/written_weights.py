"""Measure the cost of comparing the values of unsharded weights if forward writes to them in each step.

    python bench/written_weights.py                     # two minutes
    python bench/written_weights.py --width 256 --rounds 5

The model is a feed-forward layer of experts. Its two frozen weights, (experts, width, 2 width) and (experts, 2 width,
width), are parametrized during each forward, like with PEFT's `target_parameters`. torch's `register_parametrization`
copies the weight onto itself, which increases its version counter. One process, one thread, float32, forward and
backward. Three engines take turns:

- `judged`: compares the values (`composable_shard/_group/edits.py`)
- `accepted`: the same without the comparison
- `plain`: the unsharded model
"""

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrize

import _report
import composable_shard as cs
from composable_shard._engine import actions
from composable_shard._group.bucket import GatherBucket

ENGINES = ("plain", "accepted", "judged")


@dataclass(frozen=True)
class WrittenWeightsResult:
    """Milliseconds of forward and backward. `ratio` is over `accepted`, formed within each round."""

    engine: str
    step: _report.Spread
    ratio: _report.Spread


class Added(nn.Module):
    """A parametrization that adds a low-rank update."""

    def __init__(self, left: torch.Tensor, right: torch.Tensor) -> None:
        super().__init__()
        self.update = left @ right

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.update


class Experts(nn.Module):
    """A layer of experts with adapters of rank 8. Every expert gets the same number of tokens."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) / width, requires_grad=False)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) / width, requires_grad=False)
        self.left = nn.ParameterList(torch.randn(experts, w.shape[1], 8) / width for w in (self.up, self.down))
        self.right = nn.ParameterList(torch.zeros(experts, 8, w.shape[2]) for w in (self.up, self.down))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        names = ("up", "down")
        for name, left, right in zip(names, self.left, self.right, strict=True):
            parametrize.register_parametrization(self, name, Added(left, right))
        try:
            with parametrize.cached():
                return x + torch.relu(x @ self.up) @ self.down
        finally:
            for name in names:
                parametrize.remove_parametrizations(self, name, leave_parametrized=False)


def accepting() -> mock._patch:
    """Return a patch that skips the comparison."""

    def accept(buckets: list[GatherBucket], _gather_again: Callable[[], None]) -> list[str]:
        for bucket in buckets:
            bucket.accept()
        return []

    return mock.patch.object(actions, "changed", accept)


def measure(width: int, experts: int, tokens: int, rounds: int, steps: int) -> list[WrittenWeightsResult]:
    """Measure all engines in interleaved rounds."""
    torch.set_num_threads(1)
    models = {}
    for engine in ENGINES:
        torch.manual_seed(0)
        models[engine] = nn.Sequential(*(Experts(experts, width) for _ in range(2)))
        if engine != "plain":
            for layer in models[engine]:
                cs.fully_shard(layer)
            cs.fully_shard(models[engine])
    x = torch.randn(experts, tokens // experts, width)
    times: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    losses = {}
    for at in range(rounds + 1):
        for engine in random.sample(ENGINES, len(ENGINES)):
            with accepting() if engine == "accepted" else nullcontext():
                begin = time.perf_counter()
                for _ in range(steps):
                    loss = models[engine](x).square().mean()
                    loss.backward()
                if at:  # the first round warms up
                    times[engine].append((time.perf_counter() - begin) * 1e3 / steps)
            losses[engine] = loss.item()
    assert len({*losses.values()}) == 1, losses
    ratios = {e: [a / b for a, b in zip(times[e], times["accepted"], strict=True)] for e in ENGINES}
    return [WrittenWeightsResult(e, _report.Spread.of(times[e]), _report.Spread.of(ratios[e])) for e in ENGINES]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512, help="(default: %(default)s)")
    parser.add_argument("--experts", type=int, default=8, help="number of experts (default: %(default)s)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 4096], help="tokens (default: 512 4096)")
    parser.add_argument("--rounds", type=int, default=10, help="interleaved rounds (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=2, help="steps per round (default: %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(str(Path(folder, "store")), 1), rank=0, world_size=1)
        for tokens in options.tokens:
            print(f"{options.experts} experts, width {options.width}, {tokens} tokens")
            for result in measure(options.width, options.experts, tokens, options.rounds, options.steps):
                step, ratio = (f"{s.median:.3f} [{s.low:.3f}, {s.high:.3f}]" for s in (result.step, result.ratio))
                print(f"  {result.engine:9} {step} ms, over accepted {ratio}")
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
