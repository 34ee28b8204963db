"""Rows for bitsandbytes: frozen 4-bit and 8-bit weights with PEFT adapters, in a custom loop and with Trainer."""

import copy
import logging
from functools import partial
from typing import Any

import bitsandbytes as bnb
import torch
import torch.distributed as dist
from _trainer import Samples, arguments, curve, llama, reshard
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer

from _rows import Rows, Run

rows = Rows(
    "bitsandbytes: QLoRA", environment="quantized", versions=("bitsandbytes", "peft", "transformers", "accelerate")
)
# In an evaluation on a CPU with AVX512-BF16, bitsandbytes packs 4-bit weights into another layout, which requires
# unsharded weights. This fails with any sharding. The path does not exist on accelerators, so these rows disable it.
bnb.nn.modules.has_avx512bf16 = lambda: False
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it logs a warning for every cast
WIDTH, WIDE = 64, 96
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def layer(inputs: int, outputs: int, bits: int, **settings: Any) -> nn.Module:
    """Return a frozen quantized layer."""
    whole = nn.Linear(inputs, outputs)
    if bits == 8:
        made = bnb.nn.Linear8bitLt(inputs, outputs, has_fp16_weights=False)
    else:
        made = bnb.nn.Linear4bit(inputs, outputs, quant_type="nf4", **settings)
    made.load_state_dict(whole.state_dict())
    return made.to("cpu").requires_grad_(False)


class Block(nn.Module):
    """A feed-forward layer with a residual."""

    def __init__(self, wide: int, **settings: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = layer(WIDTH, wide, **settings), layer(wide, WIDTH, **settings)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Three blocks and a head."""

    def __init__(self, bits: int, wide: int, checkpoints: bool, **settings: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(wide, bits=bits, **settings) for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)
        self.checkpoints = checkpoints
        setattr(self, f"is_loaded_in_{bits}bit", True)  # PEFT reads this attribute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.head(x)


def adapted(bits: int = 4, wide: int = WIDE, checkpoints: bool = False, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    base = Stack(bits, wide, checkpoints, **settings).requires_grad_(False)
    return get_peft_model(base, LoraConfig(r=4, target_modules=["up", "down"], init_lora_weights=False))


def shard(model: nn.Module, alone: bool = False, **given: Any) -> nn.Module:
    for module in list(model.modules()):
        if isinstance(module, (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)) and alone:
            fully_shard(module, **given)
    for module in list(model.modules()):
        if isinstance(module, Block):
            fully_shard(module, **given)
    return fully_shard(model, **given)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Train on the same batch on all ranks: the mean of the gradients is bitwise identical to that of one rank."""
    losses = []
    for step in steps:
        torch.manual_seed(step)
        loss = model(torch.randn(6, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def evaluated(model: nn.Module) -> torch.Tensor:
    torch.manual_seed(50)
    with torch.no_grad():
        output = model.eval()(torch.randn(6, WIDTH))
    model.train()
    return output


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


def life(run: Run, given: dict[str, Any] | None = None, mesh: tuple[int, int] | None = None, **settings: Any) -> None:
    """Train, evaluate and train again. Losses, adapters and quantized bytes must equal those of the unsharded model."""
    dist.init_process_group("gloo")
    given = dict(given or {})
    if mesh is not None:
        given["mesh"] = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
    model, whole = shard(adapted(**settings), **given), adapted(**settings)
    run.sharded(model)
    optimizers = sgd(model), sgd(whole)
    run.agrees("losses", train(model, optimizers[0], range(3)), train(whole, optimizers[1], range(3)), 0.0)
    run.agrees("evaluated", evaluated(model), evaluated(whole), 0.0)
    steps = range(3, 4)
    run.agrees("losses after evaluation", train(model, optimizers[0], steps), train(whole, optimizers[1], steps), 0.0)
    run.agrees("adapters", trained(model), trained(whole), 0.0)
    for name, base in whole.named_parameters():
        if not base.requires_grad and base.element_size() != base.numel():
            ours = model.get_parameter(name).full_tensor().contiguous().view(torch.uint8)
            assert torch.equal(ours, base.detach().contiguous().view(torch.uint8)), name


def add(title: str, **given: Any) -> None:
    rows.add(title, partial(_lived, given=given), world=4 if "mesh" in given else 2)


def _lived(run: Run, given: dict[str, Any]) -> None:
    life(run, **given)


for storage in (torch.uint8, torch.bfloat16, torch.float16, torch.float32):
    add(f"4 bits in {str(storage).removeprefix('torch.')}", quant_storage=storage)
add("4 bits, statistics not compressed", compress_statistics=False)
add("4 bits, uneven shards", wide=67 * 2)
add("4 bits, blocks are activation checkpoints", checkpoints=True)
add("4 bits, kept gathered until backward", given={"reshard_after_forward": False})
add("4 bits, each layer is its own group", given={"alone": True})
add("4 bits, HSDP, four ranks", mesh=(2, 2))
add("8 bits", bits=8)
add("8 bits, uneven shards, blocks are activation checkpoints", bits=8, wide=67, checkpoints=True)
add("8 bits, HSDP, four ranks", bits=8, mesh=(2, 2))


@rows("4 bits in float32 under a bfloat16 policy")
def float32_under_bfloat16(run: Run) -> None:
    dist.init_process_group("gloo")
    losses = []
    for storage in (torch.uint8, torch.float32):
        model = shard(adapted(quant_storage=storage), mp_policy=BF16)
        losses.append(train(model, sgd(model), range(3)))
    run.sharded(model)
    run.agrees("losses", losses[1], losses[0], 0.0)  # float32 storage is not cast to bfloat16


@rows("4 bits: a state dict has the statistics of every weight")
def states(run: Run) -> None:
    dist.init_process_group("gloo")
    model, whole = shard(adapted(quant_storage=torch.bfloat16)), adapted(quant_storage=torch.bfloat16)
    train(model, sgd(model), range(1))
    run.sharded(model)
    state = {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in model.state_dict().items()}
    wanted = {n: v for n, v in whole.state_dict().items() if ".weight." in n and "lora" not in n}
    assert any("absmax" in name for name in wanted)
    run.agrees("statistics", {n: state[n] for n in wanted}, wanted, 0.0)


@rows("8 bits: no rank keeps full weights")
def memory(run: Run) -> None:
    dist.init_process_group("gloo")
    model = shard(adapted(8))
    train(model, sgd(model), range(2))
    run.sharded(model)
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear8bitLt) and hasattr(module, "state"):
            local = module.weight.to_local()
            assert local.numel() * run.world == module.weight.numel()
            assert getattr(module.weight, "CB", None) is None
            assert module.state.CB.untyped_storage().nbytes() == 0


@rows("PEFT merges adapters into 4 bits within full_parameters")
def merged(run: Run) -> None:
    merge(run, 4)


@rows("PEFT merges adapters into 8 bits within full_parameters")
def merged8(run: Run) -> None:
    merge(run, 8)


def merge(run: Run, bits: int) -> None:
    from composable_shard.checkpoint import full_parameters

    dist.init_process_group("gloo")
    model, whole = shard(adapted(bits)), adapted(bits)
    run.sharded(model)
    with full_parameters(model):
        model.merge_adapter()
    whole.merge_adapter()
    run.agrees("merged", evaluated(model), evaluated(whole), 0.0)


# ---------------------------------------------------------------------------------------------------------------------
# Transformers


def loaded(run: Run, bits: int, **settings: Any) -> nn.Module:
    """Load a model from a folder with quantization, and add adapters."""
    folder = f"pretrained{run.rank}"
    llama(hidden_size=64, intermediate_size=96, head_dim=16).save_pretrained(folder)
    if bits == 4:
        settings = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True} | settings
    config = BitsAndBytesConfig(**{f"load_in_{bits}bit": True}, **settings)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map={"": "cpu"})
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))


def by_trainer(run: Run, bits: int, changes: dict[str, Any], **settings: Any) -> None:
    model = loaded(run, bits, **settings)
    whole = copy.deepcopy(model)
    trainer = Trainer(model=model, args=arguments(**changes), train_dataset=Samples(24), eval_dataset=Samples(5))
    trainer.train()
    reshard(trainer.model)
    run.sharded(trainer.model)
    run.note("training", curve(trainer))
    run.note("adapters", trained(trainer.model))
    run.note("evaluated", trainer.evaluate()["eval_loss"])
    adapters = {n: p.full_tensor() for n, p in trained(trainer.model).items()}
    whole.load_state_dict(adapters, strict=False)
    whole.eval(), trainer.model.eval()
    with torch.no_grad():
        outputs = [side(input_ids=Samples(2).ids).logits.float() for side in (trainer.model, whole)]
    run.agrees("logits with the trained adapters", *outputs, 1e-2 if "bf16" in changes else 1e-5)


TRAINED = {
    "4 bits": (4, {}, {}),
    "4 bits in bfloat16, bf16 and gradient checkpoints": (
        4,
        {"bf16": True, "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
        {"bnb_4bit_quant_storage": torch.bfloat16, "bnb_4bit_compute_dtype": torch.bfloat16},
    ),
    "8 bits": (8, {}, {}),
}
for name, (bits, changes, settings) in TRAINED.items():
    rows.add(f"Transformers, PEFT and Trainer: {name}", partial(by_trainer, bits=bits, changes=changes, **settings))
