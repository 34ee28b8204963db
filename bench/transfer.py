"""Measure how weights get from sharded trainers to an inference engine of another layout.

    python bench/transfer.py                            # 350M parameters, needs 14 GB of memory
    python bench/transfer.py --size 50m --rounds 3      # a smaller GPT

Four ranks hold a GPT in fp32, sharded by `fully_shard`. Two other ranks hold it in tensor parallelism: queries, keys,
values, the first layer of the MLP and the vocabulary are split by rows, the output projections by columns. All ranks
are gloo processes on this machine. All ways take turns in the same run. After each transfer, receivers compare a digest
of each tensor with the expected one. Ways:

- `ours`: `weights.send` and `weights.receive` with 256 MiB in flight. `ours-16MiB` and `ours-4MiB` have other limits.
  `ours-versions` switches between two sets of tensors instead of copying into one.
- `skip-all`, `skip-none`, `skip-tenth`: `ours` with `skip_unchanged` after all, none, or 10 % of the tensors have
  changed.
- `iter_full_state`: trainers gather each tensor, rank 0 sends it to each receiver, and receivers slice it.
- `fsdp2`: the same with torch's FSDP2 and `full_tensor()`, as libraries for reinforcement learning do it.
- `plain`: the bytes of `ours` between the same pairs of ranks, one message per pair, from and to buffers that exist
  already. Nothing is packed, cast or staged. This is the minimum time.

Expected:

- Bytes: `ours` sends each element that a receiver holds once: 1.00 times the minimum. In the other ways, each trainer
  receives the shards of the other three (together 3 times the model), and each receiver a full copy (together 2 times):
  5.00. For receivers in bf16, `iter_full_state` casts before it gathers, and `full_tensor()` does not: 8.00.
- Time: six ranks share the cores, so time follows the CPU time of all ranks. `ours` adds to `plain`: packing and
  unpacking the columns (a third of the bytes; with bf16 receivers, trainers copy everything to cast it), reading the
  model's state dict on each trainer, and the receivers' copy out of new memory, which `ours-versions` omits. So on
  loopback, where a message costs not much more than a copy, `ours` cannot reach 1.00. On a slower
  network, copies can overlap with messages. The other ways pass at least five times the bytes,
  and rank 0 sends twice the model.
- Memory of a trainer: less than the bytes in flight. A contiguous part of at least 1 MiB is sent from the parameter. In
  the other ways, trainers hold full tensors.
- Memory of a receiver: a second copy of its weights (1.00), so that all tensors switch together, and less than the
  bytes in flight. In the other ways, it holds one full tensor, but its weights are overwritten one by one.
- With `skip_unchanged`, trainers read their parameters once for fingerprints (SHA-256 on a CPU).

Bytes are counted at the operators of process groups: what each rank receives from others. Memory is the peak of
storages that torch's operators create. Both are counted in the first round, which is not timed. They are exact, but
exclude buffers of gloo and Python. The JSON file also has the growth of the peak of resident memory, which includes
them.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import _launch
import _report
from _transfer_worker import RECEIVERS, SIZES, TRAINERS, WAYS

DTYPES = ("float32", "bfloat16")
MIB = 1 << 20


@dataclass(frozen=True)
class TransferResult:
    """A way to send weights.

    Attributes:
        dtype: of the receivers' tensors.
        way: the way.
        seconds: time of the slowest rank.
        over_plain: ratio to the plain copy, formed within each round.
        cpu: CPU time of all ranks together in seconds. Other load on the machine changes it less than the time.
        cpu_over_plain: ratio to the plain copy, formed within each round.
        nbytes: bytes that all ranks together received.
        over_minimum: the same, divided by the bytes of the parts that receivers hold.
        trainer, receiver: peak memory of one rank, in bytes, beyond what it has before and after; the highest of ranks.
        trainer_resident, receiver_resident: growth of the peak of resident memory in bytes.
    """

    dtype: str
    way: str
    seconds: _report.Spread
    over_plain: _report.Spread
    cpu: _report.Spread
    cpu_over_plain: _report.Spread
    nbytes: int
    over_minimum: float
    trainer: int
    receiver: int
    trainer_resident: int
    receiver_resident: int


def print_table(results: list[TransferResult], size: str, weights: dict[str, int], plans: dict[str, str]) -> None:
    for dtype, plan in plans.items():
        rows = [
            [
                r.way,
                str(r.seconds),
                r.over_plain.shown(2),
                str(r.cpu),
                r.cpu_over_plain.shown(2),
                f"{r.over_minimum:.4f}",
                f"{r.trainer / MIB:,.1f}",
                f"{r.receiver / MIB:,.1f}",
                f"{r.receiver / weights[dtype]:.2f}",
            ]
            for r in results
            if r.dtype == dtype
        ]
        _report.table(
            f"GPT {size}, {TRAINERS} trainers in float32, {RECEIVERS} receivers in {dtype}: {plan}",
            [
                "way",
                "seconds",
                "/ plain",
                "CPU seconds",
                "/ plain",
                "bytes / minimum",
                "trainer, MiB",
                "receiver, MiB",
                "receiver / its weights",
            ],
            rows,
            "median [quartiles] of interleaved rounds; additional peak memory of one rank",
        )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="350m", help="size of the GPT (default: 350m)")
    parser.add_argument(
        "--dtypes", type=_report.names(DTYPES), default=[*DTYPES], help="of the receivers (default: float32,bfloat16)"
    )
    parser.add_argument(
        "--ways", type=_report.names(WAYS), default=[*WAYS], help=f"{','.join(WAYS)} (default: all; plain always runs)"
    )
    parser.add_argument("--rounds", type=int, default=6, help="timed interleaved rounds (default: 6)")
    parser.add_argument("--timeout", type=float, default=1800, help="time limit in seconds (default: 1800)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    results: list[TransferResult] = []
    plans: dict[str, str] = {}
    weights: dict[str, int] = {}
    for dtype in options.dtypes:
        settings = {"size": options.size, "dtype": dtype, "ways": options.ways, "rounds": options.rounds}
        script = Path(__file__).with_name("_transfer_worker.py")
        world = TRAINERS + RECEIVERS
        answer = json.loads(
            _launch.launch(script, json.dumps(settings), world=world, timeout=options.timeout, tuned=False)
        )
        plans[dtype], weights[dtype] = answer["plan"], answer["weights"]
        times = {way: (found["seconds"], found["cpu"]) for way, found in answer["ways"].items()}
        for way, found in answer["ways"].items():
            for name, over in ("seconds", "over_plain"), ("cpu", "cpu_over_plain"):
                figures = times[way][name == "cpu"]
                ratios = [one / two for one, two in zip(figures, times["plain"][name == "cpu"], strict=True)]
                found |= {name: _report.Spread.of(figures), over: _report.Spread.of(ratios)}
            over_minimum = found["nbytes"] / answer["minimum"]
            results.append(TransferResult(dtype, way, over_minimum=over_minimum, **found))
    print_table(results, options.size, weights, plans)
    settings = vars(options) | {"plans": plans, "receiver_weights": weights}
    del settings["json"]
    if options.json:
        _report.write_json(options.json, "transfer", settings, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
