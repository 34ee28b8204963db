"""Trainers and inference engines as actors of Ray. `ray_engines.py` starts this script.

python _ray_actors.py send|store|killed|dies OUT [--fsdp2]
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Collection, Iterator
from datetime import timedelta
from typing import Any

import ray
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ray.exceptions import RayActorError
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import _job
from _gpt import SIZES, build_gpt, next_byte_loss, random_windows, rotate
from composable_shard import weights
from composable_shard.errors import PeerLostError
from composable_shard.weights import Box, LocalTensor, Piece, WeightLayout

CONFIG = SIZES["tiny"]
PADDED = 272  # rows of the vocabulary in an engine, as many inference engines pad it
TRAINERS = 2
PROMPT = torch.arange(40, 52)[None]


class Trainer:
    """One rank of a training job, with the job's own default process group."""

    def __init__(self, rank: int, address: str, fsdp2: bool) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=TRAINERS)
        self.rank, self.fsdp2 = rank, fsdp2
        self.mesh = init_device_mesh("cpu", (TRAINERS,))
        self.build()

    def build(self) -> None:
        """Begin again, with a new model."""
        self.model = build_gpt("tiny")
        _job.shard(self.model, self.mesh, _job.engine(self.fsdp2))
        self.optimizer, self.data = _job.make_optimizer(self.model), torch.Generator().manual_seed(0)

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            loss = next_byte_loss(self.model, random_windows(_job.TEXT, 4, 17, self.data)[self.rank :: TRAINERS])
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(_job.mean_of_ranks(loss.detach()))
        return losses

    def connect(self, address: str, world: int) -> str:
        """Join the engines, and plan how to send them weights."""
        self.group = weights.connect(address, self.rank, world, backend="gloo", timeout=timedelta(minutes=2))
        self.plan = weights.plan_together(self.group, sends=self.model)
        return str(self.plan)

    def send(self) -> str:
        try:
            return shown(weights.send(self.model, self.plan, self.group))
        except PeerLostError:
            return PeerLostError.__name__

    def put(self, receivers: str) -> Any:
        """Put this rank's slices into the object store, cut as the engines need them. Return their reference."""
        slices = weights.local_slices(self.model, WeightLayout.from_json(receivers))
        return [ray.put([(name, box, values.detach().numpy()) for name, box, values in slices])]

    def values(self) -> dict[str, torch.Tensor]:
        """The full weights."""
        state = self.model.state_dict()
        return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in state.items()}

    def describe(self) -> list[str]:
        return [f"{base.__module__}.{base.__qualname__}" for base in type(self.model).__mro__]


def layout_of(rank: int, world: int) -> dict[str, LocalTensor]:
    """Describe the tensors of a tensor-parallel rank. Queries, keys and values of its heads are in one tensor."""
    width, inner, rows = CONFIG.width, 4 * CONFIG.width, PADDED // world
    part, hidden = width // world, inner // world

    def whole(name: str, *shape: int) -> LocalTensor:
        return cut(name, Box((0,) * len(shape), shape))

    def cut(name: str, *boxes: Box, zeros: int = 0) -> LocalTensor:
        """A tensor of boxes below each other, and rows of zeros."""
        at, pieces = 0, []
        for box in boxes:
            pieces.append(Piece(name, box, (at,) + (0,) * (len(box.shape) - 1)))
            at += box.shape[0]
        shape = (at + zeros, *boxes[0].shape[1:])
        padding = (Box((at, 0), (zeros, shape[1])),) if zeros else ()
        return LocalTensor(shape, torch.float32, tuple(pieces), padding)

    first = min(rows * rank, CONFIG.vocabulary)
    last = min(rows * (rank + 1), CONFIG.vocabulary)
    held = {
        "embed": whole("embedding.weight", CONFIG.vocabulary, width),
        "norm": whole("norm.weight", width),
        "head": cut("head.weight", Box((first, 0), (last - first, width)), zeros=rows - (last - first)),
    }
    for index in range(CONFIG.depth):
        block = f"blocks.{index}."
        fused = [Box((i * width + rank * part, 0), (part, width)) for i in range(3)]
        held |= {
            f"qkv.{index}": cut(f"{block}attention.qkv.weight", *fused),
            f"out.{index}": cut(f"{block}attention.out.weight", Box((0, rank * part), (width, part))),
            f"up.{index}": cut(f"{block}mlp.up.weight", Box((rank * hidden, 0), (hidden, width))),
            f"down.{index}": cut(f"{block}mlp.out.weight", Box((0, rank * hidden), (width, hidden))),
            f"norm1.{index}": whole(f"{block}attention_norm.weight", width),
            f"norm2.{index}": whole(f"{block}mlp_norm.weight", width),
        }
    return held


def cut_from(full: dict[str, torch.Tensor], rank: int, world: int) -> dict[str, torch.Tensor]:
    """Cut the tensors of a rank from full ones, without a layout."""

    def rows(weight: torch.Tensor) -> torch.Tensor:
        return weight.chunk(world)[rank]

    made = {"embed": full["embedding.weight"], "norm": full["norm.weight"]}
    made["head"] = rows(F.pad(full["head.weight"], (0, 0, 0, PADDED - CONFIG.vocabulary)))
    for index in range(CONFIG.depth):
        block = f"blocks.{index}."
        made[f"qkv.{index}"] = torch.cat([rows(each) for each in full[f"{block}attention.qkv.weight"].chunk(3)])
        made[f"out.{index}"] = full[f"{block}attention.out.weight"].chunk(world, dim=1)[rank].contiguous()
        made[f"up.{index}"] = rows(full[f"{block}mlp.up.weight"])
        made[f"down.{index}"] = full[f"{block}mlp.out.weight"].chunk(world, dim=1)[rank].contiguous()
        made[f"norm1.{index}"] = full[f"{block}attention_norm.weight"]
        made[f"norm2.{index}"] = full[f"{block}mlp_norm.weight"]
    return made


class Engine:
    """One tensor-parallel rank of an inference engine, with the engine's own default process group."""

    def __init__(self, rank: int, world: int, address: str) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
        self.rank, self.world, self.held = rank, world, layout_of(rank, world)
        self.tensors = {name: torch.full(each.shape, torch.nan) for name, each in self.held.items()}

    def connect(self, address: str, rank: int, world: int) -> None:
        """Join the trainers as this rank of the common process group."""
        self.group = weights.connect(address, rank, world, backend="gloo", timeout=timedelta(minutes=2))
        self.plan = weights.plan_together(self.group, receives=self.held)

    def receive(self, dies: bool = False) -> str:
        try:
            into: Any = Dying(self.tensors) if dies else self.tensors
            return shown(weights.receive(self.plan, into, self.group))
        except PeerLostError:
            return PeerLostError.__name__

    def layout(self) -> str:
        """The layout as JSON, for trainers in no common process group."""
        return WeightLayout({}, {}, {self.rank: self.held}).to_json()

    def fetch(self, slices: list[Any]) -> None:
        """Copy slices from the object store into the tensors that need them."""
        for each in ray.get(slices):
            for name, box, values in each:
                for place in self.places(name, box):
                    place.copy_(torch.from_numpy(values.copy()))
        for local_name, local in self.held.items():
            for box in local.zeros:
                self.tensors[local_name][box.slices(Box((0, 0), local.shape))].zero_()

    def places(self, name: str, box: Box) -> Iterator[torch.Tensor]:
        for local_name, local in self.held.items():
            for piece in local.pieces:
                if piece.name == name and (common := piece.box.common(box)) is not None and common == box:
                    at = common.moved(b - a for a, b in zip(piece.box.offsets, piece.at, strict=True))
                    yield self.tensors[local_name][at.slices(Box((0,) * len(local.shape), local.shape))]

    def values(self) -> dict[str, torch.Tensor]:
        return self.tensors

    def outputs(self, full: dict[str, torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Return logits and greedily generated tokens, with the own tensors or with those cut from full ones."""
        held = self.tensors if full is None else cut_from(full, self.rank, self.world)
        tokens = PROMPT
        for _ in range(6):
            tokens = torch.cat([tokens, self.logits(held, tokens)[:, -1:].argmax(-1)], dim=1)
        return [self.logits(held, PROMPT), tokens]

    @torch.no_grad()
    def logits(self, held: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
        width, heads = CONFIG.width, CONFIG.heads // self.world
        x = F.embedding(tokens, held["embed"])
        batch, time, _ = x.shape
        for i in range(CONFIG.depth):
            qkv = F.linear(F.layer_norm(x, (width,), held[f"norm1.{i}"]), held[f"qkv.{i}"])
            query, key, value = qkv.view(batch, time, 3, heads, width // CONFIG.heads).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
            x = x + summed(F.linear(mixed.transpose(1, 2).reshape(batch, time, -1), held[f"out.{i}"]))
            up = F.gelu(F.linear(F.layer_norm(x, (width,), held[f"norm2.{i}"]), held[f"up.{i}"]))
            x = x + summed(F.linear(up, held[f"down.{i}"]))
        own = F.linear(F.layer_norm(x, (width,), held["norm"]), held["head"])
        parts = [torch.empty_like(own) for _ in range(self.world)]
        dist.all_gather(parts, own)
        return torch.cat(parts, dim=-1)[..., : CONFIG.vocabulary]


class Dying(weights.Versions):
    """Ends this process in an update, after all ranks have agreed to it."""

    def staged(self, new: Collection[str]) -> dict[str, torch.Tensor]:
        os._exit(1)


def summed(x: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(x)
    return x


def shown(update: weights.Update) -> str:
    return f"version {update.version}, {update.sent + update.received} bytes"


def address() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{found.getsockname()[1]}"


def all_of(actors: list[Any], method: str, *given: Any) -> list[Any]:
    """Call a method of all actors in parallel."""
    return ray.get(started(actors, method, *given))


def started(actors: list[Any], method: str, *given: Any) -> list[Any]:
    return [getattr(actor, method).remote(*given) for actor in actors]


class Cluster:
    """Two trainers and two engine ranks: one engine of two ranks, or two engines of one rank each."""

    def __init__(self, fsdp2: bool, engine_ranks: int) -> None:
        self.engine_ranks = engine_ranks
        where = address()
        make = ray.remote(num_cpus=0)(Trainer).remote
        self.trainers = [make(rank, where, fsdp2) for rank in range(TRAINERS)]
        together = address()
        places = [together if engine_ranks == 2 else address() for _ in range(2)]
        self.engines = [self.engine(index, place) for index, place in enumerate(places)]

    def engine(self, index: int, place: str) -> Any:
        return ray.remote(num_cpus=0)(Engine).remote(index % self.engine_ranks, self.engine_ranks, place)

    def connect(self) -> str:
        """Make a process group of all actors."""
        where, world = address(), TRAINERS + len(self.engines)
        joined = [each.connect.remote(where, TRAINERS + i, world) for i, each in enumerate(self.engines)]
        plans = all_of(self.trainers, "connect", where, world)
        ray.get(joined)
        assert len({*plans}) == 1
        return plans[0]

    def update(self) -> list[str]:
        received = started(self.engines, "receive")
        return all_of(self.trainers, "send") + ray.get(received)

    def check(self, full: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Check that the engines have the trainers' weights, and return what they compute with them."""
        for index, own in enumerate(all_of(self.engines, "values")):
            expected = cut_from(full, index % self.engine_ranks, self.engine_ranks)
            assert own.keys() == expected.keys()
            assert all(torch.equal(own[name], each) for name, each in expected.items()), f"weights of engine {index}"
        found, expected = all_of(self.engines, "outputs"), all_of(self.engines, "outputs", full)
        assert all(
            torch.equal(*pair) for one, two in zip(found, expected, strict=True) for pair in zip(one, two, strict=True)
        )
        model = build_gpt("tiny")
        model.load_state_dict(full)
        assert (model(PROMPT) - found[0][0]).abs().max() < 1e-5
        return {"logits": found[0][0], "tokens": found[0][1]}


def send(fsdp2: bool) -> dict[str, Any]:
    """Update over a process group that all actors join."""
    cluster = Cluster(fsdp2, engine_ranks=2)
    noted: dict[str, Any] = {"plan": cluster.connect()}
    for version in range(3):
        losses = all_of(cluster.trainers, "train", 2)[0]
        updates = cluster.update()
        full = all_of(cluster.trainers, "values")[0]
        noted[f"update {version}"] = [losses, updates, cluster.check(full), full]
    return noted | {"classes": all_of(cluster.trainers, "describe")}


def store(fsdp2: bool) -> dict[str, Any]:
    """Update through Ray's object store, without a common process group."""
    cluster = Cluster(fsdp2, engine_ranks=2)
    parts = [WeightLayout.from_json(text) for text in all_of(cluster.engines, "layout")]
    receivers = WeightLayout.merged(parts).to_json()
    noted: dict[str, Any] = {}
    for version in range(3):
        losses = all_of(cluster.trainers, "train", 2)[0]
        full = all_of(cluster.trainers, "values")[0]
        slices = [ref for refs in all_of(cluster.trainers, "put", receivers) for ref in refs]
        training = started(cluster.trainers, "train", 1)  # the stored slices must not change
        all_of(cluster.engines, "fetch", slices)
        noted[f"update {version}"] = [losses, ray.get(training)[0], cluster.check(full), full]
    return noted | {"classes": all_of(cluster.trainers, "describe")}


def lost(fsdp2: bool, dies: bool) -> dict[str, Any]:
    """Lose an engine before or during an update; train on; replace it; update again."""
    cluster = Cluster(fsdp2, engine_ranks=1)
    cluster.connect()
    losses = all_of(cluster.trainers, "train", 2)[0]
    noted: dict[str, Any] = {"first": cluster.update()}
    first = all_of(cluster.trainers, "values")[0]
    cluster.check(first)
    losses += all_of(cluster.trainers, "train", 2)[0]
    kept, ends = cluster.engines
    if dies:
        ending = ends.receive.remote(True)
    else:
        ray.kill(ends)
    received = kept.receive.remote()
    noted["sent"] = all_of(cluster.trainers, "send")
    noted["received"] = ray.get(received)
    if dies:
        try:
            ray.get(ending)
        except RayActorError:
            noted["lost engine"] = RayActorError.__name__
    cluster.engines = [kept]
    cluster.check(first)  # the other engine keeps its weights
    losses += all_of(cluster.trainers, "train", 2)[0]
    cluster.engines = [kept, cluster.engine(1, address())]
    cluster.connect()
    noted["again"] = cluster.update()
    full = all_of(cluster.trainers, "values")[0]
    noted |= {"losses": losses, "weights": full, "outputs": cluster.check(full)}
    # The same training without engines.
    all_of(cluster.trainers, "build")
    assert all_of(cluster.trainers, "train", 6)[0] == losses, "losses differ from training without transfers"
    alone = all_of(cluster.trainers, "values")[0]
    assert all(torch.equal(full[name], each) for name, each in alone.items())
    return noted | {"classes": all_of(cluster.trainers, "describe")}


def main() -> None:
    mode, out, fsdp2 = sys.argv[1], sys.argv[2], "--fsdp2" in sys.argv
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(num_cpus=2, object_store_memory=100 << 20, include_dashboard=False)
    noted = {"send": send, "store": store}[mode](fsdp2) if mode in ("send", "store") else lost(fsdp2, mode == "dies")
    torch.save(noted, out)
    ray.shutdown()


if __name__ == "__main__":
    main()
