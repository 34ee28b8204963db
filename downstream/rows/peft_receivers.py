"""Rows in which receivers get the adapter of a sharded PEFT model, alone or merged into its weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from _jobs import VOCABULARY, Jobs, check_equal, full_values, outputs, tokens
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from _rows import Rows, Run
from composable_shard import weights

rows = Rows(
    "PEFT: receivers of an adapter, alone or merged",
    environment="adapters",
    versions=("peft", "transformers", "torch"),
    uses_ours=True,
)

SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
UPDATES = 3


def llama() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 75, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **SPECIAL))


def llama_bf16() -> nn.Module:
    return llama().to(torch.bfloat16)


def gpt2() -> nn.Module:
    """Make a model whose layers store their weights as (in, out)."""
    sizes = {"vocab_size": VOCABULARY, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64}
    drops = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **drops, **SPECIAL))


def adapted(make: Callable[[], nn.Module], config: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)  # all ranks have the same base
    base = make()
    return get_peft_model(base, LoraConfig(**({"r": 3, "lora_alpha": 6, "init_lora_weights": False} | config)))


def trainer(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if type(module).__name__ in ("LlamaDecoderLayer", "GPT2Block"):
            fully_shard(module)
    return fully_shard(model)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    model.train()
    model(input_ids=batch, labels=batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def receives(run: Run, make: Callable[[], nn.Module], config: dict[str, Any], merge: bool) -> None:
    """Send an adapter of two trainers to two receivers after each of several training steps.

    Weights, logits and generated tokens of the receivers must be bitwise identical to those of an unsharded PEFT model
    with the trainers' weights, after `merge_and_unload` if they are merged.

    Args:
        make: makes the base.
        config: arguments of `LoraConfig`.
        merge: whether receivers are models without adapters.
    """
    jobs = Jobs.start(run)
    how = "merge" if merge else "adapter"
    model = adapted(make, config)
    if jobs.trains:
        optimizer = torch.optim.AdamW([p for p in trainer(model).parameters() if p.requires_grad], lr=0.02)
        run.sharded(model)
        own = weights.layout(model, **{how: "default"})
    else:
        model = make() if merge else model
        own = weights.layout(model, **({} if merge else {"adapter": "default"}))
        own = own.on(jobs.receivers)
    plan = jobs.plan(own)
    run.note("plan", str(plan))
    for version in range(UPDATES):
        if jobs.trains:
            train(model, optimizer, tokens(10 * version + run.rank))
            before = full_values(model)
            weights.send(model, plan, jobs.group)
            check_equal(full_values(model), before, "trainers after sending")
        else:
            weights.receive(plan, model, jobs.group)
        trained = jobs.from_first(full_values(model))
        if not jobs.trains:
            alone = adapted(make, config)
            alone.load_state_dict(trained)
            alone = alone.merge_and_unload() if merge else alone
            check_equal(full_values(model), full_values(alone), f"weights of version {version}")
            found = outputs(model)
            check_equal(found, outputs(alone), f"outputs of version {version}")
            run.note(f"outputs {version}", found)


def add(title: str, *given: Any) -> None:
    def program(run: Run) -> None:
        receives(run, *given)

    rows.add(f"{title}: bitwise identical weights, logits and generated tokens", program, world=4, sharded=False)


add("Llama, LoRA merged (merge=)", llama, {"target_modules": ATTENTION}, True)
add(
    "bf16 Llama, rsLoRA with other ranks of some modules, trained biases and head, merged (merge=)",
    llama_bf16,
    {
        "target_modules": [*ATTENTION, "up_proj"],
        "use_rslora": True,
        "rank_pattern": {"q_proj": 5},
        "bias": "lora_only",
        "modules_to_save": ["lm_head"],
    },
    True,
)
add(
    "GPT-2, LoRA of transposed weights merged (merge=)",
    gpt2,
    {"target_modules": ["c_attn"], "fan_in_fan_out": True},
    True,
)
add("Llama, LoRA alone (adapter=)", llama, {"target_modules": ATTENTION, "lora_dropout": 0.1}, False)
