"""Rows for PEFT: train, merge, switch, save and load adapters on a sharded model."""

from collections.abc import Callable
from typing import Any

import peft
import torch
import torch.distributed as dist
from peft import (
    LoraConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from torch import nn
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint import save as dcp_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM

from _rows import Rows, Run

rows = Rows("PEFT", environment="adapters", versions=("peft", "transformers"))

VOCABULARY = 97
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LINEAR = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]


def llama(**settings: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 75, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**(sizes | heads | {"pad_token_id": 0} | settings)))


def gpt_oss() -> GptOssForCausalLM:
    """Return a mixture-of-experts model whose expert weights are parameters outside of `Linear` modules."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
    return GptOssForCausalLM(GptOssConfig(**sizes, **heads, num_local_experts=4, num_experts_per_tok=2, pad_token_id=0))


def adapted(config: peft.PeftConfig, base: nn.Module | None = None, **settings: Any) -> PeftModel:
    """Return a model with an adapter. The random initialization makes every part of it change the output."""
    base = llama() if base is None else base
    torch.manual_seed(1)
    return get_peft_model(base, config, **settings)


def lora(**settings: Any) -> LoraConfig:
    return LoraConfig(**({"r": 3, "lora_alpha": 6, "target_modules": LINEAR, "init_lora_weights": False} | settings))


def shard(model: nn.Module, **settings: Any) -> nn.Module:
    """Shard each block, then the model, as all tutorials do."""
    for module in model.modules():
        if type(module).__name__.endswith("DecoderLayer"):
            fully_shard(module, **settings)
    return fully_shard(model, **settings)


def batch(rank: int, step: int) -> dict[str, torch.Tensor]:
    """Return the batch of a rank in a step. The seed also determines the dropout of the step."""
    torch.manual_seed(100 * step + rank)
    tokens = torch.randint(3, VOCABULARY, (2, 11))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)


def train(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Train with the batches of this rank and return the losses."""
    model.train()
    losses = []
    for step in steps:
        loss = model(**batch(run.rank, step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_alone(world: int, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Train an unsharded model with the batches of all ranks."""
    model.train()
    for step in steps:
        for rank in range(world):
            (model(**batch(rank, step)).loss / world).backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def logits(model: nn.Module, step: int = 99, **settings: Any) -> torch.Tensor:
    model.eval()
    given = batch(0, step)
    return model(input_ids=given["input_ids"], attention_mask=given["attention_mask"], **settings).logits


def whole(model: nn.Module) -> dict[str, Any]:
    """Return the full state dict of a sharded model on every rank."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def gathered(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in state.items()}


def start() -> None:
    dist.init_process_group("gloo")


# ---------------------------------------------------------------------------------------------------------------------
# Every type of adapter: train, evaluate, continue training

METHODS: dict[str, Callable[[], peft.PeftConfig]] = {
    "LoRA": lambda: lora(),
    "LoRA on embeddings and head": lambda: lora(use_rslora=True, target_modules=["q_proj", "embed_tokens", "lm_head"]),
    "LoRA with dropout, biases trained": lambda: lora(lora_dropout=0.1, bias="lora_only", lora_bias=True),
    "LoRA with a separate rank for each module": lambda: lora(rank_pattern={"q_proj": 5, "layers.1.v_proj": 1}),
    "DoRA": lambda: lora(use_dora=True),
    "IA3": lambda: peft.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False
    ),
    "OFT": lambda: peft.OFTConfig(target_modules=ATTENTION, oft_block_size=8, init_weights=False),
    "HRA": lambda: peft.HRAConfig(r=4, target_modules=ATTENTION, init_weights=False),
    "LoHa": lambda: peft.LoHaConfig(r=3, target_modules=ATTENTION, module_dropout=0.0, init_weights=False),
    "LoKr": lambda: peft.LoKrConfig(r=3, target_modules=ATTENTION, init_weights=False),
    "VeRA": lambda: peft.VeraConfig(r=5, target_modules=["q_proj", "o_proj"], vera_dropout=0.1),
    "RandLoRA": lambda: peft.RandLoraConfig(r=5, target_modules=["q_proj", "o_proj"]),
    "FourierFT": lambda: peft.FourierFTConfig(n_frequency=20, target_modules=ATTENTION),
    "MiSS": lambda: peft.MissConfig(r=4, target_modules=["q_proj", "o_proj"], init_weights=False),
    "RoAd": lambda: peft.RoadConfig(target_modules=["q_proj", "o_proj"], group_size=8),
    "SHiRA": lambda: peft.ShiraConfig(r=3, target_modules=ATTENTION),
    "LN tuning": lambda: peft.LNTuningConfig(
        task_type="CAUSAL_LM", target_modules=["input_layernorm", "post_attention_layernorm", "norm"]
    ),
    "trainable tokens": lambda: peft.TrainableTokensConfig(token_indices=[3, 5, 96], target_modules=["embed_tokens"]),
    "LoRA with trainable tokens": lambda: lora(trainable_token_indices={"embed_tokens": [3, 5, 96]}),
    "prefix tuning": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
    "prompt tuning": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
    "P-tuning": lambda: peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=5, encoder_hidden_size=20),
    "adaption prompts (LLaMA-Adapter)": lambda: peft.AdaptionPromptConfig(
        task_type="CAUSAL_LM", adapter_layers=2, adapter_len=5
    ),
}


def trains(config: Callable[[], peft.PeftConfig]) -> Callable[[Run], None]:
    def program(run: Run) -> None:
        start()
        model = shard(adapted(config()))
        run.sharded(model)
        optimizer = adamw(model)
        run.note("losses", train(run, model, optimizer, range(3)))
        run.note("evaluated", logits(model))
        run.note("losses after evaluation", train(run, model, optimizer, range(3, 4)))
        run.weights(model)
        if not model.active_peft_config.is_prompt_learning:  # PEFT would run the prompt encoder outside of any forward
            run.note("adapter", gathered(get_peft_model_state_dict(model)))

    return program


for name, config in METHODS.items():
    rows.add(f"{name}: trains, evaluates, continues training", trains(config))


@rows("VB-LoRA: one bank of vectors for all layers, so one group")
def vector_bank(run: Run) -> None:
    start()
    config = peft.VBLoRAConfig(r=4, num_vectors=20, vector_length=12, target_modules=["q_proj", "o_proj"])
    model = fully_shard(adapted(config))
    run.sharded(model)
    optimizer = adamw(model)
    run.note("losses", train(run, model, optimizer, range(3)))
    run.note("evaluated", logits(model))
    run.note("later losses", train(run, model, optimizer, range(3, 4)))
    run.weights(model)


@rows("AdaLoRA: its loss needs all weights, so one group that stays gathered")
def adalora(run: Run) -> None:
    start()
    config = peft.AdaLoraConfig(
        init_r=5, target_r=2, tinit=10, tfinal=10, total_step=50, target_modules=ATTENTION, task_type="CAUSAL_LM"
    )
    model = fully_shard(adapted(config), reshard_after_forward=False)
    run.sharded(model)
    optimizer = adamw(model)
    losses = []
    for step in range(5):
        loss = model(**batch(run.rank, step)).loss
        loss.backward()
        optimizer.step()
        model.base_model.update_and_allocate(step)
        optimizer.zero_grad()
        losses.append(loss.item())
    run.note("losses", losses)
    run.note("evaluated", logits(model))
    run.weights(model)


# ---------------------------------------------------------------------------------------------------------------------
# Merging


def merges(config: Callable[[], peft.PeftConfig]) -> Callable[[Run], None]:
    def program(run: Run) -> None:
        start()
        alone = adapted(config())
        model = shard(adapted(config()))
        run.sharded(model)
        optimizer = adamw(model)
        run.note("losses", train(run, model, optimizer, range(2)))
        train_alone(run.world, alone, adamw(alone), range(2))
        run.note("unmerged", logits(model))
        model.merge_adapter()
        alone.merge_adapter()
        run.note("merged", logits(model))
        run.agrees("merged", logits(model), logits(alone))
        model.unmerge_adapter()
        alone.unmerge_adapter()
        run.note("unmerged again", logits(model))
        run.agrees("unmerged again", logits(model), logits(alone))
        run.note("later losses", train(run, model, optimizer, range(2, 3)))
        run.weights(model)

    return program


def merges_and_unloads(config: Callable[[], peft.PeftConfig]) -> Callable[[Run], None]:
    def program(run: Run) -> None:
        start()
        alone = adapted(config())
        model = shard(adapted(config()))
        run.sharded(model)
        run.note("losses", train(run, model, adamw(model), range(2)))
        train_alone(run.world, alone, adamw(alone), range(2))
        merged, merged_alone = model.merge_and_unload(), alone.merge_and_unload()
        run.note("weights", gathered(merged.state_dict()))
        run.agrees("weights", gathered(merged.state_dict()), merged_alone.state_dict())
        run.note("merged", logits(model))
        run.agrees("merged", logits(model), logits(alone))

    return program


for name in ("LoRA", "LoHa"):  # others assign to `weight.data`, which does not work with DTensors
    rows.add(f"{name}: merge_adapter, unmerge_adapter, continues training", merges(METHODS[name]))
    rows.add(f"{name}: merge_and_unload after training", merges_and_unloads(METHODS[name]))


def merges_a_copy(config: Callable[[], peft.PeftConfig]) -> Callable[[Run], None]:
    def program(run: Run) -> None:
        start()
        model = shard(adapted(config()))
        run.sharded(model)
        run.note("losses", train(run, model, adamw(model), range(2)))
        alone = adapted(config())
        alone.load_state_dict(whole(model))
        run.note("merged", logits(alone.merge_and_unload()))
        run.agrees("merged", logits(model), logits(alone))
        run.note("weights", alone.state_dict())

    return program


for name in ("DoRA", "IA3", "OFT", "VeRA"):
    rows.add(f"{name}: merge_and_unload of a copy that has the full state", merges_a_copy(METHODS[name]))


@rows("a merged model is unloaded, sharded again, and trained in full")
def merged_then_sharded(run: Run) -> None:
    start()
    model = shard(adapted(lora()))
    run.note("losses", train(run, model, adamw(model), range(2)))
    plain = adapted(lora())
    plain.load_state_dict(whole(model))
    plain = shard(plain.merge_and_unload().requires_grad_(True))
    run.sharded(plain)
    run.note("losses of the whole", train(run, plain, adamw(plain), range(2)))
    run.weights(plain)


@rows("unload: the base comes back")
def unloads(run: Run) -> None:
    start()
    model = shard(adapted(lora()))
    run.sharded(model)
    run.note("losses", train(run, model, adamw(model), range(2)))
    base = model.unload()
    run.note("base", gathered(base.state_dict()))
    run.note("evaluated", logits(model))
    run.agrees("evaluated", logits(model), logits(llama()))


# ---------------------------------------------------------------------------------------------------------------------
# Several adapters


@rows("disable_adapter around an evaluation between steps")
def disables(run: Run) -> None:
    start()
    model = shard(adapted(lora(lora_dropout=0.1)))
    run.sharded(model)
    optimizer = adamw(model)
    losses = train(run, model, optimizer, range(2))
    with model.disable_adapter():
        run.note("base", logits(model))
        run.agrees("base", logits(model), logits(llama()))
    run.note("adapted", logits(model))
    run.note("losses", losses + train(run, model, optimizer, range(2, 4)))
    run.weights(model)


@rows("the base as reference in a loss: disable_adapter under no_grad before each step")
def reference(run: Run) -> None:
    start()
    model = shard(adapted(lora()))
    run.sharded(model)
    optimizer = adamw(model)
    losses = []
    for step in range(3):
        given = batch(run.rank, step)
        with torch.no_grad(), model.disable_adapter():
            expected = model(**given).logits.log_softmax(-1)
        out = model(**given)
        loss = out.loss + nn.functional.kl_div(out.logits.log_softmax(-1), expected, log_target=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    run.note("losses", losses)
    run.weights(model)


def two_adapters(**settings: Any) -> PeftModel:
    model = adapted(lora(**settings))
    torch.manual_seed(2)
    model.add_adapter("other", lora(r=5, target_modules=ATTENTION, **settings))
    return model


@rows("two adapters: set_adapter between steps")
def switches(run: Run) -> None:
    start()
    alone, model = two_adapters(), shard(two_adapters())
    run.sharded(model)
    losses = []
    for turn, adapter in enumerate(["default", "other", "default"]):
        for each in (alone, model):
            each.set_adapter(adapter)
        losses += train(run, model, adamw(model), range(2 * turn, 2 * turn + 2))
        train_alone(run.world, alone, adamw(alone), range(2 * turn, 2 * turn + 2))
        run.note(f"{adapter} in turn {turn}", logits(model))
        run.agrees(f"{adapter} in turn {turn}", logits(model), logits(alone), tolerance=1e-4)
    run.note("losses", losses)
    run.weights(model)


@rows("two active adapters, both trained")
def both(run: Run) -> None:
    start()
    model = two_adapters()
    model.base_model.set_adapter(["default", "other"])
    shard(model)
    run.sharded(model)
    optimizer = adamw(model)
    run.note("losses", train(run, model, optimizer, range(3)))
    run.note("evaluated", logits(model))
    run.note("later losses", train(run, model, optimizer, range(3, 4)))
    run.weights(model)


@rows("two adapters in one batch (adapter_names)")
def mixed_batch(run: Run) -> None:
    start()
    alone, model = two_adapters(), shard(two_adapters())
    run.sharded(model)
    run.note("losses", train(run, model, adamw(model), range(2)))
    train_alone(run.world, alone, adamw(alone), range(2))
    names = ["other", "__base__"]
    run.note("evaluated", logits(model, adapter_names=names))
    run.agrees("evaluated", logits(model, adapter_names=names), logits(alone, adapter_names=names))


@rows("add_weighted_adapter before sharding, delete_adapter after")
def weighted(run: Run) -> None:
    start()
    model = adapted(lora())
    torch.manual_seed(2)
    model.add_adapter("other", lora())
    model.add_weighted_adapter(["default", "other"], [0.3, 0.7], "mean", combination_type="linear")
    model.set_adapter("mean")
    shard(model)
    run.sharded(model)
    optimizer = adamw(model)
    run.note("losses", train(run, model, optimizer, range(2)))
    model.delete_adapter("other")
    run.note("losses after deletion", train(run, model, optimizer, range(2, 4)))
    run.note("evaluated", logits(model))
    run.note("adapter", gathered(get_peft_model_state_dict(model, adapter_name="mean")))


# ---------------------------------------------------------------------------------------------------------------------
# Weights trained in addition to adapters, and tied weights


@rows("modules_to_save: head, embeddings and norms are trained in full")
def modules_to_save(run: Run) -> None:
    start()
    config = lora(target_modules=ATTENTION, modules_to_save=["lm_head", "embed_tokens", "input_layernorm"])
    model = shard(adapted(config))
    run.sharded(model)
    optimizer = adamw(model)
    run.note("losses", train(run, model, optimizer, range(3)))
    run.note("evaluated", logits(model))
    with model.disable_adapter():
        run.note("base", logits(model))
        run.agrees("base", logits(model), logits(llama()))
    run.note("later losses", train(run, model, optimizer, range(3, 4)))
    run.weights(model)
    run.note("adapter", gathered(get_peft_model_state_dict(model)))


@rows("tied embeddings, LoRA in the blocks")
def tied(run: Run) -> None:
    start()
    model = shard(adapted(lora(), llama(tie_word_embeddings=True)))
    run.sharded(model)
    optimizer = adamw(model)
    run.note("losses", train(run, model, optimizer, range(3)))
    run.note("evaluated", logits(model))
    run.note("later losses", train(run, model, optimizer, range(3, 4)))
    run.weights(model)


@rows("tied embeddings, saved modules tied too (ensure_weight_tying)")
def tied_saved(run: Run) -> None:
    start()

    def make() -> PeftModel:
        config = lora(modules_to_save=["embed_tokens", "lm_head"], ensure_weight_tying=True)
        return adapted(config, llama(tie_word_embeddings=True))

    alone, model = make(), shard(make())
    run.sharded(model)
    optimizer = adamw(model)
    run.note("losses", train(run, model, optimizer, range(3)))
    train_alone(run.world, alone, adamw(alone), range(3))
    run.note("evaluated", logits(model))
    run.agrees("evaluated", logits(model), logits(alone))
    run.weights(model)


@rows("tied embeddings, trainable tokens")
def tied_tokens(run: Run) -> None:
    start()

    def make() -> PeftModel:
        config = lora(trainable_token_indices=[3, 5, 96])
        return adapted(config, llama(tie_word_embeddings=True))

    alone, model = make(), shard(make())
    run.sharded(model)
    optimizer = adamw(model)
    run.note("losses", train(run, model, optimizer, range(3)))
    train_alone(run.world, alone, adamw(alone), range(3))
    run.note("evaluated", logits(model))
    run.agrees("evaluated", logits(model), logits(alone))
    run.weights(model)


@rows("LoRA on the weights of experts (target_parameters)")
def target_parameters(run: Run) -> None:
    start()

    def make() -> PeftModel:
        names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        return adapted(lora(target_modules=ATTENTION, target_parameters=names), gpt_oss())

    alone, model = make(), shard(make())
    run.sharded(model)
    optimizer = adamw(model)
    run.note("losses", train(run, model, optimizer, range(3)))
    train_alone(run.world, alone, adamw(alone), range(3))
    run.note("evaluated", logits(model))
    run.agrees("evaluated", logits(model), logits(alone))
    run.note("later losses", train(run, model, optimizer, range(3, 4)))
    run.weights(model)


@rows("layers repeated with their own adapters (layer_replication), so one group")
def layer_replication(run: Run) -> None:
    start()

    def make() -> PeftModel:
        return adapted(lora(layer_replication=[[0, 2], [1, 2]]))

    alone, model = make(), fully_shard(make())
    run.sharded(model)
    optimizer = adamw(model)
    run.note("losses", train(run, model, optimizer, range(3)))
    train_alone(run.world, alone, adamw(alone), range(3))
    run.note("evaluated", logits(model))
    run.agrees("evaluated", logits(model), logits(alone))
    run.weights(model)


# ---------------------------------------------------------------------------------------------------------------------
# Training settings


@rows("gradient checkpointing with enable_input_require_grads")
def checkpointing(run: Run) -> None:
    start()
    model = adapted(lora(lora_dropout=0.1))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    shard(model)
    run.sharded(model)
    optimizer = adamw(model)
    run.note("losses", train(run, model, optimizer, range(3)))
    run.note("evaluated", logits(model))
    run.note("later losses", train(run, model, optimizer, range(3, 4)))
    run.weights(model)


@rows("gradient checkpointing, reentrant, with enable_input_require_grads")
def reentrant(run: Run) -> None:
    start()
    model = adapted(lora(lora_dropout=0.1))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads()
    shard(model)
    run.sharded(model)
    optimizer = adamw(model)
    run.note("losses", train(run, model, optimizer, range(3)))
    run.note("evaluated", logits(model))
    run.note("later losses", train(run, model, optimizer, range(3, 4)))
    run.weights(model)


@rows("a base in bfloat16, adapters in float32, a mixed precision policy")
def mixed_precision(run: Run) -> None:
    start()
    model = adapted(lora(lora_dropout=0.1), llama().to(torch.bfloat16))
    shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    run.sharded(model)
    optimizer = adamw(model)
    run.note("losses", train(run, model, optimizer, range(3)))
    run.note("evaluated", logits(model))
    run.note("later losses", train(run, model, optimizer, range(3, 4)))
    run.weights(model)


@rows("all in bfloat16 (autocast_adapter_dtype=False)")
def bfloat16(run: Run) -> None:
    start()
    model = shard(adapted(lora(), llama().to(torch.bfloat16), autocast_adapter_dtype=False))
    run.sharded(model)
    optimizer = adamw(model)
    run.note("losses", train(run, model, optimizer, range(3)))
    run.note("evaluated", logits(model))
    run.weights(model)


@rows("forward under autocast")
def autocast(run: Run) -> None:
    start()
    model = shard(adapted(lora(lora_dropout=0.1)))
    run.sharded(model)
    optimizer = adamw(model)
    losses = []
    for step in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch(run.rank, step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    run.note("losses", losses)
    with torch.autocast("cpu", torch.bfloat16):
        run.note("evaluated", logits(model))
    run.weights(model)


@rows("accumulates without sync, clips, LoRA+ optimizer")
def accumulates(run: Run) -> None:
    from peft.optimizers import create_loraplus_optimizer

    start()
    model = shard(adapted(lora(lora_dropout=0.1)))
    run.sharded(model)
    optimizer = create_loraplus_optimizer(model, torch.optim.AdamW, lr=0.01, loraplus_lr_ratio=8)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    norms = []
    for step in range(6):
        model.set_requires_gradient_sync(step % 2 == 1)
        (model(**batch(run.rank, step)).loss / 2).backward()
        if step % 2:
            trained = [p for p in model.parameters() if p.requires_grad]
            norms.append(nn.utils.clip_grad_norm_(trained, 0.05).full_tensor())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    run.note("norms", norms)
    run.weights(model)


@rows("replicas of shards (HSDP)", world=4)
def replicas(run: Run) -> None:
    start()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard(adapted(lora(lora_dropout=0.1)), mesh=mesh)
    run.sharded(model)
    optimizer = adamw(model)
    run.note("losses", train(run, model, optimizer, range(2)))
    run.note("evaluated", logits(model))
    run.weights(model)


@rows("gathered weights stay (reshard_after_forward=False)")
def stays(run: Run) -> None:
    start()
    model = shard(adapted(lora(lora_dropout=0.1)), reshard_after_forward=False)
    run.sharded(model)
    optimizer = adamw(model)
    run.note("losses", train(run, model, optimizer, range(2)))
    run.note("evaluated", logits(model))
    run.note("later losses", train(run, model, optimizer, range(2, 3)))
    run.weights(model)


@rows("made on the meta device, sharded, filled from full states (low_cpu_mem_usage)")
def from_meta(run: Run) -> None:
    start()
    source = adapted(lora())
    with torch.device("meta"):
        base = llama()
    model = shard(get_peft_model(base, lora(), low_cpu_mem_usage=True))
    model.to_empty(device="cpu")
    base.model.rotary_emb = llama().model.rotary_emb
    state = source.state_dict() if run.rank == 0 else {}
    set_model_state_dict(
        model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=True)
    )
    run.sharded(model)
    run.note("evaluated", logits(model))
    run.agrees("evaluated", logits(model), logits(source))
    optimizer = adamw(model)
    run.note("losses", train(run, model, optimizer, range(3)))
    run.weights(model)


@rows("blocks compiled one by one")
def compiled(run: Run) -> None:
    start()
    model = adapted(lora())
    for layer in model.base_model.model.model.layers:
        layer.compile(backend="aot_eager")
    shard(model)
    run.sharded(model)
    optimizer = adamw(model)
    run.note("losses", train(run, model, optimizer, range(2)))
    run.note("evaluated", logits(model))
    run.note("later losses", train(run, model, optimizer, range(2, 3)))
    run.weights(model)


@rows("generate after training")
def generates(run: Run) -> None:
    start()
    model = adapted(lora())
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(model.base_model.model)
    register_fsdp_forward_method(model.base_model.model, "generate")
    run.sharded(model)
    optimizer = adamw(model)
    losses = train(run, model, optimizer, range(2))
    model.eval()
    prompt = batch(0, 50)["input_ids"][:, :4]
    run.note("tokens", model.generate(input_ids=prompt, max_new_tokens=6, do_sample=False))
    with model.disable_adapter():
        run.note("tokens of the base", model.generate(input_ids=prompt, max_new_tokens=6, do_sample=False))
    run.note("losses", losses + train(run, model, optimizer, range(2, 3)))
    run.weights(model)


# ---------------------------------------------------------------------------------------------------------------------
# Files


@rows("save_pretrained of the full state, from_pretrained, sharded again, continues training")
def saves(run: Run) -> None:
    start()
    config = lora(target_modules=ATTENTION, modules_to_save=["lm_head"])
    model = shard(adapted(config))
    optimizer = adamw(model)
    run.sharded(model)
    run.note("losses", train(run, model, optimizer, range(2)))
    state = whole(model)
    if run.rank == 0:
        model.save_pretrained("saved", state_dict=state)
    run.files("saved")
    again = PeftModel.from_pretrained(llama(), "saved", is_trainable=True)
    shard(again)
    run.sharded(again, "sharded again")
    optimizer = adamw(again)
    run.note("evaluated", logits(again))
    run.agrees("evaluated", logits(again), logits(model))
    run.note("later losses", train(run, again, optimizer, range(2, 4)))
    run.weights(again)


@rows("an optimizer that is made after an evaluation")
def optimizer_after_evaluation(run: Run) -> None:
    start()
    config = lora(target_modules=ATTENTION, modules_to_save=["lm_head"])
    alone, model = adapted(config), shard(adapted(config))
    run.sharded(model)
    run.note("evaluated", logits(model))
    optimizer = adamw(model)
    run.note("losses", train(run, model, optimizer, range(3)))
    train_alone(run.world, alone, adamw(alone), range(3))
    run.weights(model)
    run.agrees("weights", model.state_dict(), alone.state_dict(), tolerance=1e-3)


@rows("set_peft_model_state_dict before sharding")
def sets_before(run: Run) -> None:
    start()
    model = shard(adapted(lora()))
    optimizer = adamw(model)
    run.note("losses", train(run, model, optimizer, range(2)))
    state = gathered(get_peft_model_state_dict(model))
    again = adapted(lora())
    loaded = set_peft_model_state_dict(again, state)
    run.note("unexpected", loaded.unexpected_keys)
    shard(again)
    run.sharded(again)
    run.note("evaluated", logits(again))
    run.agrees("evaluated", logits(again), logits(model))
    run.note("later losses", train(run, again, adamw(again), range(2, 4)))
    run.weights(again)


@rows("set_peft_model_state_dict on a sharded model, with its own DTensors")
def sets_sharded(run: Run) -> None:
    start()
    model = shard(adapted(lora()))
    run.sharded(model)
    optimizer = adamw(model)
    run.note("losses", train(run, model, optimizer, range(1)))
    kept = {name: each.clone() for name, each in get_peft_model_state_dict(model).items()}
    before = logits(model)
    run.note("discarded losses", train(run, model, optimizer, range(1, 2)))
    run.note("unexpected", set_peft_model_state_dict(model, kept).unexpected_keys)
    run.note("evaluated", logits(model))
    run.agrees("evaluated", logits(model), before)
    run.note("later losses", train(run, model, optimizer, range(1, 2)))
    run.weights(model)


@rows("set_peft_model_state_dict on a sharded model, with full tensors")
def sets_whole(run: Run) -> None:
    start()
    alone, model = adapted(lora()), shard(adapted(lora()))
    run.sharded(model)
    optimizer = adamw(model)
    run.note("losses", train(run, model, optimizer, range(1)))
    train_alone(run.world, alone, adamw(alone), range(1))
    kept = {name: each.clone() for name, each in gathered(get_peft_model_state_dict(model)).items()}
    run.note("discarded losses", train(run, model, optimizer, range(1, 2)))
    set_peft_model_state_dict(model, kept)
    run.note("evaluated", logits(model))
    run.agrees("evaluated", logits(model), logits(alone), tolerance=1e-4)


@rows("only the trained parts, through get_model_state_dict and set_model_state_dict, with the optimizer")
def trained_state(run: Run) -> None:
    start()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True, strict=False)
    model = shard(adapted(lora()))
    optimizer = adamw(model)
    run.sharded(model)
    run.note("losses", train(run, model, optimizer, range(2)))
    state = get_model_state_dict(model, options=options)
    moments = get_optimizer_state_dict(model, optimizer, options=options)
    run.note("names", sorted(state))
    again = shard(adapted(lora()))
    its_optimizer = adamw(again)
    loading = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    set_model_state_dict(again, state, options=loading)
    set_optimizer_state_dict(again, its_optimizer, moments, options=loading)
    run.note("evaluated", logits(again))
    run.agrees("evaluated", logits(again), logits(model))
    run.note("later losses", train(run, again, its_optimizer, range(2, 4)))
    run.weights(again)


@rows("the adapter as a distributed checkpoint")
def distributed_checkpoint(run: Run) -> None:
    start()
    model = shard(adapted(lora()))
    run.sharded(model)
    optimizer = adamw(model)
    run.note("losses", train(run, model, optimizer, range(2)))
    dcp_save(get_peft_model_state_dict(model), checkpoint_id="saved")
    run.files("saved")
    again = shard(adapted(lora()))
    state = get_peft_model_state_dict(again)
    dcp_load(state, checkpoint_id="saved")
    set_peft_model_state_dict(again, state)
    run.note("evaluated", logits(again))
    run.agrees("evaluated", logits(again), logits(model))
    run.note("later losses", train(run, again, adamw(again), range(2, 4)))
    run.weights(again)


@rows("a second adapter loaded, then sharded (load_adapter)")
def loads_beside(run: Run) -> None:
    start()
    if run.rank == 0:
        adapted(lora()).save_pretrained("saved")
    dist.barrier()
    model = adapted(lora(r=5))
    model.load_adapter("saved", "other", is_trainable=True)
    model.set_adapter("other")
    shard(model)
    run.sharded(model)
    optimizer = adamw(model)
    run.note("losses", train(run, model, optimizer, range(2)))
    run.note("evaluated", logits(model))
    run.note("later losses", train(run, model, optimizer, range(2, 3)))
    run.weights(model)


# ---------------------------------------------------------------------------------------------------------------------
# Adapters added after sharding


def average_replicas(model: nn.Module) -> None:
    """Average the gradients of unsharded adapters with hooks. These adapters are replicas on all ranks."""

    def average(param: nn.Parameter) -> None:
        dist.all_reduce(param.grad)
        param.grad /= dist.get_world_size()

    for param in model.parameters():
        if param.requires_grad and not isinstance(param, DTensor):
            param.register_post_accumulate_grad_hook(average)


LATE = {
    "LoRA": lambda: lora(),
    "IA3": lambda: peft.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False
    ),
    "OFT": lambda: peft.OFTConfig(target_modules=ATTENTION, oft_block_size=8, init_weights=False),
    "VeRA": lambda: peft.VeraConfig(r=5, target_modules=["q_proj", "o_proj"]),
}


def added_late(config: Callable[[], peft.PeftConfig]) -> Callable[[Run], None]:
    def program(run: Run) -> None:
        start()
        alone = adapted(config())
        model = adapted(config(), shard(llama()))
        average_replicas(model)
        run.sharded(model)
        run.note("losses", train(run, model, adamw(model), range(3)))
        train_alone(run.world, alone, adamw(alone), range(3))
        run.note("evaluated", logits(model))
        run.agrees("evaluated", logits(model), logits(alone), tolerance=1e-4)
        run.note("later losses", train(run, model, adamw(model), range(3, 4)))
        run.weights(model)

    return program


for name, config in LATE.items():
    rows.add(f"{name} added to a sharded base, as replicas that hooks average", added_late(config))


@rows("LoRA added between sharded blocks and the root, sharded layer by layer")
def sharded_late(run: Run) -> None:
    start()
    base = llama()
    for layer in base.model.layers:
        fully_shard(layer)
    alone = adapted(lora())
    model = adapted(lora(), base)
    for module in list(model.modules()):
        if isinstance(module, peft.tuners.lora.LoraLayer):
            for part in [*module.lora_A.values(), *module.lora_B.values()]:
                fully_shard(part)
    fully_shard(model)
    run.sharded(model)
    optimizer = adamw(model)
    run.note("losses", train(run, model, optimizer, range(3)))
    train_alone(run.world, alone, adamw(alone), range(3))
    run.note("evaluated", logits(model))
    run.agrees("evaluated", logits(model), logits(alone), tolerance=1e-4)
    run.note("later losses", train(run, model, optimizer, range(3, 4)))
    run.weights(model)


@rows("a base that was trained in full, sharded, gets an adapter and trains that")
def whole_then_adapted(run: Run) -> None:
    start()
    base = shard(llama())
    run.sharded(base)
    run.note("losses", train(run, base, adamw(base), range(2)))
    model = adapted(lora(), base)
    average_replicas(model)
    run.note("losses of the adapter", train(run, model, adamw(model), range(2, 4)))
    run.note("evaluated", logits(model))
    with model.disable_adapter():
        run.note("base", logits(model))
    run.weights(model)


@rows("a second adapter added to a sharded model (add_adapter)")
def second_late(run: Run) -> None:
    start()

    def make() -> PeftModel:
        return adapted(lora())

    alone, model = make(), shard(make())
    run.sharded(model)
    run.note("losses", train(run, model, adamw(model), range(2)))
    train_alone(run.world, alone, adamw(alone), range(2))
    for each in (alone, model):
        torch.manual_seed(2)
        each.add_adapter("other", lora(r=5, target_modules=ATTENTION))
        each.set_adapter("other")
    average_replicas(model)
    run.note("losses of the other", train(run, model, adamw(model), range(2, 4)))
    train_alone(run.world, alone, adamw(alone), range(2, 4))
    run.note("evaluated", logits(model))
    run.agrees("evaluated", logits(model), logits(alone), tolerance=1e-4)
    for each in (alone, model):
        each.set_adapter("default")
    run.note("first again", logits(model))
    run.agrees("first again", logits(model), logits(alone), tolerance=1e-4)


@rows("an adapter loaded into a sharded model for inference (load_adapter)")
def loads_for_inference(run: Run) -> None:
    start()
    if run.rank == 0:
        adapted(lora(r=5)).save_pretrained("saved")
    dist.barrier()
    alone, model = adapted(lora()), shard(adapted(lora()))
    run.sharded(model)
    optimizer = adamw(model)
    losses = train(run, model, optimizer, range(2))
    for each in (alone, model):
        each.load_adapter("saved", "other")
        each.set_adapter("other")
    run.note("evaluated", logits(model))
    run.agrees("evaluated", logits(model), logits(alone))
    model.set_adapter("default")
    run.note("losses", losses + train(run, model, optimizer, range(2, 4)))
    run.weights(model)
