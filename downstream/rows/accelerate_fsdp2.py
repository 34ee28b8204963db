"""Rows for Accelerate with its FSDP2 plugin: the training code of its guides, with models of Transformers."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
from _accelerate_on_cpu import fsdp2_on_cpu
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import (
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    ParallelismConfig,
    TorchDynamoPlugin,
    find_executable_batch_size,
    get_fsdp2_grad_scaler,
    merge_fsdp_weights,
    set_seed,
)
from torch import nn
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

from _rows import Rows, Run

rows = Rows("Accelerate", environment="transformers4", versions=("torch", "accelerate", "transformers"))

VOCABULARY = 97


def llama(**changes: Any) -> LlamaForCausalLM:
    """Return a Llama model with grouped heads, and with odd widths so that shards are uneven."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 36,
        "intermediate_size": 71,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "max_position_embeddings": 32,
    }
    return LlamaForCausalLM(LlamaConfig(**settings | changes))


def gpt2(**changes: Any) -> GPT2LMHeadModel:
    """Return a GPT-2 model, which has a tied head and dropout in all layers."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 36, "n_layer": 2, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**settings | changes))


def batches(count: int = 6, size: int = 2, length: int = 12) -> DataLoader:
    """Return a loader with `count` batches per rank, for two ranks."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (count * size * 2, length), generator=generator)
    return DataLoader([{"input_ids": row, "labels": row} for row in tokens], batch_size=size)


def accelerator_of(plugin: dict[str, Any] | None = None, **settings: Any) -> Accelerator:
    """Return an accelerator with FSDP2 and one parameter group per block."""
    fsdp2_on_cpu()
    set_seed(0)
    chosen = {"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap", "reshard_after_forward": True}
    return Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(**chosen | (plugin or {})), **settings)


def adamw(model: nn.Module, rate: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=rate)


def train(accelerator: Accelerator, model: nn.Module, optimizer: Any, loader: Any, clip: float | None = None) -> Any:
    """Run the loop of Accelerate's guide; return the losses, and the gradient norms before clipping."""
    losses, norms = [], []
    model.train()
    set_seed(5, device_specific=True)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if clip is not None and accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), clip))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def evaluate(accelerator: Accelerator, model: nn.Module, loader: Any) -> torch.Tensor:
    """Return the logits of all samples, on every rank."""
    model.eval()
    found = []
    with torch.no_grad():
        for batch in loader:
            found.append(accelerator.gather_for_metrics(model(**batch).logits))
    return torch.cat(found)


def trains(run: Run, accelerator: Accelerator, model: nn.Module, clip: float | None = 0.5, count: int = 4) -> Any:
    """Prepare, train, evaluate, train again, and record the results; return model, optimizer and loader."""
    model, optimizer, loader, test = accelerator.prepare(model, adamw(model), batches(count), batches(1))
    run.sharded(model)
    run.note("training", train(accelerator, model, optimizer, loader, clip))
    run.note("logits", evaluate(accelerator, model, test))
    run.note("training after evaluation", train(accelerator, model, optimizer, test, clip))
    run.weights(model)
    return model, optimizer, loader


@rows("prepare, train, clip_grad_norm_, evaluate with gather_for_metrics, continue training")
def prepares(run: Run) -> None:
    trains(run, accelerator_of(), llama())


@rows("gather_for_metrics drops the padding of an uneven last batch")
def gathers(run: Run) -> None:
    accelerator = accelerator_of()
    model = llama()
    tokens = torch.randint(0, VOCABULARY, (7, 12), generator=torch.Generator().manual_seed(3))
    uneven = DataLoader([{"input_ids": row, "labels": row} for row in tokens], batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, adamw(model), uneven)
    run.sharded(model)
    run.note("training", train(accelerator, model, optimizer, loader))
    logits = evaluate(accelerator, model, loader)
    assert len(logits) == 7, logits.shape
    run.note("logits", logits)


@rows("tied weights and dropout (GPT-2)")
def tied(run: Run) -> None:
    model, *_ = trains(run, accelerator_of(), gpt2())
    assert model.lm_head.weight is model.transformer.wte.weight


@rows("reshard_after_forward=False")
def keeps(run: Run) -> None:
    trains(run, accelerator_of({"reshard_after_forward": False}), llama())


class Mixer(nn.Module):
    """A block that is not from Transformers: one feed-forward layer over positions, then one over features."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Sequential(nn.LayerNorm(length), nn.Linear(length, 29), nn.GELU(), nn.Linear(29, length))
        self.widths = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 71), nn.GELU(), nn.Linear(71, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.tokens(x.transpose(1, 2)).transpose(1, 2)
        return x + self.widths(x)


@rows("size_based_wrap of a model without lists of modules")
def by_size(run: Run) -> None:
    accelerator = accelerator_of({"auto_wrap_policy": "size_based_wrap", "min_num_params": 2000})
    torch.manual_seed(0)
    blocks = nn.Sequential(Mixer(35, 12), nn.Dropout(0.1), Mixer(35, 12))
    model: Any = nn.Sequential(nn.Embedding(VOCABULARY, 35), blocks, nn.Linear(35, VOCABULARY))
    model, optimizer, loader = accelerator.prepare(model, adamw(model), batches(4))
    run.sharded(model)
    set_seed(5, device_specific=True)
    losses = []
    for batch in loader:
        loss = nn.functional.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
        accelerator.backward(loss)
        losses += [loss.item(), accelerator.clip_grad_norm_(model.parameters(), 0.5).item()]
        optimizer.step()
        optimizer.zero_grad()
    run.note("losses", losses)
    run.weights(model)


@rows("no_wrap: one group")
def one_group(run: Run) -> None:
    trains(run, accelerator_of({"auto_wrap_policy": "no_wrap"}), llama())


@rows("transformer_cls_names_to_wrap: separate groups for attention and MLP")
def by_class(run: Run) -> None:
    trains(run, accelerator_of({"transformer_cls_names_to_wrap": ["LlamaAttention", "LlamaMLP"]}), llama())


@rows("cpu_offload")
def offloads(run: Run) -> None:
    accelerator = accelerator_of({"cpu_offload": True})
    model = llama()
    model, optimizer, loader = accelerator.prepare(model, adamw(model), batches(4))
    run.sharded(model)
    run.note("training", train(accelerator, model, optimizer, loader))
    run.weights(model)
    whole = unsharded(run, llama(), 4)
    run.agrees("weights", dict(model.named_parameters()), dict(whole.named_parameters()), 1e-4)


def unsharded(run: Run, model: nn.Module, count: int) -> nn.Module:
    """Train the unsharded model on the batches of all ranks in this process, and return it."""
    optimizer = adamw(model)
    turns = iter(batches(count))
    for together in zip(*[turns] * run.world, strict=True):
        torch.stack([model(**batch).loss for batch in together]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@rows("ignored_modules")
def ignores(run: Run) -> None:
    model = llama()
    for parameter in model.model.norm.parameters():
        parameter.requires_grad_(False)
    trains(run, accelerator_of({"ignored_modules": [model.model.norm]}), model)


@rows("accumulate: gradients of three batches, gradient sync only for the last")
def accumulates(run: Run) -> None:
    trains(run, accelerator_of(gradient_accumulation_steps=3), gpt2(), count=7)


@rows("accumulate with sync_each_batch")
def accumulates_synchronized(run: Run) -> None:
    plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)
    trains(run, accelerator_of(gradient_accumulation_plugin=plugin), llama())


@rows("explicit no_sync")
def no_sync(run: Run) -> None:
    accelerator = accelerator_of()
    model = llama()
    model, optimizer, loader = accelerator.prepare(model, adamw(model), batches(6))
    run.sharded(model)
    norms = []
    for first, second in pairwise(loader):
        with accelerator.no_sync(model):
            accelerator.backward(model(**first).loss)
        accelerator.backward(model(**second).loss)
        norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
    run.note("norms", norms)
    run.weights(model)


@rows("mixed_precision='bf16'")
def bf16(run: Run) -> None:
    trains(run, accelerator_of(mixed_precision="bf16"), llama())


@rows("a MixedPrecisionPolicy of the plugin: bf16, reduced in fp32, and weights that begin as bf16")
def bf16_policy(run: Run) -> None:
    names = ("param_dtype", "reduce_dtype", "output_dtype")
    policy = dict(zip(names, (torch.bfloat16, torch.float32, torch.float32), strict=True))
    accelerator = accelerator_of({"mixed_precision_policy": policy}, mixed_precision="bf16")
    trains(run, accelerator, llama().to(torch.bfloat16))


@rows("mixed_precision='fp16' with a gradient scaler")
def fp16(run: Run) -> None:
    accelerator = accelerator_of(mixed_precision="fp16")
    # Accelerate sets neither on a CPU.
    accelerator.scaler = get_fsdp2_grad_scaler(device="cpu", init_scale=2.0**17, growth_interval=2)
    accelerator.native_amp = True
    _, optimizer, _ = trains(run, accelerator, llama(), count=6)
    run.note("scale", accelerator.scaler.get_scale())
    run.note("skipped", optimizer.step_was_skipped)


@rows("activation_checkpointing of the plugin")
def checkpoints(run: Run) -> None:
    trains(run, accelerator_of({"activation_checkpointing": True}), llama(use_cache=False))


@rows("activation_checkpointing of the plugin, dropout, accumulation")
def checkpoints_dropout(run: Run) -> None:
    trains(
        run, accelerator_of({"activation_checkpointing": True}, gradient_accumulation_steps=2), gpt2(use_cache=False)
    )


@rows("activation_checkpointing_offload of the plugin")
def checkpoints_offloaded(run: Run) -> None:
    plugin = {"activation_checkpointing": True, "activation_checkpointing_offload": True}
    trains(run, accelerator_of(plugin), llama(use_cache=False))


@rows("cpu_ram_efficient_loading: rank 0 has the weights, which are broadcast into meta tensors")
def efficient(run: Run) -> None:
    accelerator = accelerator_of({"cpu_ram_efficient_loading": True})
    model = llama()
    if run.rank:
        for parameter in model.parameters():
            nn.init.constant_(parameter, 3.0)
    trains(run, accelerator, model)


@rows("cpu_ram_efficient_loading of tied weights, with checkpoints, in bf16")
def efficient_tied(run: Run) -> None:
    plugin = {"cpu_ram_efficient_loading": True, "activation_checkpointing": True}
    trains(run, accelerator_of(plugin, mixed_precision="bf16"), gpt2(use_cache=False))


@rows("cpu_ram_efficient_loading: from_pretrained reads on rank 0 only")
def efficient_pretrained(run: Run) -> None:
    accelerator = accelerator_of({"cpu_ram_efficient_loading": True})
    if accelerator.is_main_process:
        llama().save_pretrained("pretrained")
    accelerator.wait_for_everyone()
    trains(run, accelerator, LlamaForCausalLM.from_pretrained("pretrained"))


def resumes(run: Run, kind: str, make: Any) -> None:
    """Train, save, and continue training; then load, continue again, and check that the losses are equal."""
    accelerator = accelerator_of({"state_dict_type": kind})
    model = make()
    model, optimizer, loader = accelerator.prepare(model, adamw(model), batches(3))
    schedule = get_linear_schedule_with_warmup(optimizer, 2, 20)
    schedule = accelerator.prepare(schedule)
    accelerator.register_for_checkpointing(schedule)
    run.sharded(model)
    train(accelerator, model, optimizer, loader)
    schedule.step()
    accelerator.save_state("saved")
    run.files("saved", ignore=(".pkl",))
    runs = []
    for _ in range(2):
        runs.append(train(accelerator, model, optimizer, loader))
        run.weights(model, f"weights {len(runs)}")
        accelerator.load_state("saved")
        run.note(f"rates {len(runs)}", schedule.get_last_lr())
    assert runs[0] == runs[1], runs
    run.note("training", runs)


for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
    for make in (llama, gpt2):
        rows.add(
            f"save_state and load_state, {kind}, {make.__name__}",
            lambda run, kind=kind, make=make: resumes(run, kind, make),
        )


def loads(run: Run, kind: str) -> None:
    """Load a checkpoint into a new model and a new optimizer, and continue training."""
    accelerator = accelerator_of({"state_dict_type": kind})
    model = llama()
    model, optimizer, loader = accelerator.prepare(model, adamw(model), batches(3))
    run.sharded(model)
    train(accelerator, model, optimizer, loader)
    accelerator.save_state("saved")
    again, optimizer = llama(initializer_range=0.5), None
    accelerator.free_memory()
    again, optimizer, other = accelerator.prepare(again, adamw(again), batches(3))
    run.sharded(again, "sharded again")
    accelerator.load_state("saved")
    run.note("training", train(accelerator, again, optimizer, other))
    run.weights(again)


rows.add("load_state into a new model, SHARDED_STATE_DICT", lambda run: loads(run, "SHARDED_STATE_DICT"))
rows.add("load_state into a new model, FULL_STATE_DICT", lambda run: loads(run, "FULL_STATE_DICT"))


@rows("get_state_dict, save_model in pieces, unwrap_model and save_pretrained")
def saves(run: Run) -> None:
    accelerator = accelerator_of()
    model = gpt2()
    model, optimizer, loader = accelerator.prepare(model, adamw(model), batches(2))
    run.sharded(model)
    train(accelerator, model, optimizer, loader)
    run.note("state", accelerator.get_state_dict(model))
    accelerator.save_model(model, "whole")
    accelerator.save_model(model, "pieces", max_shard_size="20KB")
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(
        "pretrained",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    run.files(".")
    if accelerator.is_main_process:
        loaded = GPT2LMHeadModel.from_pretrained("pretrained")
        run.note("loaded", loaded.state_dict())
    train(accelerator, model, optimizer, loader)
    run.weights(model)


@rows("merge_fsdp_weights of a sharded checkpoint")
def merges(run: Run) -> None:
    accelerator = accelerator_of({"state_dict_type": "SHARDED_STATE_DICT"})
    model = llama()
    model, optimizer, loader = accelerator.prepare(model, adamw(model), batches(2))
    run.sharded(model)
    train(accelerator, model, optimizer, loader)
    accelerator.save_state("saved")
    merge_fsdp_weights("saved/pytorch_model_fsdp_0", "merged")
    accelerator.wait_for_everyone()
    run.files("merged")
    if accelerator.is_main_process:
        (merged,) = Path("merged").glob("*.safetensors")
        from safetensors.torch import load_file

        again = llama(initializer_range=0.5)
        again.load_state_dict(load_file(merged))
        run.note("merged", again.state_dict())


@rows("two optimizers with their own schedulers")
def two_optimizers(run: Run) -> None:
    accelerator = accelerator_of()
    model = llama()
    last = [each for name, each in model.named_parameters() if "layers.1" in name or "lm_head" in name]
    first = [each for each in model.parameters() if all(each is not other for other in last)]
    optimizers: list[Any] = [torch.optim.SGD(first, lr=0.1, momentum=0.9), torch.optim.AdamW(last, lr=0.01)]
    schedulers: list[Any] = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in optimizers]
    model, loader, *others = accelerator.prepare(model, batches(4), *optimizers, *schedulers)
    optimizers, schedulers = others[:2], others[2:]
    run.sharded(model)
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        for each in others:
            each.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses.append(loss.item())
    run.note("losses", losses)
    run.note("rates", [each.get_last_lr() for each in schedulers])
    run.weights(model)


@rows("parameter groups, some weights frozen")
def frozen(run: Run) -> None:
    accelerator = accelerator_of()
    model = llama()
    model.model.embed_tokens.weight.requires_grad_(False)
    decayed = [each for each in model.parameters() if each.requires_grad and each.ndim > 1]
    others = [each for each in model.parameters() if each.requires_grad and each.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer: Any = torch.optim.AdamW(groups, lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, batches(3))
    run.sharded(model)
    run.note("training", train(accelerator, model, optimizer, loader, 1.0))
    run.weights(model)


@rows("find_executable_batch_size: the first try fails within a block")
def executable(run: Run) -> None:
    accelerator = accelerator_of()
    model = llama()
    model, optimizer = accelerator.prepare(model, adamw(model))
    run.sharded(model)

    def scarce(module: nn.Module, args: Any) -> None:
        if args[0].shape[0] > 2:
            raise RuntimeError("CUDA out of memory. (simulated)")

    model.model.layers[1].mlp.register_forward_pre_hook(scarce)
    tried = []

    @find_executable_batch_size(starting_batch_size=4)
    def attempt(batch_size: int) -> Any:
        tried.append(batch_size)
        if tried[1:]:
            model.reset_iter_state()  # FSDP2 requires this call after an exception
        return train(accelerator, model, optimizer, accelerator.prepare(batches(3, batch_size)))

    run.note("training", attempt())
    run.note("tried", tried)
    run.weights(model)


@rows("HSDP through ParallelismConfig, four ranks", world=4)
def hsdp(run: Run) -> None:
    accelerator = accelerator_of(parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2))
    trains(run, accelerator, llama())


@rows("dataloader dispatch_batches, split_batches and stateful loops")
def dispatches(run: Run) -> None:
    config = DataLoaderConfiguration(dispatch_batches=True, split_batches=True)
    trains(run, accelerator_of(dataloader_config=config), llama())


def compiles(run: Run, **dynamo: Any) -> None:
    torch._inductor.config.compile_threads = 1  # a process pool does not work in forked ranks
    trains(run, accelerator_of(dynamo_plugin=TorchDynamoPlugin(**dynamo)), llama(), count=2)


for backend in ("aot_eager", "inductor"):
    rows.add(
        f"dynamo_plugin, regional compilation, {backend}",
        lambda run, backend=backend: compiles(run, backend=backend, use_regional_compilation=True),
        timeout=400.0,
    )
rows.add("dynamo_plugin, the whole model, aot_eager", lambda run: compiles(run, backend="aot_eager"), timeout=400.0)


@rows("regional compilation of checkpointed blocks", timeout=400.0)
def compiles_checkpoints(run: Run) -> None:
    dynamo = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=True)
    model = llama(use_cache=False)
    trains(run, accelerator_of({"activation_checkpointing": True}, dynamo_plugin=dynamo), model, count=2)
