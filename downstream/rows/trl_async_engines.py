"""Rows for TRL's AsyncGRPOTrainer: its weight update with `WeightTransferProtocol`, and from all trainers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from _jobs import Jobs, check_equal, full_values
from _vllm_stub import Engine, layout_of
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
from trl.experimental.async_grpo import AsyncGRPOTrainer

from _rows import Rows, Run
from composable_shard import weights

rows = Rows(
    "TRL: weights for an inference engine (AsyncGRPO)",
    environment="trl_engines",
    versions=("trl", "transformers", "accelerate", "torch"),
    uses_ours=True,
)

ENGINE, UPDATES = 2, 3
SIZES = {"vocab_size": 97, "hidden_size": 40, "intermediate_size": 72, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 64}


class Transfer:
    """TRL's WeightTransferProtocol with no engine: keeps the weights that it gets, and the order of the calls."""

    def __init__(self) -> None:
        self.received: dict[str, torch.Tensor] = {}
        self.calls: list[str] = []

    def pause(self) -> None:
        self.calls.append("pause")

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.received = {name: weight.detach().clone() for name, weight in iterator}
        self.calls.append("send_weights")

    def resume(self) -> None:
        self.calls.append("resume")


class ShardedTrainer(AsyncGRPOTrainer):
    """Sends weights from all ranks. TRL exhausts this iterator on all of them while the engine is paused."""

    plan: weights.Plan
    group: dist.ProcessGroup

    def _streaming_iter(self) -> Iterator[tuple[str, torch.Tensor]]:
        weights.send(self.model, self.plan, self.group)
        yield from ()


def updater(kind: type[AsyncGRPOTrainer], model: nn.Module, accelerator: Accelerator) -> Any:
    """Make a trainer that can only update an engine. Its constructor asks for a GPU kernel from the hub."""
    made: Any = object.__new__(kind)
    made.model, made.accelerator, made.weight_transfer = model, accelerator, Transfer()
    made.rollout_worker, made.model_version, made._lora_sync = None, 0, False
    made._metrics = {"train": {f"perf/weight_sync{part}_s": [] for part in ("", "_pause", "_barrier", "_transfer")}}
    return made


def updates(run: Run, **settings: Any) -> None:
    jobs = Jobs.start(run)
    shape = LlamaConfig(**SIZES | HEADS | settings)
    if not jobs.trains:
        receives(run, jobs, shape)
        return
    torch.manual_seed(0)
    model = LlamaForCausalLM(shape)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    run.sharded(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    accelerator = Accelerator(cpu=True)
    theirs, ours = (updater(kind, model, accelerator) for kind in (AsyncGRPOTrainer, ShardedTrainer))
    ours.plan, ours.group = jobs.plan(weights.layout(model)), jobs.group
    run.note("plan", str(ours.plan))
    for step in range(UPDATES):
        batch = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(10 * step + run.rank))
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        theirs._sync_weight()
        ours._sync_weight()
        jobs.from_first(theirs.weight_transfer.received)
    run.note("calls", [[each.weight_transfer.calls, each.model_version] for each in (theirs, ours)])
    run.note("weights", full_values(model))


def receives(run: Run, jobs: Jobs, shape: Any) -> None:
    """Receive updates as a rank of the engine, and compare them with full weights of TRL's path, loaded as in vLLM."""
    rank = run.rank - jobs.receivers[0]
    ours, theirs = (Engine(shape, rank, ENGINE) for _ in range(2))
    plan = jobs.plan(layout_of(shape, rank, ENGINE, run.rank))
    for version in range(UPDATES):
        update = weights.receive(plan, ours.tensors, jobs.group)
        theirs.load_weights(jobs.from_first().items())
        check_equal(ours.tensors, theirs.tensors, f"weights of version {version}")
        run.note(f"update {version}", [update.version, update.sent + update.received, ours.tensors])


def add(title: str, **settings: Any) -> None:
    rows.add(title, lambda run: updates(run, **settings), world=4, sharded=False)


add("AsyncGRPOTrainer._sync_weight sends slices from all ranks: bitwise identical to its full weights")
add(
    "AsyncGRPOTrainer._sync_weight, one key-value head for two engine ranks, tied embeddings",
    num_key_value_heads=1,
    tie_word_embeddings=True,
)
