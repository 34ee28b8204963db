"""List the source lines that hold memory at the peak of a step, for cases of `decoders.py`, ours and FSDP2.

    python bench/card/decoder_peaks.py                           # the cases in which FSDP2's peak was lower
    python bench/card/decoder_peaks.py --cases hsdp --width 1024
    python bench/card/decoder_peaks.py --keep FOLDER             # writes each history, for pytorch.org/memory_viz

Two NCCL ranks share the GPU, or have one GPU each. Every case trains four steps and records the fifth: its peak above
the memory between steps, and the source lines whose allocations are live at the peak. Figures are those of rank 0.
Without a GPU the ranks use gloo, peaks are 0, and only losses are compared. The exit status is 1 if a case fails, or if
losses differ by more than the case's tolerance.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
import tempfile
import traceback
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import _memory_history
import _report
import decoders

ENGINES = ("ours", "fsdp2")
RESULTS_FILE = "DECODER_PEAKS_FILE"  # environment variable of the ranks: the file that rank 0 writes
MIB = 1 << 20
START_S = 20  # part of the limit for imports and tables of this process


@dataclass(frozen=True)
class PeakResult:
    """Peaks of a case, in bytes, by engine.

    Attributes:
        ratio: our peak over FSDP2's; None without a GPU.
        loss_difference: largest relative difference between the engines; None if a loss is not finite.
        error: the error if the case failed. There are no figures then.
    """

    case: str
    width: int
    peaks: dict[str, _memory_history.Peak]
    ratio: float | None
    loss_difference: float | None
    error: str | None = None


def measure_case(name: str, keep: Path | None) -> PeakResult:
    """Run one case with each engine in turn. Called on all ranks."""
    case = decoders.CASES[name]
    mesh = init_device_mesh(decoders.DEVICE.type, case.mesh, mesh_dim_names=("replicate", "shard")[-len(case.mesh) :])
    os.environ["COMPOSABLE_SHARD_TRANSPORT"] = case.transport
    peaks: dict[str, _memory_history.Peak] = {}
    losses: dict[str, list[float]] = {}
    for engine in ENGINES:
        side = decoders.Side(engine, case, mesh)
        losses[engine] = [side.step(number) for number in range(decoders.STEPS)]
        peaks[engine] = _memory_history.Peak(0, "", [])
        if decoders.CARD:
            history = keep / f"{name.replace(' ', '-')}-{decoders.WIDTH}-{engine}.pickle" if keep else None
            history = history if dist.get_rank() == 0 else None
            peaks[engine] = _memory_history.record_peak(lambda side=side: side.step(decoders.STEPS), history)
        # Free garbage now. If it were freed during the recorded step of the next engine, it would lower that peak.
        del side
        gc.collect()
        if decoders.CARD:
            torch.cuda.empty_cache()
    ratio = peaks["ours"].allocated / peaks["fsdp2"].allocated if peaks["fsdp2"].allocated else None
    pairs = list(zip(losses["ours"], losses["fsdp2"], strict=True))
    finite = all(math.isfinite(loss) for pair in pairs for loss in pair)
    difference = max(abs(a - b) / abs(b) for a, b in pairs) if finite else None
    return PeakResult(name, decoders.WIDTH, peaks, ratio, difference)


def run_rank(names: list[str], keep: Path | None) -> NoReturn:
    """Run all cases in the process of a rank. Rank 0 rewrites the results file after each case."""
    decoders.join(timedelta(seconds=60))
    results = []
    for name in names:
        try:
            results.append(asdict(measure_case(name, keep)))
        except Exception as error:  # continue with the other cases
            traceback.print_exc()
            message = f"{type(error).__name__}: {error}"
            results.append(asdict(PeakResult(name, decoders.WIDTH, {}, None, None, message)))
        if dist.get_rank() == 0:
            _report.write_json(Path(os.environ[RESULTS_FILE]), "ranks", {}, results)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # closing an NCCL communicator may wait for a peer that has ended


def is_right(result: dict[str, Any]) -> bool:
    difference = result["loss_difference"]
    return difference is not None and difference <= decoders.CASES[result["case"]].tolerance


def show(results: list[dict[str, Any]], lines: int) -> None:
    for each in results:
        ratio = "not measured" if each["ratio"] is None else f"{each['ratio']:.3f} of FSDP2's"
        text = f"losses differ by {each['loss_difference']}" if each["error"] is None else each["error"]
        print(f"{each['case']}, width {each['width']}: peak {ratio}, {text}{'' if is_right(each) else '   WRONG'}")
        for engine, peak in each["peaks"].items():
            if peak["sites"]:
                _report.table(
                    f"{engine}: {peak['allocated'] / MIB:.2f} MiB, reached at {peak['reached_at']}",
                    ("live at the peak", "MiB", "allocations", "stream"),
                    [
                        (site["where"], f"{site['nbytes'] / MIB:.2f}", str(site["count"]), hex(site["stream"]))
                        for site in peak["sites"][:lines]
                    ],
                )


def parse_cases(text: str) -> list[str]:
    """Parse a comma-separated list of cases."""
    names = text.split(",")
    if unknown := [name for name in names if name not in decoders.CASES]:
        raise argparse.ArgumentTypeError(f"unknown {', '.join(unknown)}; known: {', '.join(decoders.CASES)}")
    if ours_only := [name for name in names if not decoders.CASES[name].torch_has_it]:
        raise argparse.ArgumentTypeError(f"FSDP2 does not support {', '.join(ours_only)}")
    return names


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases",
        type=parse_cases,
        default="no sync,hsdp,bf16 packed,bf16,packed,accumulate",
        help="cases of decoders.py (default: %(default)s)",
    )
    parser.add_argument("--width", type=int, default=256, help="width of the decoder (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=200.0, help="total time, in seconds (default: %(default)s)")
    parser.add_argument("--lines", type=int, default=8, help="lines per table (default: %(default)s)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="write the allocator's histories to FOLDER")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    return parser.parse_args(argv)


def main() -> int:
    options = parse()
    if "RANK" in os.environ:
        run_rank(options.cases, options.keep)
    arguments = ["--cases", ",".join(options.cases)]
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
        arguments += ["--keep", str(options.keep)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "results.json")
        os.environ |= {RESULTS_FILE: str(file), "WIDTH": str(options.width)}
        status = decoders.start(arguments, options.limit - START_S, Path(__file__))
        results = json.loads(file.read_text())["results"] if file.exists() else []
    show(results, options.lines)
    if options.json and results:
        settings = {"cases": options.cases, "width": options.width}
        _report.write_json(options.json, "decoder_peaks", settings, results, decoders.DEVICE.type)
    return status or int(len(results) < len(options.cases) or not all(map(is_right, results)))


if __name__ == "__main__":
    sys.exit(main())
