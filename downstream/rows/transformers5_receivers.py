"""Rows in which tensor-parallel models of Transformers receive the weights of sharded trainers."""

from __future__ import annotations

from typing import Any

import torch
from _jobs import VOCABULARY, Jobs, check_equal, folder_of, full_values, outputs, tokens
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.distributed import DistributedConfig

from _rows import Rows, Run
from composable_shard import weights

rows = Rows(
    "Transformers: tensor-parallel models that receive weights",
    environment="transformers5",
    versions=("transformers", "safetensors", "torch"),
    uses_ours=True,
)

SIZES = {"vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 74, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 64}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
UPDATES = 3


def llama(**changes: Any) -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, **SPECIAL, **changes))


def qwen(**changes: Any) -> nn.Module:
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS, **SPECIAL, **changes))


def moe(**changes: Any) -> nn.Module:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **HEADS, **SPECIAL, **EXPERTS, **changes))


def trainer(model: nn.Module) -> nn.Module:
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    batch = tokens(10 * step + rank)
    model(input_ids=batch, labels=batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def receives(
    run: Run, make: Any, dtype: torch.dtype = torch.float32, packed: tuple[str, ...] = (), **sizes: int
) -> None:
    """Send the weights of two trainers to two receivers after each of several training steps.

    After each update, the receivers' full weights must be bitwise identical to the trainers', and their logits and
    generated tokens to those of a model that Transformers loads from a checkpoint of the trainers.

    Args:
        make: makes the model.
        dtype: dtype of the receivers.
        packed: endings of names that Transformers must shard as `_StridedShard`.
        sizes: arguments of `DistributedConfig`.
    """
    jobs = Jobs.start(run)
    torch.manual_seed(0 if jobs.trains else 1)  # receivers start with other weights
    start, config = folder_of(run, "start"), DistributedConfig(**(sizes or {"tp_size": 2}))
    model = make()
    if run.rank == 2:
        model.save_pretrained(start)
    jobs.from_first()

    def loaded(folder: str) -> nn.Module:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, distributed_config=config)

    if jobs.trains:
        optimizer = torch.optim.AdamW(trainer(model).parameters(), lr=0.01)
        run.sharded(model)
    else:
        model = loaded(start)
        for name, each in model.named_parameters():
            if name.endswith(packed or ("no such name",)):
                assert "_StridedShard" in str(each.placements), f"{name} is {each.placements}"
        run.note("layout of the receivers", layout_of(model))
    own = weights.layout(model)
    plan = jobs.plan(own if jobs.trains else own.on(jobs.receivers))
    run.note("plan", str(plan))
    for version in range(UPDATES):
        if jobs.trains:
            train(model, optimizer, run.rank, version)
            update = weights.send(model, plan, jobs.group)
        else:
            update = weights.receive(plan, model, jobs.group)
        run.note(f"update {version}", [update.version, update.sent + update.received])
        values = full_values(model)
        if run.rank == 0:
            whole = make()
            whole.load_state_dict(values)
            whole.save_pretrained(folder_of(run, f"version {version}"))
        trained = jobs.from_first(values)
        if not jobs.trains:
            expected = {name: value.to(dtype) for name, value in trained.items()}
            check_equal(values, expected, f"weights of version {version}")
            found = outputs(model)
            check_equal(found, outputs(loaded(folder_of(run, f"version {version}"))), f"outputs of version {version}")
            if "lm_head.weight" in values and model.config.tie_word_embeddings:
                check_equal({"": values["lm_head.weight"]}, {"": values["model.embed_tokens.weight"]}, "tied weights")
            whole = make()
            whole.load_state_dict(trained)
            apart = outputs(whole.to(dtype))["logits"] - found["logits"]
            assert apart.abs().max() < (1e-5 if dtype is torch.float32 else 5e-2), (
                "logits differ from the whole model's"
            )
            run.note(f"outputs {version}", found)
        run.note(f"weights {version}", values)


def layout_of(model: nn.Module) -> dict[str, str]:
    """Return the placements of parameters by name."""
    return {name: str(each.placements) for name, each in model.named_parameters() if isinstance(each, DTensor)}


def add(title: str, *given: Any, **settings: Any) -> None:
    def program(run: Run) -> None:
        receives(run, *given, **settings)

    rows.add(f"{title}: bitwise identical weights, logits and generated tokens", program, world=4, sharded=False)


PACKED = ("experts.gate_up_proj",)

add("Llama, tp_size 2", llama)
add("Llama with biases, bf16 receivers of fp32 trainers", lambda: llama(attention_bias=True), torch.bfloat16)
add("Qwen3, tied embeddings", lambda: qwen(tie_word_embeddings=True))
add("Qwen3-MoE, packed gate_up_proj (_StridedShard)", moe, packed=PACKED)
add("Qwen3-MoE, tied embeddings, bf16", lambda: moe(tie_word_embeddings=True), torch.bfloat16, PACKED)
add("Qwen3-MoE, expert parallel (ep_size 2)", moe, tp_size=2, ep_size=2)
