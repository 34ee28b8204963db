"""Rows for ms-swift: its training commands with FSDP2, on full models and with adapters."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import swift
import torch
import torch.distributed as dist
from _accelerate_on_cpu import fsdp2_on_cpu
from swift.pipelines.train import SwiftPretrain, SwiftRLHF, SwiftSft
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from _rows import Rows, Run

rows = Rows("ms-swift", environment="swift", versions=("ms-swift", "transformers", "accelerate", "peft", "trl"))

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCABULARY = len(SPECIAL) + len(BYTES)


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte."""
    made = Tokenizer(models.BPE({word: i for i, word in enumerate([*SPECIAL, *BYTES])}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token=SPECIAL[0], eos_token=SPECIAL[2])


def checkpoint(run: Run, tied: bool = False) -> str:
    """Save a small Qwen2 and its tokenizer on rank 0, as if downloaded from a hub, and return the folder."""
    where = Path("qwen2")
    if run.rank == 0 and not where.exists():
        torch.manual_seed(0)
        sizes = {"hidden_size": 40, "intermediate_size": 71, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
        special = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 2}
        Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, **special, tie_word_embeddings=tied)).save_pretrained(where)
        tokenizer().save_pretrained(where)
    dist.barrier()
    return str(where)


WORDS = ("sum", "of", "the", "two", "best", "times", "and", "worst")


def words(source: random.Random) -> str:
    return " ".join(source.choice(WORDS) for _ in range(source.randint(2, 5)))


def said(source: random.Random) -> list[dict[str, str]]:
    return [{"role": role, "content": words(source)} for role in ("user", "assistant")]


def written(run: Run, name: str, one: Callable[[random.Random], dict[str, Any]], count: int = 24) -> str:
    """Write a data set with `count` lines on rank 0 and return its name; `one` returns the content of a line."""
    fsdp2_on_cpu()
    if run.rank == 0:
        source = random.Random(2)
        Path(name).write_text("".join(json.dumps(one(source)) + "\n" for _ in range(count)))
    dist.barrier()
    return name


def conversations(run: Run) -> str:
    return written(run, "conversations.jsonl", lambda source: {"messages": said(source)})


def preferences(run: Run) -> str:
    """Write a data set of conversations with a rejected second answer, and return its name."""

    def one(source: random.Random) -> dict[str, Any]:
        return {"messages": said(source), "rejected_response": words(source)}

    return written(run, "preferences.jsonl", one)


def arguments(run: Run, plugin: dict[str, Any] | None = None, tied: bool = False, **changes: Any) -> list[str]:
    """Return the words of a command line with the preset of `--fsdp fsdp2`, in which `plugin` replaces settings."""
    fsdp2_on_cpu()
    preset = json.loads((Path(swift.__file__).parent / "config" / "fsdp2.json").read_text())
    preset["fsdp_config"] |= plugin or {}
    settings: dict[str, Any] = {
        "model": checkpoint(run, tied),
        "model_type": "qwen2",
        "template": "chatml",
        "dataset": None,
        "tuner_type": "full",
        "torch_dtype": "float32",
        "fp16": "false",  # the default for float32 weights is mixed precision with a gradient scaler
        "use_hf": "true",  # otherwise ms-swift looks up the folder on its own hub
        "attn_impl": "sdpa",
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "learning_rate": 0.01,
        "logging_steps": 1,
        "save_strategy": "no",
        "split_dataset_ratio": 0,
        "output_dir": "out",
        "add_version": "false",
        "report_to": "none",
        "use_cpu": "true",
        "dataloader_num_workers": 0,
        "dataset_num_proc": 1,
        "fsdp": json.dumps(preset),
    }
    settings |= changes
    settings["dataset"] = settings["dataset"] or conversations(run)
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def trains(run: Run, words: list[str], command: Any = SwiftSft, name: str = "") -> Any:
    """Run a command of `swift` with these words, record losses and weights, and return the trainer."""

    class Command(command):
        def train(self, trainer: Any) -> Any:
            self.trainer = trainer
            return super().train(trainer)

    made = Command(words)
    made.main()
    reshard(made.trainer.model)
    run.sharded(made.trainer.model, f"sharded{name}")
    run.note(f"training{name}", curve(made.trainer))
    run.weights(made.trainer.model, f"weights{name}")
    return made.trainer


def reshard(model: nn.Module) -> None:
    """Reshard all modules. FSDP2 keeps some of them unsharded after an evaluation."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def curve(trainer: Any) -> list[dict[str, Any]]:
    """Return the log of the trainer without times and memory."""
    varying = ("runtime", "per_second", "time", "speed", "memory", "global_step")
    return [{k: v for k, v in entry.items() if not any(w in k for w in varying)} for entry in trainer.state.log_history]


ADAPTER = {"tuner_type": "lora", "lora_rank": 3, "lora_alpha": 6, "target_modules": "all-linear"}
# Suffixes of files that contain times or the path of the model.
VARYING = ("args.json", "adapter_config.json", "training_args.bin", "trainer_state.json", ".jsonl", ".pth")
EVALUATED = {"split_dataset_ratio": 0.2, "eval_strategy": "steps", "eval_steps": 3}
SAVED = {"save_strategy": "steps", "save_steps": 2}


@rows("swift sft, with its preset of FSDP2: checkpoints of activations, weights loaded on rank 0 only")
def full(run: Run) -> None:
    trains(run, arguments(run))


@rows("swift sft, tied embeddings, evaluation before the last step")
def evaluated(run: Run) -> None:
    trains(run, arguments(run, tied=True, **EVALUATED))


@rows("swift sft, accumulation, bf16, reshard_after_forward false")
def accumulated(run: Run) -> None:
    plugin = {"reshard_after_forward": False, "activation_checkpointing": False}
    trains(run, arguments(run, plugin, torch_dtype="bfloat16", bf16="true", gradient_accumulation_steps=2))


@rows("swift sft, gradient_checkpointing of Transformers instead")
def checkpointed(run: Run) -> None:
    trains(run, arguments(run, {"activation_checkpointing": False}, gradient_checkpointing="true"))


@rows("swift sft, part of the model frozen")
def frozen(run: Run) -> None:
    trains(run, arguments(run, freeze_parameters="model.embed_tokens model.layers.0"))


@rows("swift sft, fp16 with a gradient scaler")
def scaled(run: Run) -> None:
    trains(run, arguments(run, fp16="true"))


@rows("swift pt")
def pretrains(run: Run) -> None:
    trains(run, arguments(run), SwiftPretrain)


@rows("swift sft with LoRA, evaluation before the last step")
def lora(run: Run) -> None:
    trains(run, arguments(run, lora_dropout=0.1, **ADAPTER, **EVALUATED))


@rows("swift sft with DoRA, the head trained in full")
def dora(run: Run) -> None:
    trains(run, arguments(run, **ADAPTER, use_dora="true", modules_to_save="lm_head"))


@rows("swift sft saves and resumes from a sharded checkpoint")
def resumed(run: Run) -> None:
    resumes(run)


@rows("swift sft with LoRA saves and resumes from a sharded checkpoint")
def lora_resumed(run: Run) -> None:
    resumes(run, **ADAPTER)


def resumes(run: Run, **more: Any) -> None:
    whole = trains(run, arguments(run, **SAVED, **more))
    last = Path(whole.args.output_dir) / "checkpoint-2"
    trains(run, arguments(run, **more, output_dir="again", resume_from_checkpoint=last), name=", resumed")
    run.agrees("resumed weights", run.noted["weights, resumed"], run.noted["weights"], tolerance=0)


@rows("swift sft saves the full model (FULL_STATE_DICT)")
def saves(run: Run) -> None:
    trains(run, arguments(run, {"state_dict_type": "FULL_STATE_DICT"}, **SAVED))
    run.files("out", ignore=VARYING)


@rows("swift sft with LoRA saves the adapter (FULL_STATE_DICT)")
def lora_saves(run: Run) -> None:
    trains(run, arguments(run, {"state_dict_type": "FULL_STATE_DICT"}, **SAVED, **ADAPTER))
    run.files("out", ignore=VARYING)


@rows("swift rlhf, DPO with a reference model")
def dpo(run: Run) -> None:
    words = arguments(run, {"activation_checkpointing": False}, dataset=preferences(run), rlhf_type="dpo")
    trainer = trains(run, words, SwiftRLHF)
    reshard(trainer.ref_model)
    run.sharded(trainer.ref_model, "sharded reference")
    run.weights(trainer.ref_model, "reference")


@rows("swift rlhf, DPO with LoRA")
def dpo_lora(run: Run) -> None:
    trains(run, arguments(run, dataset=preferences(run), rlhf_type="dpo", **ADAPTER), SwiftRLHF)


@rows("swift rlhf, KTO")
def kto(run: Run) -> None:
    def one(source: random.Random) -> dict[str, Any]:
        return {"messages": said(source), "label": source.random() < 0.6}

    words = arguments(run, dataset=written(run, "judged.jsonl", one), rlhf_type="kto", gradient_accumulation_steps=1)
    trains(run, words, SwiftRLHF)


@rows("swift rlhf, a reward model")
def reward(run: Run) -> None:
    trains(run, arguments(run, dataset=preferences(run), rlhf_type="rm"), SwiftRLHF)
