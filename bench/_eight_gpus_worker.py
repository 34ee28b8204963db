"""One rank of `eight_gpus.py`: train Llama with one engine in one mode, and measure steps and memory."""

from __future__ import annotations

import gc
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2

import _device
import _engines
import _launch
import _report
from _llama_model import (
    MIXED,
    SIZES,
    TORCHAO,
    Size,
    TransformerBlock,
    checkpoint_blocks,
    compute_scales,
    convert_to_float8,
    find_float8_obstacle,
    initialize,
    make_decoder,
)
from _side_stream import SideStreamGraph
from _step_worker import run

OURS, FSDP2 = "ours", "fsdp2"
EAGER, COMPILED, FLOAT8, GRAPHS, ONE_GRAPH = "eager", "compiled", "float8", "graphs", "one-graph"
MODES = (EAGER, COMPILED, FLOAT8, GRAPHS, ONE_GRAPH)
COMPILED_BLOCKS = (COMPILED, FLOAT8, GRAPHS)
LEARNING_RATE = 3e-5
BATCHES = 2  # they alternate, so that losses depend on all gradients
ROOT = Path(__file__).resolve().parents[1]


# ------------------------------------------------------------------ the machine


@dataclass(frozen=True)
class Machine:
    """The machine of a run.

    Attributes:
        about: date, versions, GPUs, driver and commit, for the JSON file.
        gpus: number of GPUs that torch finds.
        has_nccl: whether torch can use NCCL.
        least_gib: memory of the smallest GPU in GiB; 0 on the CPU.
        busy: for each GPU with less than 95 % of free memory, a description.
        unsupported: modes that cannot run here, with the reasons.
    """

    about: dict[str, Any]
    gpus: int
    has_nccl: bool
    least_gib: float
    busy: list[str]
    unsupported: dict[str, str]


def describe_machine(device: str) -> Machine:
    """Describe this machine. Run it in a process of its own, because it uses memory of each GPU until its end."""
    gpus = _device.cards() if device == _device.CUDA else 0
    free, total = zip(*(torch.cuda.mem_get_info(each) for each in range(gpus)), strict=True) if gpus else ((), ())
    about = {
        **_report.about(device if gpus else _device.CPU),
        "device": device,
        "driver": ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0] or None,
        # One line for each GPU of the machine, with its power limit
        "gpus": ask("nvidia-smi", "--query-gpu=name,memory.total,power.limit", "--format=csv,noheader").splitlines(),
        TORCHAO: find_version(TORCHAO),
        "commit": ask("git", "-C", str(ROOT), "rev-parse", "HEAD") or None,
        "changed_files": ask("git", "-C", str(ROOT), "diff", "--name-only", "HEAD").splitlines(),
    }
    float8 = f"{TORCHAO} is not installed: pip install {TORCHAO}" if about[TORCHAO] is None else None
    float8 = float8 or find_float8_obstacle(device if gpus else _device.CPU)
    return Machine(
        about,
        gpus,
        dist.is_nccl_available(),
        min(total, default=0) / 2**30,
        [
            f"GPU {number}: {part / 2**30:.1f} of {whole / 2**30:.1f} GiB are free"
            for number, (part, whole) in enumerate(zip(free, total, strict=True))
            if part < 0.95 * whole
        ],
        {FLOAT8: float8} if float8 else {},
    )


def ask(*command: str) -> str:
    """Return the output of a command; an empty text if it fails or does not exist."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def find_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# ------------------------------------------------------------------ a rank


def build(settings: dict[str, Any], size: Size, mesh: DeviceMesh, rank: int) -> nn.Module:
    """Build and shard the model on the meta device, then initialize the shards of this rank."""
    device, mode = settings["device"], settings["mode"]
    with torch.device("meta"):
        model: Any = make_decoder(size, settings["sequence"])
    if mode == FLOAT8:
        convert_to_float8(model, emulate=device == _device.CPU)
    checkpoint_blocks(model)
    if mode in COMPILED_BLOCKS:
        _engines.compile_blocks(model, TransformerBlock, settings["backend"], dynamic=False)
    shard: Any = fsdp2
    if settings["engine"] == OURS:
        import composable_shard  # not imported in the processes of FSDP2

        shard = composable_shard.fully_shard
    for block in model.blocks:
        # Backward starts with the last block, so its parameters stay gathered, as in torchtitan.
        shard(block, mesh=mesh, mp_policy=MIXED, reshard_after_forward=block is not model.blocks[-1])
    shard(model, mesh=mesh, mp_policy=MIXED)
    model.to_empty(device=device)
    initialize(model, size, rank)
    return model  # type: ignore[no-any-return]


def make_batches(settings: dict[str, Any], size: Size, rank: int) -> list[Tensor]:
    """Return this rank's batches, shape (sequences, tokens + 1)."""
    shape = (settings["batch"], settings["sequence"] + 1)
    generators = [torch.Generator().manual_seed(1009 * number + rank) for number in range(BATCHES)]
    return [torch.randint(size.vocabulary, shape, generator=each).to(settings["device"]) for each in generators]


class Trainer:
    """A model, its optimizer and its step.

    In the mode `graphs`, forward, loss and backward are captured together. The optimizer is always eager.
    """

    def __init__(self, settings: dict[str, Any], mesh: DeviceMesh, rank: int) -> None:
        size = SIZES[settings["size"]]
        self._device, self._mode = settings["device"], settings["mode"]
        self._model = build(settings, size, mesh, rank)
        self._batches = make_batches(settings, size, rank)
        self._forward: Any = self._model
        if self._mode == ONE_GRAPH:
            self._forward = _engines.placed(self._model, settings["backend"])
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE, fused=True)
        self.parameters = sum(each.numel() for each in self._model.parameters())
        self.losses: list[float] = []
        self._call: Any = self._loss
        if self._mode == GRAPHS:
            self._call = capture_steps(settings["engine"], self._loss)

    @property
    def replays(self) -> int:
        """Number of steps that were replays of a CUDA graph."""
        return self._call.replays if self._mode == GRAPHS else 0

    def step(self) -> float:
        """Run a step and return its time in seconds."""
        tokens = self._batches[len(self.losses) % BATCHES]
        _device.synchronize(self._device)
        begin = time.perf_counter()
        loss = self._call(tokens)
        self._optimizer.step()
        if self._mode == FLOAT8:
            compute_scales(self._model)
        # A graph adds to gradients at fixed addresses.
        self._optimizer.zero_grad(set_to_none=self._mode != GRAPHS)
        _device.synchronize(self._device)
        seconds = time.perf_counter() - begin
        self.losses.append(loss.item())
        return seconds

    def _loss(self, tokens: Tensor) -> Tensor:
        # No name refers to the logits, so they are freed before backward.
        loss = F.cross_entropy(self._forward(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        return loss.detach()


def capture_steps(engine: str, step: Callable[[Tensor], Tensor]) -> Any:
    """Return a function that captures a step and replays it. Without a GPU it calls the step."""
    if engine == FSDP2:
        return SideStreamGraph(step)
    import composable_shard

    return composable_shard.make_graphed_step(step)


def measure(settings: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    """Train `warm_steps`, then time `steps`. Peaks of memory are those of all steps."""
    on_gpu = settings["device"] == _device.CUDA
    trainer = Trainer(settings, init_device_mesh(settings["device"], (world,)), rank)
    if on_gpu:
        torch.cuda.empty_cache()
        _device.forget_peak()
    for _ in range(settings["warm_steps"]):
        trainer.step()
    gc.collect()
    gc.freeze()  # no collection of the compiler's objects during timed steps
    before = trainer.replays
    seconds = [trainer.step() for _ in range(settings["steps"])]
    replays = trainer.replays - before
    if on_gpu and settings["mode"] == GRAPHS and replays < settings["steps"]:
        raise RuntimeError(f"only {replays} of {settings['steps']} timed steps were replays of a graph")
    peaks = [_device.peak(), torch.cuda.max_memory_reserved()] if on_gpu else [0, 0]
    figures = torch.tensor([*seconds, *peaks], dtype=torch.float64)
    *slowest, allocated, reserved = _launch.everyone(figures).amax(0).tolist()
    losses = _launch.everyone(torch.tensor(trainer.losses, dtype=torch.float64))
    if not losses.isfinite().all():
        raise FloatingPointError(f"a loss is not finite: {losses.tolist()}")
    return {
        "step_s": slowest,
        "losses": losses.T.tolist(),
        "allocated": int(allocated),
        "reserved": int(reserved),
        "replays": replays,
        "parameters": trainer.parameters,
    }


if __name__ == "__main__":
    with _launch.report_errors():
        run(measure)
