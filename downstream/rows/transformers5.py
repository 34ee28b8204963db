"""Rows for Transformers 5: sharding at load time (`DistributedConfig`), Trainer and `generate`."""

from __future__ import annotations

from functools import partial
from typing import Any

import _trainer
import torch
import torch.distributed as dist
from _trainer import VOCABULARY, Samples, curve, pretrained_folder
from peft import LoraConfig
from torch import nn
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig, Trainer, set_seed
from transformers.distributed import DistributedConfig, load_optimizer_distributed, save_optimizer_distributed

from _rows import Rows, Run

rows = Rows(
    "Transformers 5: Trainer and generate", environment="transformers5_lora", versions=("transformers", "accelerate")
)


def experts(kind: Any = MixtralConfig) -> nn.Module:
    """Return a model with four experts per block. Its rows are multiples of 16 bytes for grouped matrix products."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 40, "intermediate_size": 72}
    settings |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12}
    settings |= {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 36}
    return AutoModelForCausalLM.from_config(kind(**settings, max_position_embeddings=64))


def even_llama(**changes: Any) -> nn.Module:
    """Return a Llama model whose widths tensor parallelism can split evenly."""
    return _trainer.llama(hidden_size=40, intermediate_size=72, vocab_size=VOCABULARY + 1, **changes)


def load(make: Any, **config: Any) -> nn.Module:
    """Load a model from a folder. Each rank reads only its shards."""
    dist.init_process_group("gloo")
    folder = pretrained_folder(make)
    settings = config.pop("settings", {})
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**config), **settings)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD, for rows with rounding differences. AdamW would amplify them."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    # foreach=False, because the meshes of parameters may differ.
    return torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, *data: int, count: int = 3) -> list[float]:
    """Train on the mean loss of one batch per seed in `data`; return the losses."""
    found = []
    model.train()
    for step in range(count):
        losses = []
        for each in data:
            set_seed(100 * step + each)
            ids = torch.randint(3, VOCABULARY, (2, 12))
            losses.append(model(input_ids=ids, labels=ids).loss)
        loss = torch.stack(losses).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def evaluated(model: nn.Module) -> torch.Tensor:
    model.eval()
    torch.manual_seed(4)
    with torch.no_grad():
        return model(input_ids=torch.randint(3, VOCABULARY, (2, 12))).logits


def trains(run: Run, make: Any, data: int | None = None, reference: bool = False, **config: Any) -> nn.Module:
    """Load, train, evaluate and train again; if `reference`, compare with the unsharded model."""
    model = load(make, **config)
    run.sharded(model)
    optimizer = sgd(model) if reference else adamw(model)
    data = run.rank if data is None else data
    run.note("loaded", evaluated(model))
    run.note("training", steps(model, optimizer, data))
    run.note("logits", evaluated(model))
    run.note("training after evaluation", steps(model, optimizer, data, count=1))
    run.weights(model)
    if reference:
        whole = make()
        optimizer = sgd(whole)
        steps(whole, optimizer, *range(run.world))
        steps(whole, optimizer, *range(run.world), count=1)
        run.agrees("weights", dict(model.named_parameters()), dict(whole.named_parameters()), 1e-4)
    return model


@rows("from_pretrained with fsdp_size: the plan of the model")
def by_plan(run: Run) -> None:
    trains(run, _trainer.llama, fsdp_size=2)


@rows("from_pretrained with fsdp_size: a tied head")
def by_plan_tied(run: Run) -> None:
    model = trains(run, partial(_trainer.llama, tie_word_embeddings=True), reference=True, fsdp_size=2)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@rows("from_pretrained with fsdp_size: a plan of the user's")
def by_own_plan(run: Run) -> None:
    plan = {"model.layers.*.mlp": "free_full_weight", "model.layers.*.self_attn": "free_full_weight"}
    trains(run, _trainer.llama, fsdp_size=2, fsdp_plan=plan)


@rows("from_pretrained with fsdp_size: bf16 compute")
def by_plan_bf16(run: Run) -> None:
    trains(run, _trainer.llama, fsdp_size=2, fsdp_mixed_precision=True)


@rows("from_pretrained with fsdp_size: CPU offload")
def by_plan_offload(run: Run) -> None:
    trains(run, _trainer.llama, reference=True, fsdp_size=2, fsdp_cpu_offload=True)


@rows("from_pretrained with fsdp_size: Mixtral")
def by_plan_experts(run: Run) -> None:
    trains(run, experts, fsdp_size=2)


@rows("from_pretrained with fsdp_size: Qwen3-MoE, gradient checkpoints")
def by_plan_checkpoints(run: Run) -> None:
    def make() -> nn.Module:
        return experts(Qwen3MoeConfig)

    model = load(make, fsdp_size=2)
    model.gradient_checkpointing_enable()
    run.sharded(model)
    optimizer = adamw(model)
    run.note("training", steps(model, optimizer, run.rank))
    run.weights(model)


@rows("from_pretrained with dp_replicate_size and fsdp_size, four ranks", world=4)
def hsdp(run: Run) -> None:
    trains(run, _trainer.llama, dp_replicate_size=2, fsdp_size=2)


@rows("from_pretrained with fsdp_size and tp_size, four ranks", world=4)
def with_tensor_parallel(run: Run) -> None:
    trains(run, even_llama, data=run.rank // 2, fsdp_size=2, tp_size=2)


@rows("from_pretrained with ep_size: experts exchanged all to all, on their own mesh")
def expert_parallel(run: Run) -> None:
    trains(run, experts, fsdp_size=2, ep_size=2, ep_implementation="all_to_all")


@rows(
    "from_pretrained with ep_size and copies of the experts, four ranks",
    world=4,
    tolerance=1e-4,
    why="on gloo, FSDP2 sums the gradients of four ranks along a ring, ours in rank order",
)
def expert_parallel_copies(run: Run) -> None:
    trains(run, experts, reference=True, fsdp_size=4, ep_size=2, ep_implementation="all_to_all")


@rows("save_pretrained, whole and distributed, and from_pretrained of both; the optimizer's state too")
def saves(run: Run) -> None:
    model = load(_trainer.llama, fsdp_size=2)
    optimizer = adamw(model)
    run.sharded(model)
    steps(model, optimizer, run.rank)
    model.save_pretrained("whole")
    model.save_pretrained("distributed", distributed_checkpoint=True)
    save_optimizer_distributed(model, optimizer, "optimizer")
    run.files("whole")
    run.note("training", steps(model, optimizer, run.rank + 10))
    run.weights(model)
    for folder in ("whole", "distributed"):
        config = DistributedConfig(fsdp_size=2)
        again = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
        optimizer = adamw(again)
        load_optimizer_distributed(again, optimizer, "optimizer")
        run.sharded(again, f"sharded {folder}")
        run.note(f"training {folder}", steps(again, optimizer, run.rank + 10))
        for (name, one), other in zip(model.named_parameters(), again.parameters(), strict=True):
            assert torch.equal(one.full_tensor(), other.full_tensor()), name


@rows("generate of a model sharded at load time")
def generates(run: Run) -> None:
    model = load(_trainer.llama, fsdp_size=2).eval()
    run.sharded(model)
    torch.manual_seed(run.rank)
    prompt = torch.randint(3, VOCABULARY, (2, 4 + run.rank))
    settings: dict[str, Any] = {"max_new_tokens": 5 + 3 * run.rank, "pad_token_id": 0, "eos_token_id": None}
    made = model.generate(prompt, do_sample=False, **settings)
    run.note("made", made)
    whole = _trainer.llama().eval()
    run.agrees("tokens", made, whole.generate(prompt, do_sample=False, **settings))


def by_trainer(run: Run, adapter: bool = False, **changes: Any) -> None:
    """Train a model that was sharded at load time. The Trainer does not shard it again."""
    args = _trainer.arguments(fsdp=None, fsdp_config=None, **changes)
    folder = pretrained_folder(_trainer.llama)
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(fsdp_size=2))
    if adapter:
        model.add_adapter(LoraConfig(r=3, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))
    trainer = Trainer(model=model, args=args, train_dataset=Samples(36), eval_dataset=Samples(5))
    trainer.train()
    run.sharded(trainer.model)
    run.note("training", curve(trainer))
    run.note("evaluated", trainer.evaluate()["eval_loss"])
    run.weights(trainer.model)


rows.add("Trainer of a model sharded at load time", by_trainer)
rows.add(
    "Trainer of a model sharded at load time, gradient accumulation",
    partial(by_trainer, gradient_accumulation_steps=3, max_steps=3),
)
rows.add(
    "Trainer of a model sharded at load time, with LoRA, which Transformers keeps equal on all ranks",
    partial(by_trainer, adapter=True),
)

_trainer.add(rows)
