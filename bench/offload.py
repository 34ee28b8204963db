"""Time a step of AdamW with all its state on disk, compared with raw reads and writes of the same bytes.

    python bench/offload.py                                          # 160M parameters, 1.3 GB of state: two minutes
    python bench/offload.py --parameters 8000000 --tensors 8 --memory 16    # a smaller run

In each round, three alternatives take turns:

- `raw`: read every byte of a file of the size of the state and write it back, with direct I/O from aligned memory, and
  as many threads as the optimizer has. No compute.
- `dd`: read the file and write it with dd, with iflag=direct and oflag=direct.
- `step`: the optimizer reads its state, steps, and writes it.

Resident memory is the peak during the steps above the memory before the first step. At the end, an optimizer in memory
runs the same number of steps from the same weights, and parameters must be bitwise identical.
"""

import argparse
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import _process
import _report
import composable_shard as cs

PIECE = 8 << 20
THREADS = 4
MIB = 1 << 20


@dataclass(frozen=True)
class OffloadResult:
    """Times of an alternative in seconds. Ratios, and `gb_per_s` of bytes read and written, are formed by round."""

    side: str
    seconds: _report.Spread
    over_raw: _report.Spread
    over_dd: _report.Spread
    gb_per_s: _report.Spread


@dataclass(frozen=True)
class MemoryResult:
    """Bytes: state on disk, allowed memory, and peak of resident memory above that before the first step."""

    state: int
    allowed: int
    resident: int
    equal_to_the_bit: bool


class RawFile:
    """A file of `nbytes` bytes that is read and written without the page cache."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path, self.nbytes = path, nbytes
        self._descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_DIRECT, 0o600)
        self._memory = [mmap.mmap(-1, PIECE) for _ in range(THREADS)]
        os.posix_fallocate(self._descriptor, 0, nbytes)
        self.pass_over(reads=False)  # reads of unwritten blocks would not use the disk

    def pass_over(self, reads: bool = True) -> None:
        """Read every byte and write it back."""

        def some(index: int) -> None:
            memory = self._memory[index]
            for offset in range(index * PIECE, self.nbytes, THREADS * PIECE):
                view = memoryview(memory)[: min(PIECE, self.nbytes - offset)]
                assert not reads or os.preadv(self._descriptor, [view], offset) == len(view)
                assert os.pwrite(self._descriptor, view, offset) == len(view)

        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(some, range(THREADS)))

    def pass_by_dd(self) -> None:
        """Read the file, then write it, with dd."""
        for operands in (
            [f"if={self.path}", "of=/dev/null", "iflag=direct"],
            ["if=/dev/zero", f"of={self.path}", "oflag=direct", "conv=notrunc"],
        ):
            count = f"count={self.nbytes // PIECE}"
            subprocess.run(["dd", *operands, f"bs={PIECE}", count], check=True, capture_output=True)


def params_of(options: argparse.Namespace) -> list[nn.Parameter]:
    """Create parameters with gradients, with the same values in each call."""
    generator = torch.Generator().manual_seed(0)
    size = options.parameters // options.tensors
    made = [nn.Parameter(torch.randn(size, generator=generator)) for _ in range(options.tensors)]
    for param in made:
        param.grad = torch.randn(size, generator=generator)
    return made


def seconds_of(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def measure(options: argparse.Namespace, folder: Path) -> tuple[list[OffloadResult], MemoryResult, float]:
    """Return the times of all alternatives, memory, and the seconds of a step in memory."""
    params = params_of(options)
    optimizer = torch.optim.AdamW(params, fused=True)
    cs.optim.offload_optimizer(optimizer, cs.DiskOffloadPolicy(folder, memory=options.memory * MIB))
    state = 2 * sum(param.numel() * param.element_size() for param in params) // PIECE * PIECE
    raw = RawFile(folder / "raw", state)
    warm = nn.Parameter(torch.ones(1))
    warm.grad = torch.ones(1)
    torch.optim.AdamW([warm], fused=True).step()  # the first step imports modules, which must not count as memory
    _process.forget_peak()
    before = _process.resident()
    optimizer.step()  # creates the state
    seconds: dict[str, list[float]] = {"raw": [], "dd": [], "step": []}
    for number in range(options.rounds + 1):
        sides = {"raw": raw.pass_over, "dd": raw.pass_by_dd, "step": optimizer.step}
        order = list(sides)[number % 3 :] + list(sides)[: number % 3]
        for side in order:
            took = seconds_of(sides[side])
            if number:  # the first round warms up
                seconds[side].append(took)
    resident = _process.resident("VmHWM") - before
    del raw, sides
    (folder / "raw").unlink()
    others = params_of(options)
    in_memory = torch.optim.AdamW(others, fused=True)
    steps = [seconds_of(in_memory.step) for _ in range(options.rounds + 2)]
    equal = all(map(torch.equal, params, others))
    memory = MemoryResult(state, options.memory * MIB, resident, equal)
    return results_of(seconds, 2 * state), memory, _report.Spread.of(steps[2:]).median


def results_of(seconds: dict[str, list[float]], nbytes: int) -> list[OffloadResult]:
    def over(side: str, other: str) -> _report.Spread:
        return _report.Spread.of([one / two for one, two in zip(seconds[side], seconds[other], strict=True)])

    return [
        OffloadResult(
            side,
            _report.Spread.of(rounds),
            over(side, "raw"),
            over(side, "dd"),
            _report.Spread.of([nbytes / each / 1e9 for each in rounds]),
        )
        for side, rounds in seconds.items()
    ]


def print_table(results: Sequence[OffloadResult], memory: MemoryResult, in_memory: float) -> None:
    rows = [[r.side, str(r.seconds), str(r.over_raw), str(r.over_dd), str(r.gb_per_s)] for r in results]
    _report.table(
        f"{memory.state / 1e9:.2f} GB of AdamW state on disk, read and written in a step",
        ["alternative", "seconds", "/ raw", "/ dd", "GB/s"],
        rows,
        "median [quartiles] of interleaved rounds",
    )
    same = "bitwise identical" if memory.equal_to_the_bit else "NOT bitwise identical"
    print(
        f"peak resident memory: {memory.resident / MIB:,.0f} MiB ({memory.allowed / MIB:,.0f} MiB allowed for state); "
        f"a step in memory takes {in_memory:.3f} s; parameters are {same}"
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=160_000_000, help="total size (default: 160,000,000)")
    parser.add_argument("--tensors", type=int, default=40, help="tensors of equal size (default: 40)")
    parser.add_argument("--memory", type=int, default=256, help="memory for state, in MiB (default: 256)")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds (default: 7)")
    parser.add_argument(
        "--folder", type=Path, default=None, help="folder on the disk to measure (default: the temporary one)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        results, memory, in_memory = measure(options, Path(folder))
    print_table(results, memory, in_memory)
    if options.json:
        settings = {name: value for name, value in vars(options).items() if name not in ("json", "folder")}
        settings["seconds_in_memory"] = in_memory
        _report.write_json(options.json, "offload", settings, [*results, memory])
    return 0


if __name__ == "__main__":
    sys.exit(main())
