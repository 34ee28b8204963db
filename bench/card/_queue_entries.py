"""The entries of the GPU queue: what to measure next when a GPU is available, in this order.

To add an entry, insert it at the position where it should run. `tests/tools/test_gpu_queue.py` executes its dry run,
checks its time, and checks that its scripts accept the options for a GPU. Every part is one command with a hard time
limit, which includes imports and compilation.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

LIMIT_S = 540  # Limit of an entry. A call on a GPU machine often has 600 s, with start and transfer of results.
START_S = 20  # Time for the queue itself: it checks the GPU before the first part, and packs files after the last.
GRACE_S = 5  # A part gets SIGTERM at its limit, and SIGKILL this much later.


class QueueError(Exception):
    """The queue was used wrongly. The message explains what to do."""


@dataclass(frozen=True)
class Part:
    """One command of an entry.

    Attributes:
        script: a Python script relative to the root of the repository, or `-m module`, with the options of all runs.
            `{json}` is replaced by the file for the figures, `{folder}` by a folder for other files.
        gpu: additional options on a GPU.
        dry: additional options of the dry run on a CPU, which takes seconds.
        limit_s: the time limit on a GPU, in seconds.
        wheels: packages that a machine with a GPU can lack, as `name==version`. The queue finds their wheels in
            `.wheels/`.
        env: environment variables of the command.
        dry_env: environment variables of the dry run, instead of `env`.
    """

    name: str
    script: str
    gpu: str
    dry: str
    limit_s: int
    wheels: tuple[str, ...] = field(default=(), kw_only=True)
    env: Mapping[str, str] = field(default_factory=dict)
    dry_env: Mapping[str, str] = field(default_factory=dict)

    def command(self, dry: bool) -> list[str]:
        """Return the command line after `python`, in which `{json}` and `{folder}` are not replaced."""
        return shlex.split(f"{self.script} {self.dry if dry else self.gpu}")

    def variables(self, dry: bool) -> dict[str, str]:
        return dict(self.dry_env if dry else self.env)

    @property
    def has_figures(self) -> bool:
        """Whether the command writes figures. Other commands report only an exit status."""
        return "{json}" in self.script


@dataclass(frozen=True)
class Entry:
    """A question, and the parts that answer it.

    Attributes:
        parallel: whether parts run at the same time. Use it only for parts that measure no time.
    """

    name: str
    question: str
    parts: tuple[Part, ...]
    parallel: bool = False

    @property
    def part_names(self) -> tuple[str, ...]:
        return tuple(part.name for part in self.parts)

    def limit_s(self, names: Collection[str]) -> int:
        """Return the time limit of a run of the named parts, in seconds."""
        limits = [part.limit_s + GRACE_S for part in self.parts if part.name in names]
        return START_S + (max(limits, default=0) if self.parallel else sum(limits))

    def fitting(self, names: Collection[str], seconds: float) -> tuple[str, ...]:
        """Return the named parts that fit into `seconds`, chosen greedily in order."""
        chosen: list[str] = []
        for part in self.parts:
            if part.name in names and self.limit_s([*chosen, part.name]) <= seconds:
                chosen.append(part.name)
        return tuple(chosen)


def _overhead(transport: str) -> Part:
    return Part(
        transport,
        f"bench/overhead.py --transport {transport} --json {{json}}",
        "--device cuda --world 8,64,512 --rounds 40 --engines ours,fsdp2,fsdp2-again",
        "--device cpu --group noop --world 4 --blocks 2 --rounds 2",
        250,
    )


def _llama(name: str, engines: str, gpu: str, limit_s: int) -> Part:
    return Part(
        name,
        f"bench/card/llama_steps.py --engines {engines} --json {{json}}",
        f"--device cuda {gpu}",
        "--device cpu --size tiny --tokens 32 --world 2 --rounds 1 --steps 1 --backend aot_eager --tolerance 5e-2",
        limit_s,
    )


def _peaks(name: str, width: int, cases: str, limit_s: int) -> Part:
    return Part(
        name,
        "bench/card/decoder_peaks.py --json {json} --keep {folder}",
        f"--width {width} --cases '{cases}' --limit {limit_s - 5}",
        f"--width 32 --cases '{cases.split(',')[0]}'",
        limit_s,
    )


def _checkpoint(name: str, gpu: str) -> Part:
    return Part(
        name,
        f"bench/checkpoint.py --parts {name} --timeout 215 --seconds 90 --json {{json}}",
        f"--device cuda {gpu}",
        "--device cpu --parameters 100000 --tensors 6 --gpt tiny --rounds 1",
        240,
    )


def _step_1b(batch: int, transport: str) -> Part:
    return Part(
        f"batch{batch}-{transport}",
        "bench/step.py --engines ours,fsdp2,fsdp2-again,compute --dtype bfloat16 --json {json}",
        f"--device cuda --sizes 1b --batch {batch} --rounds 10",
        "--device cpu --sizes tiny --rounds 2 --echo",
        100,
        {"COMPOSABLE_SHARD_TRANSPORT": transport},
        {"COMPOSABLE_SHARD_TRANSPORT": transport},
    )


def _compiled(part: str, script: str, gpu: str, dry: str, limit_s: int) -> Part:
    return Part(
        part,
        f"bench/{script} --json {{json}}",
        f"--device cuda {gpu}",
        f"--device cpu --backend aot_eager {dry}",
        limit_s,
    )


def _memory(part: str, gpu: str, limit_s: int) -> Part:
    return Part(
        part,
        "bench/memory.py --parts live --json {json}",
        f"--device cuda {gpu}",
        "--device cpu --sizes tiny --world 4 --engines ours,fsdp2",
        limit_s,
    )


def _graphed(name: str, dry: str, limit_s: int) -> Part:
    return Part(
        name,
        f"bench/card/graphs.py {name} --json {{json}}",
        "--device cuda",
        f"--device cpu --size tiny --batch 1 --rounds 1 --steps 1 {dry}",
        limit_s,
    )


def _float8(tokens: int) -> Part:
    return Part(
        f"tokens{tokens}",
        "bench/card/float8.py --json {json}",
        f"--device cuda --tokens {tokens}",
        "--device cpu --size tiny --tokens 32 --world 2 --rounds 1 --steps 1 --backend aot_eager --tolerance 1e-4 "
        "--skip-unsupported",
        250,
        wheels=("torchao==0.18.0",),
    )


def _growth(part: str, options: str, rounds: int, dry: str, limit_s: int) -> Part:
    return Part(
        part,
        f"bench/overhead.py --group noop {options} --json {{json}}",
        f"--device cuda --world 8 --rounds {rounds}",
        f"--device cpu --world 4 --rounds 2 {dry}",
        limit_s,
    )


# Ignore pyproject.toml: it needs plugins that a GPU machine may lack, and turns warnings into errors.
_PYTEST = "-m pytest -c /dev/null --rootdir=. -p no:cacheprovider -q -ra --timeout=200"

QUEUE = (
    Entry(
        "graphs",
        "Are training steps that are captured in CUDA graphs bitwise identical to eager steps on NCCL ranks that share "
        "the GPU, and do replays keep memory, random numbers and private pools as they should be?",
        (
            Part(
                "correctness",
                "bench/card/graphs.py correctness --json {json}",
                "--jobs 4 --limit 140",
                "--only 'no sync,frozen unused,dropout' --replays 2 --jobs 1",
                480,
                dry_env={"WIDTH": "32"},
            ),
        ),
    ),
    Entry(
        "graphed-steps",
        "How long are captured steps of 1B parameters (8 and 32 sequences), and compiled and captured steps of 150M "
        "parameters, compared with eager ones, FSDP2 and the unsharded model? Expected for ours: captured within 10 % "
        "of the unsharded captured step plus the collectives.",
        (
            _graphed("steps-1b", "--engines ours,ours-graph,compute-graph,collectives-graph", 230),
            _graphed("steps-150m", "--backend aot_eager --engines ours-placed-whole-graph,fsdp2-blocks-graph", 270),
        ),
    ),
    Entry(
        "float8",
        "What are tokens/s, peak memory and gathered bytes of four Llama 3 8B layers in torchao's float8, compared "
        "with bfloat16, for FSDP2 and ours with compiled blocks, and ours as one graph?",
        (_float8(4096), _float8(8192)),
    ),
    Entry(
        "host-overhead",
        "How much host time does the runtime add per GPT-2 block on an idle machine, at world 8, 64 and 512, with each "
        "transport, compared with FSDP2?",
        (_overhead("direct"), _overhead("packed")),
    ),
    Entry(
        "gpu-bound-steps",
        "What are tokens/s, peak memory, kernels and exposed communication of four Llama 3 8B layers in bfloat16 with "
        "4,096 and 8,192 tokens, compared with FSDP2 and the unsharded model?",
        (
            _llama("eager", "ours,ours-packed,fsdp2,fsdp2-again,unsharded", "--rounds 6", 230),
            _llama("blocks", "ours-blocks,fsdp2-blocks,unsharded-blocks", "--rounds 4", 270),
        ),
    ),
    Entry(
        "nccl-peaks",
        "Which allocations make our peak memory higher than FSDP2's (ratios: accumulation 1.185, HSDP 1.095, packed "
        "1.135, bfloat16 reduced in float32 1.035)? Is this the same for blocks of width 1,024?",
        (
            _peaks("small", 256, "no sync,hsdp,bf16 packed,packed,accumulate,bf16", 220),
            _peaks("wide", 1024, "hsdp,no sync,bf16 packed,bf16", 280),
        ),
    ),
    Entry(
        "checkpoints",
        "How long do saves and loads of GPU tensors take, and how long does an asynchronous save block training, "
        "compared with DCP?",
        (
            _checkpoint("gpt", "--gpt 150m --rounds 3"),
            _checkpoint("async", "--parameters 60000000 --tensors 64 --rounds 3"),
        ),
    ),
    Entry(
        "offload-fp8",
        "How long is a step with CPU offload, compared with FSDP2's, and a step with fp8 gathers, compared with "
        "bfloat16?",
        (
            _llama("offload", "ours-offload,fsdp2-offload", "--tokens 4096 --rounds 4", 260),
            _llama("fp8", "ours-fp8,ours,fsdp2", "--rounds 6 --tolerance 5e-2", 190),
        ),
    ),
    Entry(
        "correctness",
        "Are all decoders correct on two NCCL ranks that share the GPU, do faults end in errors, and are losses "
        "bitwise identical when streams are slow?",
        (
            Part(
                "decoders",
                "bench/card/decoders.py",
                "--jobs 6 --limit 220",
                "--only plain",
                235,
                dry_env={"WIDTH": "32"},
            ),
            Part("faults", "bench/card/decoders.py --faults", "--limit 210", "--only mismatch", 230),
            Part(
                "tests",
                f"{_PYTEST} tests/comm/test_streams.py tests/training/test_cuda.py",
                "-n 4",
                "-n 0 -k on_a_cpu",
                235,
            ),
            Part("stress", "bench/card/card_probe.py stress", "", "", 230, dry_env={"WIDTH": "32"}),
            Part("kernels", "bench/card/card_probe.py counts", "", "", 230, dry_env={"WIDTH": "32"}),
            Part(
                "sanitizer",
                "bench/card/card_probe.py stress",
                "",
                "",
                230,
                env={"TORCH_CUDA_SANITIZER": "1", "WIDTH": "64"},
                dry_env={"WIDTH": "16"},
            ),
        ),
        parallel=True,
    ),
    Entry(
        "steps-1b",
        "How long is a step of 1B parameters in bfloat16 with 8 and 32 sequences and each transport, compared with "
        "FSDP2?",
        tuple(_step_1b(batch, transport) for batch in (8, 32) for transport in ("direct", "packed")),
    ),
    Entry(
        "compiled-steps",
        "How long are compiled steps of 150M parameters (one graph, and compiled blocks), compared with FSDP2's "
        "compiled blocks? How long are start-up, steps and saves of a run with 50M parameters?",
        (
            _compiled(
                "steps",
                "compile.py --parts steps",
                "--sizes 150m --dtype bfloat16 --batch 8 --rounds 10 "
                "--engines ours-whole,ours-placed-whole,ours-blocks,fsdp2-blocks,compute-whole",
                "--sizes tiny --rounds 1 --engines ours-whole,fsdp2-blocks",
                240,
            ),
            _compiled(
                "run",
                "figures.py --parts run --repeats 1 --engines fsdp2,ours,ours-placed-whole",
                "--size 50m --batch 8 --steps 10",
                "--size tiny --steps 1",
                260,
            ),
        ),
    ),
    Entry(
        "memory",
        "What are the peaks of torch's CUDA allocator at world 8, 64 and 512, compared with FSDP2?",
        (
            _memory("1b", "--sizes 1b --world 8,64", 170),
            _memory("1b-512", "--sizes 1b --world 512", 130),
            _memory("150m", "--sizes 150m --world 8,64,512", 150),
        ),
    ),
    Entry(
        "host-overhead-growth",
        "How much host time does each parameter add, and does a module need more host time in a larger model?",
        (
            _growth("parameters", "--per-group 1,4,16", 20, "--blocks 2 --per-group 1,2", 200),
            _growth("modules", "--model stack --blocks 48,200,1000", 10, "--blocks 2,3", 250),
        ),
    ),
)


def find_entry(name: str) -> Entry:
    """Return the entry with this name.

    Raises:
        QueueError: there is none. The message lists all names.
    """
    for entry in QUEUE:
        if entry.name == name:
            return entry
    raise QueueError(f"unknown entry {name}; known: {', '.join(entry.name for entry in QUEUE)}")
