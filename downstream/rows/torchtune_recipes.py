"""Rows for torchtune: the steps of its distributed recipes, from sharding to checkpoints, with its model builders."""

import os
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torchtune import modules, training
from torchtune.models.gemma2 import gemma2
from torchtune.models.llama3 import llama3, lora_llama3
from torchtune.models.llama3_2 import llama3_2
from torchtune.modules.loss import CEWithChunkedOutputLoss
from torchtune.modules.peft import (
    DoRALinear,
    LoRALinear,
    disable_adapter,
    get_adapter_params,
    get_adapter_state_dict,
    get_merged_lora_ckpt,
    set_trainable_params,
)

from _rows import Rows, Run

rows = Rows("torchtune", environment="torchtune", versions=("torchtune", "torchao", "torch"))

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 101,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 64,
    "max_seq_len": 32,
    "intermediate_dim": 128,
}
ADAPTERS: dict[str, Any] = {
    "lora_attn_modules": ["q_proj", "v_proj", "output_proj"],
    "apply_lora_to_mlp": True,
    "lora_rank": 4,
    "lora_alpha": 8.0,
}
Build = Callable[[], nn.Module]


def filled(build: Build) -> dict[str, torch.Tensor]:
    """Return a checkpoint with random weights for the model, with the names that files have."""
    torch.manual_seed(0)
    model = build()
    state = model.state_dict()
    generator = torch.Generator().manual_seed(0)
    return {
        name: 0.1 * torch.randn(value.shape, generator=generator) + ("scale" in name) for name, value in state.items()
    }


def prepared(
    build: Build,
    base: Build | None = None,
    dtype: torch.dtype = torch.float32,
    checkpoints: bool = False,
    compiles: bool = False,
    apart: tuple[str, ...] = (),
    adapters: dict[str, torch.Tensor] | None = None,
    **given: Any,
) -> nn.Module:
    """Set up the model like the recipes: create it on meta, shard it, and load a full checkpoint."""
    with training.set_default_dtype(dtype), torch.device("meta"):
        model = build()
    lora = any(isinstance(each, LoRALinear | DoRALinear) for each in model.modules())
    if lora:
        set_trainable_params(model, get_adapter_params(model))
    if compiles:
        training.compile_model(model, verbose=False)
    if checkpoints:
        training.set_activation_checkpointing(model, auto_wrap_policy={modules.TransformerSelfAttentionLayer})
    conditions = [partial(training.get_shard_conditions, names_to_match=list(apart))]
    training.shard_model(model, conditions, **{"cpu_offload": False} | given)
    if adapters:
        training.load_from_full_model_state_dict(model, dict(adapters), CPU)
    torch.manual_seed(1)
    with training.set_default_dtype(dtype), CPU:
        for module in model.modules():
            if isinstance(module, LoRALinear | DoRALinear) and not adapters:
                module.to_empty(device=CPU)
                module.initialize_parameters()
            if hasattr(module, "rope_init"):
                module.rope_init()
    checkpoint = filled(base or build)
    training.load_from_full_model_state_dict(model, checkpoint, CPU, strict=not lora)
    for module in model.modules():
        if hasattr(module, "initialize_dora_magnitude"):
            module.initialize_dora_magnitude()
    training.validate_no_params_on_meta_device(model)
    return model


ADAMW = partial(torch.optim.AdamW, lr=1e-2)
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Loop:
    """The training loop of torchtune's recipes.

    Args:
        accumulate: the number of batches per step.
        within: whether to use one optimizer per parameter, which runs in backward.
    """

    def __init__(
        self,
        run: Run,
        model: nn.Module,
        make: Callable[..., torch.optim.Optimizer] = ADAMW,
        loss: nn.Module | None = None,
        accumulate: int = 1,
        within: bool = False,
    ) -> None:
        self.run, self.model, self.accumulate = run, model, accumulate
        self.loss = loss or CEWithChunkedOutputLoss(num_output_chunks=4)
        if isinstance(self.loss, CEWithChunkedOutputLoss):
            model.set_num_output_chunks(self.loss.num_output_chunks)
        self.optimizer = self.wrapper = None
        if within:
            each = {parameter: make([parameter]) for parameter in model.parameters()}
            training.register_optim_in_bwd_hooks(model=model, optim_dict=each)
            self.wrapper = training.create_optim_in_bwd_wrapper(model=model, optim_dict=each)
        else:
            self.optimizer = make([each for each in model.parameters() if each.requires_grad])

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.model(tokens)
        labels = torch.hstack((labels[..., 1:], torch.full((labels.shape[0], 1), self.loss.ignore_index)))
        if not isinstance(logits, list):
            labels, logits = labels.reshape(-1), logits.reshape(-1, logits.size(-1))
        return self.loss(logits, labels)

    def train(self, steps: range) -> list[float]:
        seen = []
        for step in steps:
            torch.manual_seed(1000 + 10 * step + self.run.rank)
            count, running = torch.zeros(()), torch.zeros(())
            for part in range(self.accumulate):
                tokens, labels = batch(self.run, step, part)
                here = (labels != self.loss.ignore_index).sum()
                loss = self.forward(tokens, labels) * here
                count, running = count + here, running + loss.detach()
                if self.wrapper:
                    dist.all_reduce(count)
                    loss = loss * (self.run.world / count)
                loss.backward()
            if self.optimizer:
                dist.all_reduce(count)
                dist.all_reduce(running)
                training.scale_grads(self.model, self.run.world / count)
                norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=1.0)
                seen.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
            seen.append((running / count).item())
        return seen

    def evaluated(self) -> list[float]:
        self.model.eval()
        with torch.no_grad():
            loss = self.forward(*batch(self.run, 50))
            logits = self.model(batch(self.run, 51)[0])
        self.model.train()
        return [loss.item(), torch.cat(logits if isinstance(logits, list) else [logits], dim=1)]

    def saved(self) -> dict[str, Any]:
        """Return the full optimizer state on rank 0, gathered like in the checkpoint client of the recipes."""
        first = self.run.rank == 0
        if self.optimizer:
            return training.get_full_optimizer_state_dict(self.model, self.optimizer, first, device=CPU)
        return {
            name: training.get_full_optimizer_state_dict(self.model, each, first, device=CPU)
            for name, each in self.wrapper.optim_map.items()
        }

    def load(self, state: dict[str, Any]) -> None:
        if self.optimizer:
            training.load_from_full_optimizer_state_dict(self.model, self.optimizer, state, CPU)
        else:
            for name, each in state.items():
                training.load_from_full_optimizer_state_dict(self.model, self.wrapper.optim_map[name], each, CPU)


def batch(run: Run, step: int, part: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels. The number of ignored labels differs between ranks."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * part + run.rank)
    tokens = torch.randint(SIZES["vocab_size"], (2, 12), generator=generator)
    labels = tokens.clone()
    labels[:, : 1 + run.rank] = -100
    return tokens, labels


def from_first(*values: Any) -> list[Any]:
    """Broadcast the values of rank 0 to all ranks."""
    box = list(values)
    dist.broadcast_object_list(box)
    return box


def life(run: Run, build: Build, settings: dict[str, Any], loop: dict[str, Any], saves: bool = True) -> nn.Module:
    """Train, evaluate and train again; then save, load into another model and optimizer, and train both."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = prepared(build, **settings)
    run.sharded(model)
    one = Loop(run, model, **loop)
    run.note("losses", one.train(range(3)))
    run.note("evaluated", one.evaluated())
    run.note("after evaluation", one.train(range(3, 4)))
    state = training.gather_cpu_state_dict(model, run.rank == 0, device=CPU)
    run.note("weights", state)
    if saves:
        kept = one.saved()
        run.note("optimizer", kept)
        state, kept = from_first(state, kept)  # the recipes write files, which all ranks read
        other = prepared(build, **settings)
        training.load_from_full_model_state_dict(other, state, CPU, strict=True)
        two = Loop(run, other, **loop)
        two.load(kept)
        run.note("both", [one.train(range(4, 6)), two.train(range(4, 6))])
        run.note("loaded and trained", training.gather_cpu_state_dict(other, run.rank == 0, device=CPU))
    return model


def add(
    title: str,
    build: Build,
    timeout: float = 180.0,
    loop: dict[str, Any] | None = None,
    saves: bool = True,
    row: dict[str, Any] | None = None,
    **settings: Any,
) -> None:
    """Add a row that runs `life` with these settings."""

    def program(run: Run) -> None:
        life(run, build, settings, loop or {}, saves)

    rows.add(title, program, timeout=timeout, **row or {})


FULL = partial(llama3, **SIZES, attn_dropout=0.1)
PLAIN = partial(llama3, **SIZES)
LORA = partial(lora_llama3, **SIZES, **ADAPTERS, lora_dropout=0.1)
DORA = partial(lora_llama3, **SIZES, **ADAPTERS, use_dora=True)
WIDE = SIZES | {"embed_dim": 256, "intermediate_dim": 256}  # NF4 has blocks of 64 values in groups of 256
QLORA = partial(lora_llama3, **WIDE, **ADAPTERS, quantize_base=True)

add("full finetuning of llama3, its checkpoint and another run from it", FULL)
add(
    "separate groups for embedding and output (custom_sharded_layers), the output called for each chunk",
    FULL,
    row={"tolerance": 1e-5, "why": "ours reduces the gradients of each call and then adds them; FSDP2 adds them first"},
    apart=("tok_embeddings", "output"),
)
add("not resharded after forward", FULL, reshard_after_forward=False)
add("llama3.2, whose head is its embedding", partial(llama3_2, **SIZES))
add("gemma2: embeddings scaled and tied, logits capped", partial(gemma2, **{**SIZES, "head_dim": 16, "num_layers": 3}))
add("uneven shards", partial(llama3, **{**SIZES, "vocab_size": 103, "intermediate_dim": 61}))
add("CEWithChunkedOutputLoss without chunks of the model", FULL, loop={"loss": nn.CrossEntropyLoss()})
add("gradients accumulated over three batches, then scaled", FULL, loop={"accumulate": 3})
add("activation checkpoints", FULL, checkpoints=True)
add("bfloat16", FULL, dtype=torch.bfloat16)
add("optimizers in backward", FULL, loop={"within": True})
add("optimizers in backward, with activation checkpoints", FULL, checkpoints=True, loop={"within": True})
add("LoRA", LORA, base=PLAIN)
add("LoRA with activation checkpoints, over two batches", LORA, base=PLAIN, checkpoints=True, loop={"accumulate": 2})
add("DoRA", DORA, base=PLAIN)
add("QLoRA: a frozen base in NF4", QLORA, base=partial(llama3, **WIDE), saves=False)
add(
    "QLoRA, with activation checkpoints, bfloat16",
    QLORA,
    base=partial(llama3, **WIDE),
    saves=False,
    checkpoints=True,
    dtype=torch.bfloat16,
)


def backend(name: str) -> None:
    os.environ["TORCH_COMPILE_BACKEND"] = name  # torchtune reads this variable


@rows("compile_model and compile_loss, aot_eager", timeout=300)
def compiled(run: Run) -> None:
    backend("aot_eager")
    loss = training.compile_loss(CEWithChunkedOutputLoss(num_output_chunks=4), verbose=False)
    life(run, PLAIN, {"compiles": True}, {"loss": loss})


@rows("compile_model over activation checkpoints, aot_eager", timeout=300)
def compiled_checkpoints(run: Run) -> None:
    backend("aot_eager")
    life(run, PLAIN, {"compiles": True, "checkpoints": True}, {}, saves=False)


@rows("compile_model of LoRA, aot_eager", timeout=300)
def compiled_adapters(run: Run) -> None:
    backend("aot_eager")
    life(run, partial(LORA, lora_dropout=0.0), {"compiles": True, "base": PLAIN}, {})


@rows("cpu_offload, on a machine without an accelerator")
def offloaded(run: Run) -> None:
    model = life(run, PLAIN, {"cpu_offload": True}, {"make": MOMENTUM})
    run.agrees("weights", training.gather_cpu_state_dict(model, True, device=CPU), alone(run, steps=6))


def alone(run: Run, steps: int) -> dict[str, torch.Tensor]:
    """Train the unsharded model on the batches of all ranks, and return its state dict."""
    model = PLAIN()
    model.load_state_dict(filled(PLAIN))
    optimizer = MOMENTUM(model.parameters())
    for step in range(steps):
        total, count = torch.zeros(()), 0
        for rank in range(run.world):
            tokens, labels = batch(SimpleNamespace(rank=rank), step)
            output = model(tokens)[:, :-1].flatten(0, 1)
            total = total + nn.functional.cross_entropy(output, labels[:, 1:].flatten(), reduction="sum")
            count += (labels != -100).sum()
        (total / count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@rows("LoRA: adapters saved separately, loaded into the base, merged")
def adapters(run: Run) -> None:
    model = life(run, LORA, {"base": PLAIN}, {}, saves=False)
    state = training.gather_cpu_state_dict(model, run.rank == 0, device=CPU)
    (state,) = from_first(state)
    merged = get_merged_lora_ckpt({name: value.clone() for name, value in state.items()}, rank=4, alpha=8.0)
    run.note("merged", merged)
    alone = get_adapter_state_dict({name: value.clone() for name, value in state.items()}, device=None)
    run.note("adapters", alone)
    other = prepared(LORA, base=PLAIN, adapters=alone)
    run.note("loaded", Loop(run, other).evaluated())
    whole = PLAIN()
    whole.load_state_dict(merged)
    whole.eval()
    model.eval()
    tokens = batch(run, 60)[0]
    with torch.no_grad():
        run.agrees("merged outputs", torch.cat(model(tokens), dim=1), whole(tokens), 1e-4)


@rows("LoRA: disable_adapter for a reference model, as in DPO")
def reference(run: Run) -> None:
    dist.init_process_group("gloo")
    model = prepared(LORA, base=PLAIN)
    run.sharded(model)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    losses = []
    for step in range(3):
        torch.manual_seed(run.rank)
        tokens = batch(run, step)[0]
        scores = model(tokens).log_softmax(-1).amax(-1).sum(-1)
        with torch.no_grad(), disable_adapter(model):
            known = model(tokens).log_softmax(-1).amax(-1).sum(-1)
        chosen, rejected = scores - known
        loss = -nn.functional.logsigmoid(0.1 * (chosen - rejected))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item(), known])
    run.note("losses", losses)
    run.weights(model)


@rows("generation with a key-value cache after training")
def generated(run: Run) -> None:
    from torchtune.generation import generate

    model = life(run, PLAIN, {}, {"loss": nn.CrossEntropyLoss()}, saves=False)
    model.eval()
    with CPU:
        model.setup_caches(batch_size=2, dtype=torch.float32, decoder_max_seq_len=20)
    with torch.no_grad():
        tokens, logits = generate(model, batch(run, 70)[0][:, :5], max_generated_tokens=6, top_k=1, pad_id=0)
    run.note("tokens", tokens)
    run.note("logits", logits)


@rows("replicas of shards by dp_mesh", world=4)
def replicas(run: Run) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    life(run, FULL, {"dp_mesh": mesh}, {})
