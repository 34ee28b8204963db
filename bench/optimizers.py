"""Time the step of Muon, which needs full matrices: computed by owners, or with all updates gathered on every rank.

    python bench/optimizers.py
    python bench/optimizers.py --world 2,4 --width 128 --layers 4 --rounds 6 --fabric 8,16,32,64

- On gloo ranks of this machine: the implementations of `_optimizers_worker.py` take turns, with the same matrices and
  gradients.
- On a simulated network (`testing.fabric`, 20 us and 25 GB/s per rank): rank 0, which owns the most parameters, runs
  the step of a bfloat16 model of `--fabric-width` and `--fabric-layers`. Matrix products take the time of a GPU with
  200 TFLOP/s. These times are exact.

Bytes are those that a rank sends in a step, maximum over the ranks.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import _launch
import _optimizers_worker as worker
import _report
import composable_shard as cs
from composable_shard import testing

SCRIPT = Path(worker.__file__)
REFERENCE = "gathered"
LATENCY_S, BANDWIDTH, FLOPS = 20e-6, 25e9, 200e12
ON_FABRIC = ("owner", "shards", "gathered")


@dataclass(frozen=True)
class OptimizerResult:
    """One implementation in one world.

    Attributes:
        step_ms: step time in milliseconds.
        over_gathered: ratio to `gathered`, formed within each round.
        sent_mb: MB that a rank sends in a step, maximum over the ranks; None if not known.
        apart: on gloo, largest difference of a weight to the first implementation's after all steps.
        exposed_ms: on the simulated network, the time in which nothing is computed.
    """

    network: str
    world: int
    side: str
    step_ms: _report.Spread
    over_gathered: _report.Spread
    sent_mb: float | None
    apart: float | None = None
    exposed_ms: float | None = None


def on_gloo(world: int, options: argparse.Namespace) -> list[OptimizerResult]:
    settings = {
        "sides": options.sides, "width": options.width, "layers": options.layers, "rounds": options.rounds,
        "bucket_bytes": options.bucket_mb << 20,
    }  # fmt: skip
    answer = _launch.launch(SCRIPT, json.dumps(settings), world=world, timeout=options.timeout, tuned=False)
    made: dict[str, Any] = json.loads(answer)
    results = []
    for side in options.sides:
        rounds, reference = made["rounds"][side], made["rounds"][REFERENCE]
        ratios = [one / two for one, two in zip(rounds, reference, strict=True)]
        sent = max(made["sent"][side])
        results.append(
            OptimizerResult(
                "gloo",
                world,
                side,
                _report.Spread.of([1e3 * each for each in rounds]),
                _report.Spread.of(ratios),
                None if sent < 0 else sent / 1e6,
                made["apart"][side],
            )
        )
    return results


class Modelled(torch.optim.Optimizer):
    """Muon with simulated matrix products."""

    def __init__(self, params: Any, sim: testing.Fabric | None = None) -> None:
        super().__init__(params, {"lr": worker.LR})
        self._sim = sim

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                state = self.state[param]
                state.setdefault("momentum_buffer", torch.zeros_like(param))
                assert self._sim is not None
                self._sim.compute(worker.flops(param.shape) / FLOPS)


def on_fabric(world: int, options: argparse.Namespace) -> list[OptimizerResult]:
    times: dict[str, tuple[float, float, float]] = {}
    for side in ON_FABRIC:
        with testing.fabric(world, latency_s=LATENCY_S, bandwidth_Bps=BANDWIDTH, clock="virtual") as sim:
            times[side] = _modelled(side, sim, options)
    return [
        OptimizerResult(
            "fabric",
            world,
            side,
            _report.Spread.of([1e3 * seconds]),
            _report.Spread.of([seconds / times[REFERENCE][0]]),
            sent / 1e6,
            exposed_ms=1e3 * exposed,
        )
        for side, (seconds, exposed, sent) in times.items()
    ]


def _modelled(side: str, sim: testing.Fabric, options: argparse.Namespace) -> tuple[float, float, float]:
    """Return step time and exposed communication in seconds, and the bytes that this rank sends."""
    torch.manual_seed(0)
    model = worker.matrices_of(options.fabric_width, options.fabric_layers).to(torch.bfloat16)
    cs.fully_shard(model)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)

    def computed(update: torch.Tensor) -> torch.Tensor:
        sim.compute(worker.flops(update.shape) / FLOPS)
        return update

    optimizer: Any
    if side == REFERENCE:
        optimizer = worker.Gathered(list(model.parameters()), computed)
    else:
        bucket_bytes = options.bucket_mb << 20
        optimizer = cs.optim.owned(Modelled, model, state=side, bucket_bytes=bucket_bytes, sim=sim)
    optimizer.step()
    sim.reset()
    optimizer.step()
    return sim.now(), sim.exposed_s, optimizer.sent_bytes


def print_table(results: Sequence[OptimizerResult], title: str) -> None:
    columns = ["network, world", "implementation", "step, ms", "/ gathered", "sent, MB", "exposed, ms", "difference"]
    rows = []
    for each in results:
        exposed = "" if each.exposed_ms is None else f"{each.exposed_ms:.3f}"
        sent = "" if each.sent_mb is None else f"{each.sent_mb:.2f}"
        apart = "" if each.apart is None else f"{each.apart:.1e}"
        rows.append([f"{each.network} {each.world}", each.side, str(each.step_ms), str(each.over_gathered), sent,
                     exposed, apart])  # fmt: skip
    caption = "median [quartiles]; implementations take turns; sent: maximum over the ranks"
    _report.table(title, columns, rows, caption)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=_report.integers, default=[2, 4], help="gloo world sizes (default: 2,4)")
    parser.add_argument("--fabric", type=_report.integers, default=[8, 16, 32, 64],
                        help="simulated world sizes (default: 8,16,32,64)")  # fmt: skip
    parser.add_argument("--sides", type=_report.names(worker.SIDES), default=list(worker.SIDES),
                        help=f"implementations, including {REFERENCE} (default: all)")  # fmt: skip
    parser.add_argument("--width", type=int, default=128, help="gloo: width of the model (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="gloo: layers (default: %(default)s)")
    parser.add_argument("--fabric-width", type=int, default=1024, help="simulated: width (default: %(default)s)")
    parser.add_argument("--fabric-layers", type=int, default=24, help="simulated: layers (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=6, help="steps per implementation (default: %(default)s)")
    parser.add_argument("--bucket-mb", type=int, default=1, help="bucket size of owners, in MiB (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=600.0, help="time limit per world (default: %(default)s s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    results = [result for world in options.world for result in on_gloo(world, options)]
    results += [result for world in options.fabric for result in on_fabric(world, options)]
    print_table(results, f"A step of Muon: {options.layers} layers of {options.width} on gloo, "
                f"{options.fabric_layers} of {options.fabric_width} on a simulated network")  # fmt: skip
    _report.save(options, "optimizers", results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
