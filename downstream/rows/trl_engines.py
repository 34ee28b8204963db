"""Rows for TRL: the weights that an engine gets while GRPO trains, by TRL's path and by composable_shard.weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from _jobs import Jobs, check_equal, full_values
from _vllm_stub import Engine, layout_of
from torch import nn
from transformers import LlamaForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.distributed import DistributedBackend
from trl.generation.vllm_generation import VLLMGeneration
from trl_trainers import ONLINE, arguments, config, curve, prompts, short_words, tokenizer

from _rows import Rows, Run
from composable_shard import weights

rows = Rows(
    "TRL: weights for an inference engine",
    environment="adapters",
    versions=("trl", "transformers", "accelerate", "peft", "torch"),
    uses_ours=True,
)

ENGINE = 2  # ranks of the engine


class Client:
    """The server's client of TRL, which requires vLLM and a GPU: keeps the weights that it is asked to send."""

    def __init__(self) -> None:
        self.received: dict[str, torch.Tensor] = {}
        self.resets = 0

    def update_named_params(self, metadata: list[Any], weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.received = {name: weight.detach().clone() for name, weight in weights}
        found = [(name, str(each.dtype).removeprefix("torch."), [*each.shape]) for name, each in self.received.items()]
        assert found == metadata

    def reset_prefix_cache(self) -> None:
        self.resets += 1


def generation(kind: type[VLLMGeneration], trainer: GRPOTrainer) -> Any:
    """Make TRL's object that updates an engine, without its connection to a server."""
    made: Any = object.__new__(kind)
    made.model, made.accelerator, made.mode = trainer.model, trainer.accelerator, "server"
    made._dist, made._weight_metadata, made.vllm_client = DistributedBackend(trainer.accelerator), None, Client()
    return made


class ShardedGeneration(VLLMGeneration):
    """Sends weights from all ranks, without a gather of full weights."""

    plan: weights.Plan
    group: dist.ProcessGroup

    def sync_weights(self) -> None:
        weights.send(self.model, self.plan, self.group)
        if self.accelerator.is_main_process:
            self.vllm_client.reset_prefix_cache()


class Syncs(TrainerCallback):
    """Updates the engine on both paths after each step, as `GRPOTrainer` does before it generates with vLLM."""

    def __init__(self, jobs: Jobs) -> None:
        self.jobs, self.plan = jobs, None
        self.trainer: Any = None
        self.updates: list[list[int]] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if self.plan is None:
            self.plan = self.jobs.plan(weights.layout(self.trainer.model))
            self.theirs, self.ours = (generation(kind, self.trainer) for kind in (VLLMGeneration, ShardedGeneration))
            self.ours.plan, self.ours.group = self.plan, self.jobs.group
        self.theirs.sync_weights()
        self.ours.sync_weights()
        self.jobs.from_first(self.theirs.vllm_client.received)
        self.updates.append([self.theirs.vllm_client.resets, self.ours.vllm_client.resets])


def trains_with_engine(run: Run, args: Any, **settings: Any) -> None:
    jobs = Jobs.start(run)
    shape = config(intermediate_size=72, **settings)
    if not jobs.trains:
        receives(run, jobs, shape, args["max_steps"])
        return
    if run.rank == 0:
        torch.manual_seed(0)
        LlamaForCausalLM(shape).save_pretrained("pretrained")
    dist.barrier()
    syncs = Syncs(jobs)
    model: nn.Module = LlamaForCausalLM.from_pretrained("pretrained")
    trainer = GRPOTrainer(
        model,
        args=arguments(GRPOConfig, **args),
        reward_funcs=short_words,
        train_dataset=prompts(),
        processing_class=tokenizer(),
        callbacks=[syncs],
    )
    syncs.trainer = trainer
    trainer.train()
    run.sharded(trainer.model)
    run.note("training", curve(trainer))
    run.note("plan", str(syncs.plan))
    run.note("updates", syncs.updates)
    run.note("weights", full_values(trainer.model))


def receives(run: Run, jobs: Jobs, shape: Any, updates: int) -> None:
    """Receive updates as a rank of the engine, and compare them with full weights of TRL's path, loaded as in vLLM."""
    rank = run.rank - jobs.receivers[0]
    ours, theirs = (Engine(shape, rank, ENGINE) for _ in range(2))
    plan = jobs.plan(layout_of(shape, rank, ENGINE, run.rank))
    for version in range(updates):
        update = weights.receive(plan, ours.tensors, jobs.group)
        full = jobs.from_first()
        theirs.load_weights(full.items())
        check_equal(ours.tensors, theirs.tensors, f"weights of version {version}")
        run.note(f"update {version}", [update.version, update.sent + update.received, ours.tensors])


@rows(
    "GRPO updates two engine ranks with vLLM's fused weights: bitwise as VLLMGeneration.sync_weights",
    world=4,
    sharded=False,
)
def grpo(run: Run) -> None:
    trains_with_engine(run, ONLINE)


@rows("GRPO, tied embeddings", world=4, sharded=False)
def grpo_tied(run: Run) -> None:
    trains_with_engine(run, ONLINE, tie_word_embeddings=True)
