"""One rank of `transfer.py`: trainers send their weights to receivers of another layout, in several ways in turn."""

import hashlib
import json
import sys
import time
import weakref
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import _device
import _launch
import _models
import _process
from _engines import shard_units
from _live_bytes import LiveBytes
from composable_shard import checkpoint, weights
from composable_shard.weights import Box, LocalTensor, Piece, Plan, TensorInfo, WeightLayout

TRAINERS, RECEIVERS = 4, 2
SIZES = {
    **_models.SIZES,
    "350m": _models.GPTConfig(depth=24, width=1024, heads=16, context=256, vocabulary=24_576),  # 352 million
}
SKIPS = "skip-all", "skip-none", "skip-tenth"
LIMITS = {"ours": 256 << 20, "ours-16MiB": 16 << 20, "ours-4MiB": 4 << 20}
VERSIONS = "ours-versions"
WAYS = ("plain", *LIMITS, VERSIONS, *SKIPS, "iter_full_state", "fsdp2")
CHANGED = 10  # every tenth tensor changes
Tensors = dict[str, torch.Tensor]


def whole(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)


def boxes_of(name: str, shape: tuple[int, ...], index: int) -> list[Box]:
    """Return the parts of a tensor that a tensor-parallel rank holds."""
    if name.endswith("norm.weight"):
        return [whole(shape)]
    rows, columns = shape
    if name.endswith(".out.weight"):
        each = columns // RECEIVERS
        return [Box((0, index * each), (rows, each))]
    count = 3 if name.endswith(".qkv.weight") else 1  # the heads of queries, keys and values
    each = rows // count // RECEIVERS
    return [Box((part * rows // count + index * each, 0), (each, columns)) for part in range(count)]


def local_tensor(name: str, shape: tuple[int, ...], index: int, dtype: torch.dtype) -> LocalTensor:
    pieces, row = [], 0
    for box in boxes_of(name, shape, index):
        pieces.append(Piece(name, box, (row, *(0 for _ in shape[1:]))))
        row += box.shape[0]
    return LocalTensor((row, *pieces[0].box.shape[1:]), dtype, tuple(pieces))


def fill(own: torch.Tensor, local: LocalTensor, full: torch.Tensor) -> None:
    """Copy this rank's parts of a full tensor, cast to its dtype."""
    for piece in local.pieces:
        place = own[piece.local.slices(whole(local.shape))]
        place.copy_(full[piece.box.slices(whole(tuple(full.shape)))])


def values_of(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the full values of a tensor, the same on all ranks."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.empty(shape).uniform_(-1, 1, generator=generator)


def meta_model(size: str) -> nn.Module:
    with torch.device("meta"):
        return _models.GPT(SIZES[size])


def sharded(engine: str, size: str, mesh: DeviceMesh) -> nn.Module:
    model = meta_model(size)
    shard_units(engine, model, list(model.blocks), mesh)  # type: ignore[arg-type]
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            part = values_of(name, tuple(parameter.shape)).chunk(TRAINERS)[mesh.get_local_rank()]
            parameter.to_local().copy_(part)  # type: ignore[attr-defined]
    return model


def digest_of(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.view(-1).view(torch.uint8).numpy()).hexdigest()  # type: ignore[arg-type]


# ---- counting


class Counts(LiveBytes):
    """Counts the storages that operators create, and the bytes that this rank receives from others.

    Attributes:
        received: bytes that this rank has received.
    """

    def __init__(self) -> None:
        super().__init__()
        self.received = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # so that the operators on its local tensor come here
        for tensor in torch.utils._pytree.tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                self._exclude(tensor)
        if func.namespace in ("c10d", "_c10d_functional"):
            self.received += received_by(func.overloadpacket.__name__, args)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _exclude(self, tensor: torch.Tensor) -> None:
        """Do not count a storage that was there before."""
        storage = tensor.untyped_storage()
        if (key := storage._cdata) not in self._nbytes:
            self._nbytes[key] = 0
            weakref.finalize(storage, self._resized, key, 0, True)


def received_by(name: str, args: tuple[Any, ...]) -> int:
    """Return the bytes that an operator of a process group receives from other ranks."""
    match name:
        case "send" | "barrier" | "wait_tensor" | "_wrap_tensor_autograd":
            return 0
        case "recv_":
            return nbytes(args[0])
        case "_allgather_base_" | "allgather_" | "allgather_into_tensor_coalesced_":
            return nbytes(args[0]) - nbytes(args[1])
        case "alltoall_base_" | "alltoall_":
            return nbytes(args[0]) * (1 - 1 / dist.ProcessGroup.unbox(args[2]).size())
        case "broadcast_":
            return nbytes(args[0]) if dist.ProcessGroup.unbox(args[1]).rank() != args[2] else 0
        case "all_gather_into_tensor" | "all_gather_into_tensor_coalesced":
            return nbytes(args[0]) * (args[1] - 1)
    raise NotImplementedError(f"{name}: not counted")


def nbytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in torch.utils._pytree.tree_leaves(tensors))


def buffers_of(plan: Plan, end: str) -> dict[int, torch.Tensor]:
    """Memory for the bytes of each link of this rank, by the other rank. This rank is the source or the target."""
    own, other = (0, 1) if end == "source" else (1, 0)
    links = [(link, size) for link, size in plan.links.items() if link[own] == dist.get_rank()]
    return {link[other]: torch.ones(size, dtype=torch.uint8) for link, size in links}


# ---- the two sides


class Trainer:
    """A rank that sends, with a model of ours and one of FSDP2."""

    def __init__(self, settings: dict[str, Any], mesh: DeviceMesh, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.model = sharded("ours", settings["size"], mesh)
        self.layout = weights.layout(self.model)
        self.torchs = sharded("fsdp2", settings["size"], mesh) if "fsdp2" in settings["ways"] else None
        self.plan: Plan
        self.buffers: dict[int, torch.Tensor]

    def prepare(self, plan: Plan) -> None:
        self.plan, self.buffers = plan, buffers_of(plan, "source")

    def ours(self, limit: int = LIMITS["ours"], versions: bool = False, skip: bool = False, all_: bool = False) -> None:
        weights.send(self.model, self.plan, max_bytes_in_flight=limit, skip_unchanged=skip)

    def plain(self) -> None:
        for work in [dist.isend(data, target) for target, data in self.buffers.items()]:
            work.wait()

    def iter_full_state(self) -> None:
        for _, full in checkpoint.iter_full_state(self.model, dtype=self.dtype):
            self._send(full)

    def fsdp2(self) -> None:
        assert self.torchs is not None
        for parameter in self.torchs.parameters():
            self._send(parameter.full_tensor().detach().to(self.dtype))  # type: ignore[attr-defined]

    def _send(self, full: torch.Tensor) -> None:
        if dist.get_rank() == 0:
            for work in [dist.isend(full, TRAINERS + index) for index in range(RECEIVERS)]:
                work.wait()

    @torch.no_grad()
    def change(self) -> None:
        """Change some tensors. A second call restores them."""
        for parameter in list(self.model.parameters())[::CHANGED]:
            parameter.to_local().neg_()  # type: ignore[attr-defined]


class Receiver:
    """A rank that receives, with tensor-parallel weights."""

    def __init__(self, size: str, index: int, dtype: torch.dtype) -> None:
        self.shapes = {name: tuple(p.shape) for name, p in meta_model(size).named_parameters()}
        self.held = {name: local_tensor(name, shape, index, dtype) for name, shape in self.shapes.items()}
        self.tensors = {name: torch.empty(local.shape, dtype=dtype) for name, local in self.held.items()}
        infos = {name: TensorInfo(shape, torch.float32) for name, shape in self.shapes.items()}
        self.layout = WeightLayout(infos, {}, {TRAINERS + index: self.held})
        self.dtype = dtype
        self.expected: dict[bool, dict[str, str]] = {False: {}, True: {}}  # by whether tensors have changed
        for number, (name, shape) in enumerate(self.shapes.items()):
            fill(self.tensors[name], self.held[name], values_of(name, shape))
            self.expected[False][name] = self.expected[True][name] = digest_of(self.tensors[name])
            if number % CHANGED == 0:
                self.expected[True][name] = digest_of(-self.tensors[name])
        self.versions: weights.Versions | None = None
        self.plan: Plan
        self.buffers: dict[int, torch.Tensor]

    def prepare(self, plan: Plan) -> None:
        self.plan, self.buffers = plan, buffers_of(plan, "target")

    def ours(self, limit: int = LIMITS["ours"], versions: bool = False, skip: bool = False, all_: bool = False) -> None:
        if versions and self.versions is None:
            self.versions = weights.Versions(self.tensors)
        into: weights.Versions | Tensors = self.versions if versions and self.versions is not None else self.tensors
        weights.receive(self.plan, into, max_bytes_in_flight=limit, refresh=all_)

    def plain(self) -> None:
        for work in [dist.irecv(data, source) for source, data in self.buffers.items()]:
            assert work is not None
            work.wait()

    def iter_full_state(self) -> None:
        for name, shape in self.shapes.items():
            full = torch.empty(shape, dtype=self.dtype)
            dist.recv(full, 0)
            fill(self.tensors[name], self.held[name], full)

    fsdp2 = iter_full_state

    def forget(self) -> None:
        """Overwrite all weights, so that a tensor that does not arrive is noticed."""
        others = self.versions.tensors if self.versions is not None else {}
        for tensor in (*self.tensors.values(), *others.values(), *self.buffers.values()):
            tensor.zero_()

    def check(self, way: str, changed: bool) -> None:
        """Check that all weights are bitwise identical to the expected ones."""
        if way == "plain":
            assert all(bool(data.all()) for data in self.buffers.values())
            return
        tensors = self.versions.tensors if way == VERSIONS and self.versions is not None else self.tensors
        wrong = [name for name, each in tensors.items() if digest_of(each) != self.expected[changed][name]]
        assert not wrong, f"{way}: wrong weights {wrong}"


# ---- rounds


def works_of(side: Trainer | Receiver) -> dict[str, Callable[[], None]]:
    """Return what a rank does in each way."""
    return {
        "plain": side.plain,
        **{way: partial(side.ours, limit) for way, limit in LIMITS.items()},
        VERSIONS: partial(side.ours, versions=True),
        **{way: partial(side.ours, skip=True, all_=way == SKIPS[0]) for way in SKIPS},
        "iter_full_state": side.iter_full_state,
        "fsdp2": side.fsdp2,
    }


def turns_of(ways: list[str], number: int) -> list[str]:
    """Return the ways in the order of a round. `SKIPS` follow each other."""
    units = [[way] for way in ways if way not in SKIPS] + [[*SKIPS]] * bool({*SKIPS} & {*ways})
    at = number % len(units)
    return [way for unit in units[at:] + units[:at] for way in unit]


def timed(work: Callable[[], None]) -> tuple[float, float]:
    """Return the time of `work` on the slowest rank, and the CPU time of all ranks together, in seconds."""
    dist.barrier()
    begin, busy = time.perf_counter(), time.process_time()
    work()
    dist.barrier()  # gloo's threads may still be sending
    own = [time.perf_counter() - begin, time.process_time() - busy]
    took, of_cpu = _launch.everyone(torch.tensor(own, dtype=torch.float64)).T
    return float(took.max()), float(of_cpu.sum())


def counted(work: Callable[[], None]) -> dict[str, int]:
    """Return the bytes that all ranks received, and the peak memory of trainers and receivers."""
    _process.forget_peak()
    before = _process.resident()
    dist.barrier()
    with (counts := Counts()).counting():
        work()
    own = [counts.received, counts.peak, _process.resident("VmHWM") - before]
    received, peaks, residents = _launch.everyone(torch.tensor(own, dtype=torch.float64)).T.long()
    return {
        "nbytes": int(received.sum()),
        "trainer": int(peaks[:TRAINERS].max()),
        "receiver": int(peaks[TRAINERS:].max()),
        "trainer_resident": int(residents[:TRAINERS].max()),
        "receiver_resident": int(residents[TRAINERS:].max()),
    }


def main() -> None:
    settings = json.loads(sys.argv[1])
    rank, _ = _launch.join()
    torch.set_num_threads(1)
    dtype = _device.DTYPES[settings["dtype"]]
    trains = rank < TRAINERS
    of_trainers = dist.new_group(list(range(TRAINERS)))
    side: Trainer | Receiver
    if trains:
        side = Trainer(settings, DeviceMesh.from_group(of_trainers, "cpu"), dtype)
    else:
        side = Receiver(settings["size"], rank - TRAINERS, dtype)
    plan = weights.plan_together(**{"sends" if trains else "receives": side.layout})
    side.prepare(plan)
    works = works_of(side)
    ways = [way for way in WAYS if way in settings["ways"] or way == "plain"]
    found: dict[str, dict[str, Any]] = {}
    for number in range(settings["rounds"] + 1):
        for way in turns_of(ways, number):
            changed = way == SKIPS[2]
            if changed and isinstance(side, Trainer):
                side.change()
            if way not in SKIPS[1:] and isinstance(side, Receiver):
                side.forget()
            if number == 0:
                found[way] = {**counted(works[way]), "seconds": [], "cpu": []}
            else:
                took, of_cpu = timed(works[way])
                found[way]["seconds"].append(took)
                found[way]["cpu"].append(of_cpu)
            if isinstance(side, Receiver):
                side.check(way, changed)
            elif changed:
                side.change()
    if rank == 0:
        held = next(iter(plan.target.ranks.values()))
        answer = {
            "plan": str(plan),
            "minimum": plan.total_bytes,
            "weights": sum(each.nbytes for each in held.values()),
            "ways": {way: found[way] for way in WAYS if way in found},
        }
        _launch.answer(json.dumps(answer))
    _launch.leave()


if __name__ == "__main__":
    main()
