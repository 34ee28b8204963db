"""Time saves and loads of a training state, compared with torch's DCP and with plain files of the same size.

    python bench/checkpoint.py                                      # a model of 350M and its AdamW, world 2: 4 GB
    python bench/checkpoint.py --parameters 20000000 --rounds 3     # a smaller model
    python bench/checkpoint.py --store --parameters 20000000        # to a server with the API of S3 on this machine

The model and its optimizer are sharded by this library. All implementations take turns in the same run. Checksums are
computed and checked, and saves end after fsync. Parts:

- `files`: saves and loads of equal layers, few and large or many and small. *Warm* files are in the page cache, *cold*
  files are not.
- `gpt`: the same with a GPT.
- `async`: the time for which an asynchronous save blocks training, compared with a copy of the same bytes in memory
  (which is the minimum), and the time of steps during the save, compared with steps while a process writes the bytes.
- `exchange`: DCP's files loaded into models of this library and of torch's FSDP2.
- `full`: the memory of `full_state_dict`.

With `--store`, only saves and loads to an object store are measured, compared with DCP's fsspec writer and with
parallel requests that put and get the same bytes. By default, this is moto, a server in Python that is slow itself and
holds all objects in memory. It runs in another process of this machine.

With fewer GPUs than ranks, all ranks share the first GPU.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import _device
import _launch
import _models
import _report

PARTS = ("files", "gpt", "async", "exchange", "full")
HOST_ONLY = "full"
LESS_OF = {"blocked": "ours, synchronous", "steps beside": "a plain writer", "dcp reads": "fsdp2"}
SHOWN = {"steps beside": "steps during a save", "dcp reads": "load with DCP"}  # names of operations in the table


@dataclass(frozen=True)
class CheckpointResult:
    """Times of the slowest rank in seconds. `over` are ratios to other implementations, formed within each round."""

    model: str
    tensors: int
    operation: str
    who: str
    seconds: _report.Spread
    over: dict[str, _report.Spread]


@dataclass(frozen=True)
class FullResult:
    """Bytes: the largest unsharded group; peak on rank 0 without the returned copy; peak on the other ranks."""

    largest_group: int
    rank_0: int
    other_ranks: int


def results_of(model: str, tensors: int, operation: str, seconds: dict[str, list[float]]) -> list[CheckpointResult]:
    """Return the results of one operation from the times by implementation."""
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
        rows.append(
            [
                SHOWN.get(r.operation, r.operation),
                r.model,
                str(r.tensors),
                r.who,
                str(r.seconds),
                over_dcp,
                ratio,
                other,
            ]
        )
    _report.table(
        "A model and its AdamW: "
        + ", ".join(f"{model} with {size / 1e6:,.0f} MB per rank" for model, size in nbytes.items()),
        ["operation", "model", "tensors", "implementation", "seconds", "/ DCP", "ratio", "to"],
        rows,
        "median [quartiles] of interleaved rounds",
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _device.add_option(parser)
    parser.add_argument("--parameters", type=int, default=350_000_000, help="model size (default: 350,000,000)")
    parser.add_argument("--tensors", type=_report.integers, default=[64, 4096], help="total (default: 64,4096)")
    parser.add_argument("--gpt", choices=_models.SIZES, default="150m", help="size of the GPT (default: 150m)")
    parser.add_argument(
        "--parts", type=_report.names(PARTS), help=f"{','.join(PARTS)} (default: all; on a GPU all except {HOST_ONLY})"
    )
    parser.add_argument(
        "--store", nargs="?", const="local", metavar="URL", help="measure an object store (default: moto on loopback)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default: 5)")
    parser.add_argument("--world", type=int, default=2, help="number of ranks (default: 2)")
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="start no new round of a part after this time (default: no limit)"
    )
    parser.add_argument("--timeout", type=float, default=1800, help="time limit in seconds (default: 1800)")
    parser.add_argument("--folder", type=Path, default=None, help="folder for files (default: the system's temporary)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    options = parser.parse_args(argv)
    on_gpu = options.device == _device.CUDA
    if options.parts and options.store:
        parser.error("--parts: cannot be combined with --store")
    options.parts = options.parts or [part for part in PARTS if part != HOST_ONLY or not on_gpu]
    options.parts = [] if options.store else options.parts
    if on_gpu and HOST_ONLY in options.parts:
        parser.error(f"--parts {HOST_ONLY} measures host memory; use --device cpu")
    return options


SERVER = """
import logging, os
os.environ["MOTO_S3_DEFAULT_KEY_BUFFER_SIZE"] = str(1 << 40)  # keep all objects in memory, not in temporary files
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = make_server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=True)
print(server.server_port, flush=True)
server.serve_forever()
"""


@contextlib.contextmanager
def local_store() -> Iterator[str]:
    """Run a server with the API of S3 in another process; gives the URL of a bucket."""
    import fsspec

    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            os.environ |= {
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{int(server.stdout.readline())}",
                "AWS_ACCESS_KEY_ID": "user",
                "AWS_SECRET_ACCESS_KEY": "secret",
                "AWS_DEFAULT_REGION": "us-east-1",
            }
            fsspec.filesystem("s3").mkdir("bench")
            yield "s3://bench"
        finally:
            server.kill()


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    settings = {name: value for name, value in vars(options).items() if name != "json"}
    settings["folder"] = str(options.folder) if options.folder else None
    script = Path(__file__).with_name("_checkpoint_worker.py")
    with local_store() if options.store == "local" else contextlib.nullcontext(options.store) as url:
        settings["store"] = url
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
    settings["store"] = options.store
    results: list[CheckpointResult] = []
    for model, tensors, operations in answer["seconds"]:
        for operation, seconds in operations.items():
            results += results_of(model, tensors, operation, seconds)
    print_table(results, answer["bytes"])
    held = [FullResult(*answer["full"].values())] if answer["full"] else []
    for each in held:
        print(
            f"full_state_dict: {each.rank_0 / 1e6:,.0f} MB on rank 0 without the returned copy, "
            f"{each.other_ranks / 1e6:,.0f} MB on others; the largest group has {each.largest_group / 1e6:,.0f} MB"
        )
    settings |= {name: answer[name] for name in ("bytes", "file_system", "digest")}
    if options.json:
        _report.write_json(options.json, "checkpoint", settings, [*results, *held], options.device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
