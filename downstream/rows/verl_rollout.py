"""Rows for verl: a checkpoint engine that sends weights from all trainers to the rollout, on a CPU."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator
from types import SimpleNamespace
from typing import Any

import torch
import verl_engine  # first: it tells verl that there is no accelerator
from _jobs import Jobs, check_equal
from _vllm_stub import Engine, layout_of
from torch import nn
from transformers import LlamaConfig
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry
from verl.checkpoint_engine.base import CheckpointEngineWorker
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout.utils import ensure_async_iterator

from _rows import Rows, Run
from _worker import free_port
from composable_shard import weights

rows = Rows(
    "verl: weights for the rollout", environment="verl", versions=("verl", "transformers", "torch"), uses_ours=True
)

ROLLOUT, UPDATES = 2, 3
Named = Generator[tuple[str, torch.Tensor], None, None]


@CheckpointEngineRegistry.register("composable_shard")
class ShardedCheckpointEngine(CheckpointEngine):
    """A backend of verl's checkpoint engine. No rank gathers a full tensor for it.

    verl imports the module that `rollout.checkpoint_engine.custom_backend_module` names.

    Attributes:
        model: the trained model. verl passes only a generator of full weights, which this engine does not run.
        wanted: layout of this rank of the rollout.
        tensors: tensors of this rank of the rollout.
    """

    model: nn.Module
    wanted: weights.WeightLayout
    tensors: dict[str, torch.Tensor]

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self.bucket_size, self.is_master, self.plan = bucket_size, is_master, None

    def prepare(self) -> dict[str, Any]:
        return {"address": f"tcp://127.0.0.1:{free_port()}"}

    @classmethod
    def build_topology(cls, actors: int, rollouts: int, metadata: list[dict[str, Any]]) -> tuple[Any, Any]:
        world, address = actors + rollouts, metadata[0]["address"]
        shared = {"world_size": [world] * world, "address": [address] * world, "trains": [True] * actors}
        shared |= {"rank": [*range(world)], "trains": [True] * actors + [False] * rollouts}
        return tuple(
            {name: each[part] for name, each in shared.items()} for part in (slice(actors), slice(actors, None))
        )

    def init_process_group(self, rank: int, world_size: int, address: str, trains: bool) -> None:
        if self.plan is not None:
            return  # verl calls this before each update
        self.group = weights.connect(address, rank, world_size, backend="gloo")
        own = weights.layout(self.model) if trains else self.wanted
        self.plan = weights.plan_together(self.group, **{"sends" if trains else "receives": own})

    def finalize(self) -> None:
        """Keep the process group for the next update."""

    async def send_weights(self, weights_of_verl: Named, global_steps: int | None = None) -> None:
        weights.send(self.model, self.plan, self.group, version=global_steps, max_bytes_in_flight=self.bucket_size)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        update = weights.receive(self.plan, self.tensors, self.group, max_bytes_in_flight=self.bucket_size)
        assert update.version == global_steps
        for item in self.tensors.items():
            yield item


class Server:
    """A server's adapter of verl without a server.

    Attributes:
        engine: the engine's tensors.
        full: whether the adapter gets full weights to load, instead of tensors that are in use already.
    """

    def __init__(self, engine: Engine, full: bool) -> None:
        self.engine, self.full = engine, full

    async def update_weights(self, named: Any, global_steps: int, wire_format: str) -> None:
        assert wire_format == "named_tensors"
        async for name, tensor in ensure_async_iterator(named):
            if self.full:
                self.engine.load_weights([(name, tensor)])
            else:
                assert tensor is self.engine.tensors[name]


def whole_tensors(source: weights.WeightLayout, at: int) -> weights.WeightLayout:
    """Describe a rank that receives all tensors of the trainers in full."""
    held = {}
    for name, info in source.tensors.items():
        zeros = (0,) * len(info.shape)
        piece = weights.Piece(name, weights.Box(zeros, info.shape), zeros)
        held[name] = weights.LocalTensor(info.shape, info.dtype, (piece,))
    return weights.WeightLayout({}, {}, {at: held})


def updates(run: Run, full: bool, **settings: Any) -> None:
    jobs = Jobs.start(run)
    sizes = verl_engine.SIZES | {"intermediate_size": 72}
    shape = LlamaConfig(**sizes, **verl_engine.HEADS, **verl_engine.SPECIAL, **settings)
    checkpoints: Any = CheckpointEngineRegistry.new("composable_shard", bucket_size=1 << 20)
    address = jobs.from_first(checkpoints.prepare())
    topology = ShardedCheckpointEngine.build_topology(2, ROLLOUT, [address])
    role, place = (0, run.rank) if jobs.trains else (1, run.rank - 2)
    arguments = {name: values[place] for name, values in topology[role].items()}
    if jobs.trains:
        sends(run, jobs, checkpoints, arguments, shape)
        return
    ours, theirs = (Engine(shape, place, ROLLOUT) for _ in range(2))
    source = weights.WeightLayout.from_json(jobs.from_first())
    checkpoints.wanted = whole_tensors(source, run.rank) if full else layout_of(shape, place, ROLLOUT, run.rank)
    held = checkpoints.wanted.ranks[run.rank]
    checkpoints.tensors = {name: torch.empty(each.shape) for name, each in held.items()} if full else ours.tensors
    worker = SimpleNamespace(checkpoint_engine=checkpoints, server_adapter=Server(ours, full))
    for version in range(1, 1 + UPDATES):
        checkpoints.init_process_group(**arguments)
        asyncio.run(CheckpointEngineWorker.update_weights(worker, global_steps=version))
        checkpoints.finalize()
        theirs.load_weights(jobs.from_first().items())
        check_equal(ours.tensors, theirs.tensors, f"weights of version {version}")
        run.note(f"update {version}", ours.tensors)


def sends(run: Run, jobs: Jobs, checkpoints: Any, arguments: dict[str, Any], shape: Any) -> None:
    """Train with verl's engine, and send weights by the method of verl's worker."""
    if run.rank == 0:
        torch.manual_seed(0)
        verl_engine.AutoModelForCausalLM.from_config(shape).save_pretrained("pretrained")
    torch.distributed.barrier()
    engine = verl_engine.engine_of(run, {"path": str(run.folder / "pretrained")})
    checkpoints.model = engine.module
    jobs.from_first(weights.layout(engine.module).to_json())
    rollout = SimpleNamespace(checkpoint_engine=SimpleNamespace(backend="composable_shard"))
    worker = SimpleNamespace(
        config=SimpleNamespace(rollout=rollout), actor=SimpleNamespace(engine=engine), checkpoint_engine=checkpoints
    )
    for version in range(1, 1 + UPDATES):
        verl_engine.trains(run, engine, first=version, count=1, name=f" {version}")
        checkpoints.init_process_group(**arguments)
        asyncio.run(ActorRolloutRefWorker.update_weights(worker, global_steps=version))
        checkpoints.finalize()
        exported, _ = engine.get_per_tensor_param()
        jobs.from_first({name: weight.clone() for name, weight in exported})
    run.note("plan", str(checkpoints.plan))


def add(title: str, **settings: Any) -> None:
    rows.add(title, lambda run: updates(run, **settings), world=4, sharded=False)


add("custom checkpoint engine, full weights for load_weights: bitwise identical to verl's export", full=True)
add("custom checkpoint engine, slices into vLLM's fused weights: bitwise identical to verl's export", full=False)
add("custom checkpoint engine, slices, tied embeddings", full=False, tie_word_embeddings=True)
