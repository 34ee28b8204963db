"""Rows that exchange files between `composable_shard.checkpoint` and Transformers or PEFT, in both directions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from _rows import Rows, Run
from composable_shard import checkpoint

rows = Rows(
    "Transformers and PEFT: files of a sharded model",
    environment="transformers5",
    versions=("transformers", "peft", "safetensors"),
)

VOCABULARY = 97


def config(**changes: Any) -> LlamaConfig:
    sizes = {"hidden_size": 48, "intermediate_size": 75, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaConfig(**(sizes | heads | {"pad_token_id": 0, "tie_word_embeddings": True} | changes))


def llama(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(config())


def shard(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if type(module).__name__.endswith("DecoderLayer"):
            fully_shard(module)
    return fully_shard(model)


def tokens(rank: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(rank))


def train(run: Run, model: nn.Module) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
    for _ in range(2):
        batch = tokens(run.rank)
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def logits(model: nn.Module, rank: int) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=tokens(rank)).logits


@rows("a trained model, exported in parts, is loaded by from_pretrained")
def exported(run: Run) -> None:
    dist.init_process_group("gloo")
    model = shard(llama(0))
    run.sharded(model)
    train(run, model)
    texts = {"config.json": model.config.to_json_string()}
    path = checkpoint.export_safetensors(run.folder / "out", model, max_shard_size=40_000, extra_files=texts)
    loaded, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    run.note("not found", [sorted(info[key]) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")])
    run.agrees("logits", logits(model, run.rank), logits(loaded.eval(), run.rank), 1e-6)
    run.note("tied", loaded.lm_head.weight is loaded.model.embed_tokens.weight)
    run.files(path)
    half = checkpoint.export_safetensors(run.folder / "half", model, dtype=torch.bfloat16, extra_files=texts)
    loaded = AutoModelForCausalLM.from_pretrained(half, dtype="auto")
    run.note("dtype", str(loaded.dtype))


@rows("save_pretrained output loaded into a sharded meta-device model")
def imported(run: Run) -> None:
    dist.init_process_group("gloo")
    whole = llama(1).eval()
    folder = Path(run.folder, "in")
    if run.rank == 0:
        whole.save_pretrained(folder, max_shard_size=40_000)
    dist.barrier()
    with torch.device("meta"):
        model = LlamaForCausalLM(config())
    shard(model)
    found = checkpoint.import_safetensors(folder, model)
    run.note("not found", [found.missing, found.unexpected])
    model.model.rotary_emb = llama(0).model.rotary_emb  # no file contains its buffers
    run.sharded(model)
    run.agrees("logits", logits(model.eval(), run.rank), logits(whole, run.rank), 1e-6)
    run.weights(model)


@rows("a LoRA adapter alone, exported, is loaded by PeftModel.from_pretrained, and back")
def adapter(run: Run) -> None:
    dist.init_process_group("gloo")

    def adapted(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        base = llama(0)
        torch.manual_seed(seed)
        lora = LoraConfig(r=3, target_modules=["q_proj", "up_proj"], init_lora_weights=False, use_dora=True)
        return get_peft_model(base, lora)

    model = adapted(1)
    settings = Path(run.folder, "settings")
    if run.rank == 0:
        model.save_pretrained(settings)
    dist.barrier()
    shard(model)
    run.sharded(model)
    train(run, model)
    texts = {"adapter_config.json": (settings / "adapter_config.json").read_text()}
    path = checkpoint.export_safetensors(run.folder / "out", model, adapter="default", extra_files=texts)
    loaded = PeftModel.from_pretrained(llama(0), path).eval()
    run.agrees("logits", logits(model, run.rank), logits(loaded, run.rank), 1e-5)
    run.files(path, ignore=("adapter_config.json",))
    other = shard(adapted(2))
    found = checkpoint.import_safetensors(path, other, adapter="default")
    run.note("not found", [found.missing, found.unexpected])
    run.agrees("logits of the import", logits(other.eval(), run.rank), logits(loaded, run.rank), 1e-5)
