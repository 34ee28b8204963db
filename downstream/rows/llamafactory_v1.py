"""Rows for LLaMA-Factory v1: its training commands with the FSDP2 plugin, on a CPU."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _families import DECODER
from llamafactory.v1.accelerator import helper
from llamafactory.v1.accelerator.interface import DistributedInterface
from llamafactory.v1.plugins.model_plugins.peft import merge_and_export_model
from llamafactory.v1.trainers import rm_trainer, sft_trainer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from _rows import Rows, Run

rows = Rows("LLaMA-Factory v1", environment="llamafactory", versions=("llamafactory", "torch", "transformers", "peft"))

helper.synchronize = lambda: None  # waits for an accelerator, and raises an error without one

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCABULARY = len(SPECIAL) + len(BYTES)
WORDS = ("sum", "of", "the", "two", "best", "times", "and", "worst")


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte."""
    made = Tokenizer(models.BPE({word: i for i, word in enumerate([*SPECIAL, *BYTES])}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token=SPECIAL[0], eos_token=SPECIAL[2])


SIZES: dict[str, Any] = DECODER | {"vocab_size": VOCABULARY, "head_dim": 10, "max_position_embeddings": 256}


def qwen(tied: bool = False) -> nn.Module:
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=tied))


def opt(tied: bool = False) -> nn.Module:
    sizes = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    more = {"word_embed_proj_dim": 40, "ffn_dim": 71, "max_position_embeddings": 256, "bos_token_id": 1}
    special = {"pad_token_id": 0, "eos_token_id": 2}
    return OPTForCausalLM(OPTConfig(**sizes, **more, **special, tie_word_embeddings=tied))


def experts() -> nn.Module:
    # Grouped matrix products require rows of a multiple of 16 bytes.
    more = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "tie_word_embeddings": False}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **more))


def folder_of(run: Run, make: Callable[[], nn.Module]) -> str:
    """Save a small model and its tokenizer on rank 0, as if downloaded from a hub."""
    if run.rank == 0 and not Path("model").exists():
        torch.manual_seed(0)
        make().save_pretrained("model")
        tokenizer().save_pretrained("model")
    return "model"


def text(role: str, source: random.Random) -> dict[str, Any]:
    words = " ".join(source.choice(WORDS) for _ in range(source.randint(2, 5)))
    return {"role": role, "content": [{"type": "text", "value": words}], "loss_weight": float(role == "assistant")}


def conversation(source: random.Random) -> dict[str, Any]:
    return {"messages": [text("user", source), text("assistant", source)]}


def preference(source: random.Random) -> dict[str, Any]:
    asked = text("user", source)
    return {f"{kind}_messages": [asked, text("assistant", source)] for kind in ("chosen", "rejected")}


def written(run: Run, one: Callable[[random.Random], dict[str, Any]], count: int = 48) -> str:
    """Write a data set with `count` lines on rank 0, and return its name."""
    name = f"{one.__name__}.jsonl"
    if run.rank == 0:
        source = random.Random(2)
        Path(name).write_text("".join(json.dumps(one(source)) + "\n" for _ in range(count)))
    return name


def arguments(run: Run, make: Callable[[], nn.Module] = qwen, **changes: Any) -> dict[str, Any]:
    """Return the content of a configuration file. `dist` adds settings of the FSDP2 plugin."""
    settings: dict[str, Any] = {
        "model": folder_of(run, make),
        "template": "chatml",
        "train_dataset": written(run, changes.pop("one", conversation)),
        "output_dir": "out",
        "micro_batch_size": 2,
        "cutoff_len": 64,
        "learning_rate": 0.01,
        "max_steps": 4,
        "max_grad_norm": 0.5,
        "bf16": False,
        "batching_workers": 0,
        "dist_config": {"name": "fsdp2"} | changes.pop("dist", {}),
    }
    DistributedInterface(settings["dist_config"])
    dist.barrier()
    return settings | changes


def trains(run: Run, settings: dict[str, Any], module: Any = sft_trainer, name: str = "") -> Any:
    """Run the training command, record losses, gradient norms and weights, and return the trainer."""
    kind = module.SFTTrainer if module is sft_trainer else module.RMTrainer
    made: list[Any] = []

    class Kept(kind):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            made.append(self)

    run_command = module.run_sft if module is sft_trainer else module.run_rm
    destroy = DistributedInterface.destroy
    DistributedInterface.destroy = lambda self: None  # the row gathers weights after the command
    setattr(module, kind.__name__, Kept)
    try:
        run_command(settings)
    finally:
        setattr(module, kind.__name__, kind)
        DistributedInterface.destroy = destroy
    trainer = made[0]
    run.sharded(trainer.model, f"sharded{name}")
    run.note(f"training{name}", trainer.state.log_history)
    run.weights(trainer.model, f"weights{name}")
    return trainer


LORA = {"name": "lora", "r": 3, "lora_alpha": 6, "lora_dropout": 0.1, "target_modules": "all"}


@rows("sft: checkpoints of activations, save_model")
def plain(run: Run) -> None:
    trains(run, arguments(run))
    run.files("out")
    run.note("loaded", AutoModelForCausalLM.from_pretrained("out").state_dict())


@rows("sft: bf16, accumulation, reshard_after_forward false, no checkpoints of activations")
def accumulates(run: Run) -> None:
    more = {"global_batch_size": 12, "enable_activation_checkpointing": False}
    trains(run, arguments(run, dist={"reshard_after_forward": False}, bf16=True, **more))


@rows("sft: offload_params, tied embeddings")
def offloads(run: Run) -> None:
    more = {"offload_params": True, "pin_memory": False}
    trains(run, arguments(run, lambda: qwen(tied=True), dist=more))


# With init_on_rank0, LLaMA-Factory leaves buffers that are not in the state dict uninitialized, for example those of
# rotary embeddings. OPT has none.
for mode, make in (("init_on_rank0", opt), ("init_on_meta", qwen)):
    for tied in (False, True):

        def initialized(run: Run, mode: str = mode, make: Any = make, tied: bool = tied) -> None:
            trains(run, arguments(run, lambda: make(tied), init_config={"name": mode}))

        rows.add(f"sft: {make.__name__}, {mode}{', tied embeddings' if tied else ''}", initialized)


@rows("sft: init_on_meta of a mixture of experts, whose weights are converted while loading")
def converts(run: Run) -> None:
    trains(run, arguments(run, experts, init_config={"name": "init_on_meta"}))
    run.files("out")


@rows("sft: init_on_meta from a distributed checkpoint (dcp_path)")
def from_distributed(run: Run) -> None:
    trains(run, arguments(run, save_steps=4))
    more = {"init_config": {"name": "init_on_meta"}, "dist": {"dcp_path": "out/checkpoint-4/model"}}
    trains(run, arguments(run, **more, output_dir="again"), name=", again")


@rows("sft: saves and resumes, also in the format of Transformers")
def resumes(run: Run) -> None:
    resumes_with(run, save_ckpt_as_hf=True)
    run.files("out/checkpoint-2/hf_model")


@rows("sft with LoRA: saves and resumes")
def resumes_lora(run: Run) -> None:
    resumes_with(run, peft_config=LORA)


def resumes_with(run: Run, **more: Any) -> None:
    """Train four steps. Resume after the second; the last weights must be equal."""
    trains(run, arguments(run, save_steps=2, **more))
    for part in ("model", "optimizer"):
        run.files(f"out/checkpoint-2/{part}", f"saved {part}")
    again = arguments(run, **more, output_dir="again", resume_from_checkpoint="out/checkpoint-2")
    trains(run, again, name=", resumed")
    run.agrees("resumed weights", run.noted["weights, resumed"], run.noted["weights"], 0.0)


@rows("sft with LoRA: bf16, saves the adapter, merge_and_export_model")
def lora(run: Run) -> None:
    trains(run, arguments(run, peft_config=LORA, bf16=True))
    run.files("out")
    if run.rank == 0:
        peft = {"name": "lora", "adapter_name_or_path": "out", "export_dir": "merged", "infer_dtype": "float32"}
        merge_and_export_model({"model": "model", "template": "chatml", "peft_config": peft})
    run.files("merged", "merged")


@rows("sft with LoRA: init_on_rank0, head trained in full")
def lora_on_rank0(run: Run) -> None:
    more = {"peft_config": LORA | {"modules_to_save": ["lm_head"]}, "init_config": {"name": "init_on_rank0"}}
    trains(run, arguments(run, opt, **more))


@rows("sft: last layer and head trained, others frozen")
def freezes(run: Run) -> None:
    peft = {"name": "freeze", "freeze_trainable_layers": 1, "freeze_extra_modules": ["lm_head"]}
    trains(run, arguments(run, peft_config=peft))


@rows("sft: dynamic batching")
def dynamic(run: Run) -> None:
    trains(run, arguments(run, batching_strategy="dynamic_batching"))


@rows("sft: two replicas of two shards", world=4)
def replicates(run: Run) -> None:
    trains(run, arguments(run, dist={"mp_replicate_size": 2}, micro_batch_size=1))


@rows("rm: a reward model")
def rewards(run: Run) -> None:
    trains(run, arguments(run, one=preference, model_class="cls", cutoff_len=128), rm_trainer)
