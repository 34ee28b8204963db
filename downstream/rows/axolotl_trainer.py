"""Rows for axolotl: its trainer with its own FSDP2 preparation of Accelerate, on a CPU."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from _trainer import Samples, arguments, curve, gpt2, llama, reshard
from axolotl.cli.merge_sharded_fsdp_weights import merge_fsdp_weights
from axolotl.core.trainers.base import AxolotlTrainer
from axolotl.core.training_args import AxolotlTrainingArguments
from axolotl.integrations.expert_parallel.shard import save_fsdp2_lora_adapter
from axolotl.loaders.patch_manager import PatchManager
from axolotl.utils.dict import DictDefault
from axolotl.utils.fp32_norms import tag_model_fp32_norms
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import default_data_collator

from _rows import Rows, Run

rows = Rows("axolotl", environment="axolotl", versions=("axolotl", "torch", "transformers", "accelerate", "peft"))

os.environ["AXOLOTL_DO_NOT_TRACK"] = "1"


def configured(plugin: dict[str, Any] | None = None, adapter: str | None = None, **changes: Any) -> Any:
    """Apply axolotl's patches for a configuration with `fsdp_version: 2`, and return the training arguments."""
    plugin = {"activation_checkpointing": False, "cpu_ram_efficient_loading": False} | (plugin or {})
    cfg = DictDefault({"fsdp_version": 2, "fsdp_config": plugin, "adapter": adapter, "context_parallel_size": 1})
    PatchManager._apply_fsdp_patches(SimpleNamespace(cfg=cfg))
    return arguments(plugin, AxolotlTrainingArguments, **changes)


def data(count: int) -> Dataset:
    samples = Samples(count)
    return Dataset.from_dict({"input_ids": samples.ids.tolist(), "labels": samples.labels.tolist()})


def trains(run: Run, model: nn.Module, args: Any, samples: int = 24, name: str = "", resume: str | None = None) -> Any:
    """Train and evaluate with axolotl's trainer, and return it."""
    sets = {"train_dataset": data(samples), "eval_dataset": data(5)}
    trainer = AxolotlTrainer(model=model, args=args, eval_data_collator=default_data_collator, **sets)
    trainer.axolotl_cfg = DictDefault({"fsdp_version": 2, "fsdp_config": {"state_dict_type": "FULL_STATE_DICT"}})
    trainer.train(resume_from_checkpoint=resume)
    reshard(trainer.model)
    run.sharded(trainer.model, f"sharded{name}")
    run.note(f"training{name}", curve(trainer))
    run.weights(trainer.model, f"weights{name}")
    run.note(f"evaluated{name}", trainer.evaluate()["eval_loss"])
    return trainer


def lora(model: nn.Module | None = None, **more: Any) -> PeftModel:
    targets = ["q_proj", "v_proj", "up_proj"]
    config = LoraConfig(r=3, target_modules=targets, lora_dropout=0.1, task_type="CAUSAL_LM", **more)
    return get_peft_model(llama() if model is None else model, config)


@rows("AxolotlTrainer: train, evaluate")
def plain(run: Run) -> None:
    trains(run, llama(), configured())


@rows("AxolotlTrainer: bf16, accumulation, tied head, dropout")
def accumulates(run: Run) -> None:
    trains(run, gpt2(), configured(bf16=True, gradient_accumulation_steps=3, max_steps=3), samples=36)


@rows("AxolotlTrainer: activation_checkpointing of the plugin")
def checkpointed(run: Run) -> None:
    trains(run, llama(use_cache=False), configured({"activation_checkpointing": True}))


@rows("AxolotlTrainer: cpu_ram_efficient_loading, tied head")
def efficient(run: Run) -> None:
    trains(run, gpt2(), configured({"cpu_ram_efficient_loading": True}))


@rows("AxolotlTrainer: bf16 with fp32_norms")
def norms(run: Run) -> None:
    args = configured(bf16=True)
    model = llama()
    tag_model_fp32_norms(model, DictDefault({"fp32_norms": True}))
    trains(run, model, args)


def resumes(run: Run, kind: str, make: Any, adapter: str | None = None) -> Any:
    """Train four steps, saving after the second. Resume there; the last weights must be equal."""
    os.environ["FSDP_STATE_DICT_TYPE"] = kind
    args = configured({"state_dict_type": kind}, adapter, save_strategy="steps", save_steps=2)
    trains(run, make(), args)
    run.files("out/checkpoint-2", ignore=("training_args.bin", ".pth", "trainer_state.json"))
    args = configured({"state_dict_type": kind}, adapter, output_dir="again")
    trainer = trains(run, make(), args, name=", resumed", resume="out/checkpoint-2")
    run.agrees("resumed weights", run.noted["weights, resumed"], run.noted["weights"], 0.0)
    return trainer


@rows("AxolotlTrainer: checkpoint and resume, SHARDED_STATE_DICT, merge_sharded_fsdp_weights")
def resumes_sharded(run: Run) -> None:
    trainer = resumes(run, "SHARDED_STATE_DICT", llama)
    merge_fsdp_weights("out/checkpoint-4/pytorch_model_fsdp_0", "merged")
    trainer.accelerator.wait_for_everyone()
    assert any(Path("merged").iterdir())
    run.files("merged", "merged")


@rows("AxolotlTrainer: checkpoint and resume, FULL_STATE_DICT")
def resumes_full(run: Run) -> None:
    resumes(run, "FULL_STATE_DICT", llama)


@rows("LoRA, whose layers are sharded one by one")
def adapts(run: Run) -> None:
    trainer = trains(run, lora(), configured(adapter="lora"))
    save_fsdp2_lora_adapter(trainer.model, "adapter")
    run.files("adapter")


@rows("LoRA: bf16, activation_checkpointing of the plugin")
def adapts_checkpointed(run: Run) -> None:
    args = configured({"activation_checkpointing": True}, "lora", bf16=True)
    trains(run, lora(llama(use_cache=False)), args)


@rows("LoRA: gradient_checkpointing of Transformers")
def adapts_recomputed(run: Run) -> None:
    more = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    trains(run, lora(), configured(adapter="lora", **more))


@rows("LoRA: cpu_ram_efficient_loading, embeddings adapted")
def adapts_efficient(run: Run) -> None:
    model = get_peft_model(llama(), LoraConfig(r=3, target_modules=["q_proj", "embed_tokens"], task_type="CAUSAL_LM"))
    trains(run, model, configured({"cpu_ram_efficient_loading": True}, "lora"))


@rows("DoRA: accumulation")
def decomposes(run: Run) -> None:
    trains(run, lora(use_dora=True), configured(adapter="lora", gradient_accumulation_steps=2))


@rows("LoRA: checkpoint and resume, SHARDED_STATE_DICT")
def adapts_resumed(run: Run) -> None:
    resumes(run, "SHARDED_STATE_DICT", lora, "lora")
