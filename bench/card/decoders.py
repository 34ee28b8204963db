"""Check that decoders train the same with ours, torch's FSDP2 and an unsharded model on a GPU.

    python bench/card/decoders.py                  # two NCCL ranks, on one GPU or two
    python bench/card/decoders.py --only checkpoint,compiled
    python bench/card/decoders.py --faults         # rank 1 fails; checks that rank 0 ends with an error in time

Two ranks can share a GPU, because NCCL_HOSTID makes NCCL treat them as two hosts and use sockets. All collectives are
real, but slow. The decoder has grouped-query attention, rotary embeddings, RMSNorm, SwiGLU and dropout
(`tests/_blocks.py`). The unsharded model averages its gradients over the ranks. Some cases need bitsandbytes. Without a
GPU the ranks use gloo. The exit status is 1 if losses differ by more than a case's tolerance. The environment variable
WIDTH sets the size of the model (default: 256).
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import composable_shard
from _blocks import Transformer
from composable_shard._policies import keeps_shards_on_host

CARD = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CARD else torch.device("cpu")
WORLD = int(os.environ.get("WORLD_SIZE", "2"))  # set by `run_ranks`
STEPS = 4
LIMIT_S = 20.0  # timeout of collectives with --faults
NOTICED = 42  # exit status of a rank that ended with an error, as expected if its peer fails
VOCABULARY, LENGTH, BATCH = 512, 64, 4
WIDTH = int(os.environ.get("WIDTH", "256"))
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SCALED = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
STATE_ON_HOST = composable_shard.HostOffloadPolicy()
ON_DISK = composable_shard.DiskOffloadPolicy(tempfile.gettempdir(), memory=64 << 20)
FEW_BITS = composable_shard.CommPolicy(gather="fp8", reduce="int8")
MESH = (WORLD,)


@dataclass(frozen=True)
class Case:
    """A training configuration.

    Attributes:
        options: options of `fully_shard`.
        mesh: shape of the mesh.
        transport: our transport, `COMPOSABLE_SHARD_TRANSPORT`; empty: the default.
        dropout: dropout probability.
        passes: microbatches per step.
        no_sync: whether only the last microbatch reduces gradients.
        recompute: whether blocks use activation checkpointing.
        compiled: mode of torch.compile for ours; None: eager.
        placed: whether to use `composable_shard.compile` instead of torch's.
        clip: whether gradients are clipped.
        thread: whether backward runs in another thread.
        fail: whether a forward and a backward fail before each step, on all ranks.
        freeze: suffixes of the names of frozen parameters.
        unused: whether every other step skips the last block.
        meta: whether the model is created on the meta device.
        make: creates the optimizer. Called with the model, and whether it is ours.
        bits: communication policy, only for ours.
        base: "nf4" or "int8": layers of blocks are frozen and quantized by bitsandbytes, with low-rank adapters.
        scale: initial scale of a GradScaler; 0: none.
        tolerance: largest relative difference to the losses of the unsharded model.
        torch_has_it: whether FSDP2 supports the case and runs too.
    """

    options: dict[str, Any] = field(default_factory=dict)
    mesh: tuple[int, ...] = MESH
    transport: str = ""
    dropout: float = 0.0
    passes: int = 1
    no_sync: bool = False
    recompute: bool = False
    compiled: str | None = None
    placed: bool = False
    clip: bool = False
    thread: bool = False
    fail: bool = False
    freeze: tuple[str, ...] = ()
    unused: bool = False
    meta: bool = False
    make: Callable[[nn.Module, bool], Any] = lambda model, _ours: adamw(model)
    bits: composable_shard.CommPolicy | None = None
    base: str = ""
    scale: float = 0.0
    tolerance: float = 1e-4
    torch_has_it: bool = True

    @property
    def needs_bitsandbytes(self) -> bool:
        return bool(self.base) or self.make is EightBits


def adamw(model: nn.Module) -> AdamW:
    return AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def in_backward(model: nn.Module, ours: bool) -> Any:
    if not ours:
        return adamw(model)
    return composable_shard.optim.in_backward(model, lambda params: AdamW(params, lr=1e-3))


def offloaded(model: nn.Module, ours: bool) -> AdamW:
    optimizer = adamw(model)
    if ours:
        composable_shard.optim.offload_optimizer(optimizer)
    return optimizer


class Two:
    """Muon for the matrices of blocks (in ours with `optim.owned`), and AdamW for the other parameters."""

    def __init__(self, model: Any, ours: bool, state: str = "owner") -> None:
        matrices = [(name, p) for name, p in model.blocks.named_parameters() if p.ndim == 2]
        taken = {p for _, p in matrices}
        if ours:
            muon: Any = composable_shard.optim.owned(torch.optim.Muon, matrices, lr=0.01, state=state)
        else:
            muon = torch.optim.Muon([p for _, p in matrices], lr=0.01)
        self.both = muon, AdamW([p for p in model.parameters() if p not in taken], lr=1e-3)

    def step(self) -> None:
        for each in self.both:
            each.step()

    def zero_grad(self) -> None:
        for each in self.both:
            each.zero_grad()


class EightBits:
    """AdamW8bit of bitsandbytes on the local shards of parameters."""

    def __init__(self, model: nn.Module, _ours: bool) -> None:
        import bitsandbytes

        self.params = [p for p in model.parameters() if p.requires_grad]
        self.parts = [nn.Parameter(_local(p.detach())) for p in self.params]
        held = [part for part in self.parts if part.numel()]
        self.inner = bitsandbytes.optim.AdamW8bit(held, lr=1e-3, min_8bit_size=1)

    def step(self) -> None:
        for param, part in zip(self.params, self.parts, strict=True):
            part.grad = None if param.grad is None else _local(param.grad)
        self.inner.step()

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = None


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class Adapted(nn.Module):
    """A frozen linear layer in 4 or 8 bits, with a trainable adapter of rank 4."""

    def __init__(self, layer: nn.Linear, base: str) -> None:
        super().__init__()
        import bitsandbytes.nn as quantized

        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # hide a message per cast
        if base == "nf4":
            kind = {"quant_type": "nf4", "quant_storage": torch.bfloat16}  # before torch 2.13, FSDP2 rejects integers
            made = quantized.Linear4bit(layer.in_features, layer.out_features, bias=False, **kind)
        else:
            made = quantized.Linear8bitLt(layer.in_features, layer.out_features, bias=False, has_fp16_weights=False)
        made.load_state_dict(layer.cpu().state_dict())
        self.base = made.to(DEVICE).requires_grad_(False)
        self.down = nn.Linear(layer.in_features, 4, bias=False, device=DEVICE)
        self.up = nn.Linear(4, layer.out_features, bias=False, device=DEVICE)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapt(model: Any, base: str) -> None:
    model.requires_grad_(False)
    for block in model.blocks:
        for part in (block.attention, block.feed_forward):
            for name, layer in list(part.named_children()):
                setattr(part, name, Adapted(layer, base))


OUTER = {"outer_sharding": "optimizer"}
CASES = {
    "plain": Case(),
    "packed": Case(transport="packed"),
    "bf16": Case({"mp_policy": HALF}, tolerance=2e-2),
    "bf16 packed": Case({"mp_policy": HALF}, transport="packed", tolerance=2e-2),
    "zero2": Case({"reshard_after_forward": False}),
    "hsdp": Case(mesh=(WORLD, 1)),
    "hfsdp": Case(OUTER, mesh=(WORLD, 1), torch_has_it=False),
    "hfsdp bf16 no sync": Case(
        {**OUTER, "mp_policy": HALF}, mesh=(WORLD, 1), passes=3, no_sync=True, tolerance=2e-2, torch_has_it=False
    ),
    "dropout checkpoint": Case(dropout=0.1, recompute=True),
    "no sync": Case(passes=3, no_sync=True),
    "accumulate": Case({"mp_policy": HALF}, passes=3, tolerance=2e-2),
    "clip": Case(clip=True),
    "offload": Case({"offload_policy": CPUOffloadPolicy()}),
    "offload bf16": Case({"offload_policy": CPUOffloadPolicy(), "mp_policy": HALF}, tolerance=2e-2),
    "thread": Case(thread=True),
    "failures": Case(fail=True, torch_has_it=False),
    "frozen": Case(freeze=("q.weight", "k.weight")),
    "unused": Case(unused=True),
    "meta": Case(meta=True),
    "offload state": Case({"offload_policy": STATE_ON_HOST}, make=offloaded, torch_has_it=False),
    "offload disk": Case({"offload_policy": ON_DISK}, make=offloaded, torch_has_it=False),
    "few bits": Case(bits=FEW_BITS, tolerance=3e-2, torch_has_it=False),
    "few bits bf16": Case({"mp_policy": HALF}, bits=FEW_BITS, passes=2, tolerance=3e-2, torch_has_it=False),
    "in backward": Case(make=in_backward),
    "in backward accumulated": Case(make=in_backward, passes=3, no_sync=True),
    "owned": Case(make=Two, tolerance=1e-3, torch_has_it=False),
    "owned bf16": Case(
        {"mp_policy": HALF}, make=lambda *of: Two(*of, state="shards"), tolerance=2e-2, torch_has_it=False
    ),
    "ragged": Case({"shard_placement_fn": lambda p: composable_shard.Ragged(48)}, torch_has_it=False),
    "eight bits": Case(
        {"shard_placement_fn": lambda p: composable_shard.Ragged(1 if p.ndim == 2 else 256)},
        make=EightBits,
        tolerance=1e-3,
        torch_has_it=False,
    ),
    "scaler": Case({"mp_policy": SCALED}, scale=2.0**12, tolerance=2e-2),
    "nf4": Case(base="nf4"),
    "nf4 checkpoint bf16": Case({"mp_policy": HALF}, base="nf4", recompute=True, tolerance=2e-2),
    "int8": Case(base="int8", tolerance=2e-2, torch_has_it=False),
    "compiled": Case(compiled="default", torch_has_it=False),
    "compiled few bits": Case(bits=FEW_BITS, compiled="default", tolerance=3e-2, torch_has_it=False),
    "compiled in backward": Case(make=in_backward, compiled="default", torch_has_it=False),
    "compiled bf16": Case({"mp_policy": HALF}, compiled="default", tolerance=2e-2, torch_has_it=False),
    "compiled placed": Case(compiled="default", placed=True, torch_has_it=False),
    "compiled checkpoint": Case(compiled="default", recompute=True, torch_has_it=False),
    "reduce-overhead": Case(compiled="reduce-overhead", passes=2, torch_has_it=False),
    "reduce-overhead no sync": Case(compiled="reduce-overhead", passes=3, no_sync=True, torch_has_it=False),
}


class Side:
    """The model and the optimizer of one engine in a case."""

    def __init__(self, engine: str, case: Case, mesh: DeviceMesh) -> None:
        self.case, self.engine = case, engine
        self.blocks = 3
        torch.manual_seed(0)
        offloads = engine != "plain" and keeps_shards_on_host(case.options.get("offload_policy"))
        with torch.device("meta" if case.meta and engine != "plain" else "cpu"):
            self.model: Any = Transformer(VOCABULARY, WIDTH, self.blocks, 8, 4, 2 * WIDTH, LENGTH, case.dropout)
        if not offloads and not self.model.head.weight.is_meta:
            self.model.to(DEVICE)
        if case.base:
            adapt(self.model, case.base)
        for name, parameter in self.model.named_parameters():
            if name.endswith(case.freeze or ("none",)):
                parameter.requires_grad_(False)
        if case.recompute:
            for block in self.model.blocks:
                block.forward = _recomputing(block.forward, case.dropout > 0)
        if engine != "plain":
            shard: Callable[..., Any] = composable_shard.fully_shard if engine == "ours" else fsdp2
            for block in self.model.blocks:
                shard(block, mesh=mesh, **case.options)
            shard(self.model, mesh=mesh, **case.options)
        if case.meta and engine != "plain":
            self._fill()
        if case.bits is not None and engine == "ours":
            self.model.set_comm_policy(case.bits)
        if offloads:
            self.model.cos, self.model.sin = self.model.cos.to(DEVICE), self.model.sin.to(DEVICE)
        self.optimizer = case.make(self.model, engine == "ours")
        self.scaler = torch.amp.GradScaler(DEVICE.type, init_scale=case.scale or 1.0, enabled=bool(case.scale))
        self.call = self.model
        if case.compiled and engine == "ours":
            make = composable_shard.compile if case.placed else torch.compile
            self.call = make(self.model, mode=case.compiled)

    def _fill(self) -> None:
        torch.manual_seed(0)
        whole = Transformer(VOCABULARY, WIDTH, self.blocks, 8, 4, 2 * WIDTH, LENGTH, self.case.dropout).to(DEVICE)
        self.model.to_empty(device=DEVICE)
        wanted = dict(whole.named_parameters())
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.to_local().copy_(wanted[name].chunk(WORLD)[dist.get_rank()])
            for name, buffer in self.model.named_buffers():
                buffer.copy_(dict(whole.named_buffers())[name])

    def loss(self, tokens: Tensor) -> Tensor:
        logits = self.call(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def backward(self, loss: Tensor) -> None:
        if not self.case.thread:
            loss.backward()
            return
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()

    def fail(self, tokens: Tensor) -> None:
        """Run a forward that fails in the last block, and a backward that fails before the first block."""
        if self.engine != "ours":
            return

        def raises(*_: object) -> None:
            raise ValueError("planted")

        with contextlib.suppress(ValueError), _hooked(self.model.blocks[-1].register_forward_hook(raises)):
            self.loss(tokens)
        with contextlib.suppress(ValueError, RuntimeError):
            hidden: list[Tensor] = []
            with _hooked(self.model.blocks[0].register_forward_hook(lambda _m, _a, out: hidden.append(out))):
                loss = self.loss(tokens)
            hidden[0].register_hook(raises)
            loss.backward()
        self.optimizer.zero_grad()

    def gradients(self, *microbatches: Tensor) -> list[Tensor]:
        """Run forward and backward of each microbatch. Return their parts of the loss."""
        losses = []
        for micro, batch in enumerate(microbatches):
            if self.case.no_sync and self.engine != "plain":
                self.model.set_requires_gradient_sync(micro == len(microbatches) - 1)
            loss = self.loss(batch) / len(microbatches)
            self.backward(self.scaler.scale(loss))
            losses.append(loss.detach())
        return losses

    def clip(self) -> float:
        """Clip the gradients and return their norm."""
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.1)
        return (norm.full_tensor() if self.engine == "fsdp2" else norm).item()

    def step(self, number: int) -> float:
        case = self.case
        torch.manual_seed(100 + number)
        if case.fail:
            self.fail(tokens(number, 0))
            torch.manual_seed(100 + number)
        full = self.model.blocks
        if case.unused and number % 2:
            self.model.blocks = full[:-1]
        total = sum(loss.item() for loss in self.gradients(*batches(case, number)))
        self.model.blocks = full
        if self.engine == "plain":
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= WORLD
        if case.clip:
            total += self.clip()
        if case.scale:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def evaluate(self) -> float:
        self.model.eval()
        with torch.no_grad():
            return self.loss(tokens(999, 0)).item()


def _recomputing(forward: Callable[..., Any], draws: bool) -> Callable[..., Any]:
    # A CUDA graph cannot save the state of the random numbers, so it is saved only if the block draws some.
    return lambda *args: checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=draws)


@contextlib.contextmanager
def _hooked(handle: Any) -> Any:
    try:
        yield
    finally:
        handle.remove()


def tokens(step: int, micro: int) -> Tensor:
    """Return tokens of this rank, shape (batch, length)."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + dist.get_rank())
    return torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator).to(DEVICE)


def batches(case: Case, step: int) -> list[Tensor]:
    """Return the microbatches of a step."""
    return [tokens(step, micro) for micro in range(case.passes)]


def run(case: Case) -> dict[str, Any]:
    """Return losses, peak memory above the memory between steps (bytes), and time (seconds) of each engine."""
    mesh = init_device_mesh(DEVICE.type, case.mesh, mesh_dim_names=("replicate", "shard")[-len(case.mesh) :])
    os.environ.pop("COMPOSABLE_SHARD_TRANSPORT", None)
    if case.transport:
        os.environ["COMPOSABLE_SHARD_TRANSPORT"] = case.transport
    found: dict[str, Any] = {}
    for engine in ("ours", *(["fsdp2"] if case.torch_has_it else []), "plain"):
        torch._dynamo.reset()
        begin = time.monotonic()
        side = Side(engine, case, mesh)
        losses = [side.step(number) for number in range(STEPS)]
        peak = 0
        if CARD:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
        losses.append(side.step(STEPS))
        if CARD:
            peak = torch.cuda.max_memory_allocated() - held
        losses.append(side.evaluate())
        found[engine] = {"losses": losses, "peak": peak, "seconds": time.monotonic() - begin}
    return found


def judged(name: str, case: Case, found: dict[str, Any]) -> tuple[str, bool]:
    """Return a line about a case, and whether it is correct."""
    ours = found["ours"]["losses"]

    def apart(engine: str) -> float:
        return max(abs(a - b) / max(abs(b), 1e-9) for a, b in zip(ours, found[engine]["losses"], strict=True))

    text = f"real {name}: unsharded {apart('plain'):.1e}"
    right = apart("plain") <= case.tolerance
    if "fsdp2" in found:
        text += f", FSDP2 {apart('fsdp2'):.1e}"
        right = right and apart("fsdp2") <= case.tolerance
        if found["fsdp2"]["peak"]:
            text += f", peak {found['ours']['peak'] / found['fsdp2']['peak']:.3f} of FSDP2's"
    return f"{text}, {found['ours']['seconds']:.1f} s{'' if right else '   WRONG ' + json.dumps(found)}", right


def join(limit: timedelta) -> None:
    rank = int(os.environ["RANK"])
    if CARD:
        torch.cuda.set_device(DEVICE)
    store = dist.FileStore(os.environ["STORE"], WORLD)
    if limit.total_seconds() < 60:  # with faults, ranks compare actions through a store that accepts more clients
        store = dist.TCPStore("127.0.0.1", int(os.environ["PORT"]), WORLD, rank == 0)
    dist.init_process_group("nccl" if CARD else "gloo", store=store, rank=rank, world_size=WORLD, timeout=limit)


def train(names: list[str]) -> None:
    """Run the cases on a rank."""
    join(timedelta(seconds=120))
    right = True
    for name in names:
        if CASES[name].needs_bitsandbytes and importlib.util.find_spec("bitsandbytes") is None:
            if dist.get_rank() == 0:
                print(f"real {name}: NOT RUN, bitsandbytes is not installed", flush=True)
            continue
        try:
            text, fits = judged(name, CASES[name], run(CASES[name]))
        except Exception as error:
            text, fits = f"real {name}: FAILED {type(error).__name__}: {error}\n{traceback.format_exc()[-1800:]}", False
        right = right and fits
        if dist.get_rank() == 0:
            print(text, flush=True)
    sys.stdout.flush()
    os._exit(int(not right))


def mismatch(side: Side) -> None:
    side.model(tokens(0, 0)[:, :-1])


def fail(side: Side) -> None:
    raise ValueError("bad data")


def die(side: Side) -> None:
    os._exit(9)


def alone(side: Side) -> None:
    side.model.eval()
    next(iter(side.model.parameters())).full_tensor()


def late(side: Side) -> None:
    time.sleep(1.5 * LIMIT_S)


FAULTS = {each.__name__: each for each in (mismatch, fail, die, alone, late)}


def faulty(name: str) -> None:
    """Train on a rank, and let rank 1 fail. Exit with status NOTICED if an error is raised."""
    join(timedelta(seconds=LIMIT_S))
    side = Side("ours", CASES["plain"], init_device_mesh(DEVICE.type, MESH))
    for number in range(3):
        side.step(number)
    begin = time.monotonic()
    said, error = "no error", None
    # Print the stack if the rank hangs. NCCL's watchdog needs a minute or more to detect a dead peer.
    faulthandler.dump_traceback_later(6 * LIMIT_S, exit=True)
    try:
        if dist.get_rank() == 1:
            FAULTS[name](side)
        for number in range(3, 5):
            side.step(number)
    except BaseException as caught:
        said, error = f"{type(caught).__name__}: {caught}", caught
        traceback.print_exc()
    print(f"fault {name}, rank {dist.get_rank()} after {time.monotonic() - begin:.1f} s: {said[:400]}", flush=True)
    sys.stderr.flush()
    if error is not None and dist.get_rank() == 1:
        raise error  # end like a failing script, so that the library notifies the other rank at exit
    os._exit(NOTICED if error is not None else 0)


def is_noticed(name: str, limit: float) -> bool:
    """Return whether rank 0 ends with an error in time if rank 1 fails."""
    statuses = run_ranks(["--only", name, "--faults"], limit, count=1)
    # If the peer is killed, late, or calls another collective, NCCL's own watchdog may abort the process instead.
    accepted = (NOTICED, -signal.SIGABRT) if name in ("die", "late", "alone") else (NOTICED,)
    right = statuses is not None and statuses[0] in accepted
    print(f"fault {name}: {'noticed' if right else f'NOT NOTICED, exit status {statuses}'}", flush=True)
    return right


def start(arguments: list[str], limit: float, script: Path = Path(__file__)) -> int:
    """Run `script` on each rank, for at most `limit` seconds. Return the highest exit status."""
    statuses = run_ranks(arguments, limit, script)
    return 1 if statuses is None else max(abs(status) for status in statuses)


def run_ranks(
    arguments: list[str], limit: float, script: Path = Path(__file__), count: int | None = None, world: int = WORLD
) -> list[int] | None:
    """Run `script` on `world` ranks. Return the exit statuses of the first `count` ranks (default: all).

    Returns None if one of them is still running after `limit` seconds. All ranks are killed at the end.
    """
    with tempfile.TemporaryDirectory() as folder:
        common = {"STORE": str(Path(folder, "store")), "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        common["PORT"] = str(20000 + os.getpid() % 20000 + hash(tuple(arguments)) % 1000)
        ranks = [
            subprocess.Popen(
                [sys.executable, str(script), *arguments],
                env={
                    "OMP_NUM_THREADS": "2",
                    **os.environ,
                    **common,
                    "RANK": str(rank),
                    "WORLD_SIZE": str(world),
                    "NCCL_HOSTID": f"rank{rank}",
                },
            )
            for rank in range(world)
        ]
        end = time.monotonic() + limit
        try:
            return [rank.wait(max(0.1, end - time.monotonic())) for rank in ranks[:count]]
        except subprocess.TimeoutExpired:
            print(f"{' '.join(arguments)}: still running after {limit:.0f} s", flush=True)
            return None
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="comma-separated cases, or faults with --faults (default: all)")
    parser.add_argument("--faults", action="store_true", help="let rank 1 fail and check rank 0")
    parser.add_argument("--jobs", type=int, default=1, help="number of parallel jobs")
    parser.add_argument("--limit", type=float, default=300.0, help="time limit of a job, in seconds")
    options = parser.parse_args()
    known = list(FAULTS) if options.faults else list(CASES)
    names = options.only.split(",") if options.only else known
    if unknown := [name for name in names if name not in known]:
        parser.error(f"unknown {', '.join(unknown)}; known: {', '.join(known)}")
    if "RANK" in os.environ:
        faulty(names[0]) if options.faults else train(names)
    if options.faults:
        with ThreadPoolExecutor(len(names)) as threads:
            return int(not all(threads.map(lambda name: is_noticed(name, options.limit), names)))
    with ThreadPoolExecutor(options.jobs) as threads:
        shares = [["--only", ",".join(names[job :: options.jobs])] for job in range(min(options.jobs, len(names)))]
        return max(threads.map(lambda share: start(share, options.limit), shares))


if __name__ == "__main__":
    sys.exit(main())
