"""Saves and loads of a training state, beside torch's DCP and plain writes and reads of the same bytes.

    python bench/checkpoint.py                                      # a model of 350M and its AdamW, world 2: 4 GB
    python bench/checkpoint.py --parameters 20000000 --rounds 3     # a small one

The model and its optimizer are sharded by this library; all take turns in one run, checksums are made and checked, and
files are on disk before a save is over. `files`: saves, and loads of files that the system has in memory (warm) and has
not (cold), of equal layers, few and large ones or many small ones; `gpt`: the same of a GPT. `async`: for how long a
save that goes on in the background holds up training, beside a copy of the same bytes in memory, which it cannot do
without; and seconds of steps beside it and beside a process that writes the bytes. `exchange`: DCP's files read into
models of this library and of torch's FSDP2. `full`: the memory that `full_state_dict` takes. With fewer GPUs than
ranks, all ranks share the first GPU.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import _device
import _launch
import _models
import _report

PARTS = ("files", "gpt", "async", "exchange", "full")
HOST_ONLY = "full"
LESS_OF = {"blocked": "ours, synchronous", "steps beside": "a plain writer", "dcp reads": "fsdp2"}


@dataclass(frozen=True)
class CheckpointResult:
    """Seconds of the slowest rank; `over` are ratios to the others, formed within each round."""

    model: str
    tensors: int
    operation: str
    who: str
    seconds: _report.Spread
    over: dict[str, _report.Spread]


@dataclass(frozen=True)
class FullResult:
    """Bytes: of the largest group, unsharded; beyond its copy on rank 0; at most on another rank."""

    largest_group: int
    rank_0: int
    other_ranks: int


def results_of(model: str, tensors: int, operation: str, seconds: dict[str, list[float]]) -> list[CheckpointResult]:
    """Of one operation: seconds by who did it."""
    references = [name for name in ("dcp", "plain", LESS_OF.get(operation, "")) if name in seconds]
    return [
        CheckpointResult(
            model,
            tensors,
            operation,
            who,
            _report.Spread.of(rounds),
            {
                other: _report.Spread.of([one / two for one, two in zip(rounds, seconds[other], strict=True)])
                for other in references
            },
        )
        for who, rounds in seconds.items()
    ]


def print_table(results: list[CheckpointResult], nbytes: dict[str, int]) -> None:
    rows = []
    for r in results:
        other, ratio = next(((name, str(ratio)) for name, ratio in r.over.items() if name != "dcp"), ("", "-"))
        over_dcp = str(r.over.get("dcp", "-"))
        rows.append([r.operation, r.model, str(r.tensors), r.who, str(r.seconds), over_dcp, ratio, other])
    _report.table(
        "A model and its AdamW: "
        + ", ".join(f"{model} with {size / 1e6:,.0f} MB a rank" for model, size in nbytes.items()),
        ["operation", "model", "tensors", "by", "seconds", "/ dcp's", "ratio", "to"],
        rows,
        "median [quartiles] of interleaved rounds",
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _device.add_option(parser)
    parser.add_argument("--parameters", type=int, default=350_000_000, help="of the model (default: 350,000,000)")
    parser.add_argument("--tensors", type=_report.integers, default=[64, 4096], help="in all (default: 64,4096)")
    parser.add_argument("--gpt", choices=_models.SIZES, default="150m", help="size of the GPT (default: 150m)")
    parser.add_argument(
        "--parts", type=_report.names(PARTS), help=f"of {','.join(PARTS)} (default: all; on a GPU all but {HOST_ONLY})"
    )
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default: 5)")
    parser.add_argument("--world", type=int, default=2, help="number of ranks (default: 2)")
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="after which no more rounds of a part begin (default: no limit)"
    )
    parser.add_argument("--timeout", type=float, default=1800, help="seconds (default: 1800)")
    parser.add_argument("--folder", type=Path, default=None, help="where files are written (default: the system's)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    options = parser.parse_args(argv)
    on_gpu = options.device == _device.CUDA
    options.parts = options.parts or [part for part in PARTS if part != HOST_ONLY or not on_gpu]
    if on_gpu and HOST_ONLY in options.parts:
        parser.error(f"--parts {HOST_ONLY} measures memory of the host: run it with --device cpu")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    settings = {name: value for name, value in vars(options).items() if name != "json"}
    settings["folder"] = str(options.folder) if options.folder else None
    script = Path(__file__).with_name("_checkpoint_worker.py")
    answer = json.loads(
        _launch.launch(
            script,
            json.dumps(settings),
            world=options.world,
            timeout=options.timeout,
            tuned=False,
            device=options.device,
            share=_device.too_few(options.device, options.world),
        )
    )
    results: list[CheckpointResult] = []
    for model, tensors, operations in answer["seconds"]:
        for operation, seconds in operations.items():
            results += results_of(model, tensors, operation, seconds)
    print_table(results, answer["bytes"])
    held = [FullResult(*answer["full"].values())] if answer["full"] else []
    for each in held:
        print(
            f"full_state_dict: {each.rank_0 / 1e6:,.0f} MB on rank 0 beyond the copy that it gives, "
            f"{each.other_ranks / 1e6:,.0f} MB on others; the largest group has {each.largest_group / 1e6:,.0f} MB"
        )
    settings |= {name: answer[name] for name in ("bytes", "file_system", "digest")}
    if options.json:
        _report.write_json(options.json, "checkpoint", settings, [*results, *held], options.device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
