"""Rows for Composer (mosaicml): its Trainer with FSDP2, its checkpoints, and `parallelize_model`, on a CPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from _transformer import Config, Transformer, next_token_loss, tokens_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

# Composer imports torchvision, whose compiled operators belong to builds of torch for GPUs. torchvision is importable
# without them if these two operators are declared. The rows do not use them.
for operator in ("nms", "qnms"):
    torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import composer.distributed.prepare_distributed  # noqa: E402
import composer.trainer.trainer  # noqa: E402
from composer import Trainer  # noqa: E402
from composer.algorithms import EMA, GradientClipping  # noqa: E402
from composer.callbacks import OptimizerMonitor  # noqa: E402
from composer.checkpoint import get_model_state_dict, get_optim_state_dict  # noqa: E402
from composer.distributed.prepare_distributed import parallelize_model  # noqa: E402
from composer.loggers import InMemoryLogger  # noqa: E402
from composer.models import ComposerModel, HuggingFaceModel  # noqa: E402
from composer.optim import DecoupledAdamW, LinearScheduler  # noqa: E402
from composer.utils import dist  # noqa: E402
from composer.utils.parallelism import FSDP2Config  # noqa: E402
from peft import LoraConfig  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp.wrap import CustomPolicy  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from _rows import Rows, Run  # noqa: E402

rows = Rows("Composer", environment="composer", versions=("mosaicml", "torch", "transformers", "peft"))

# Composer refuses bf16 on a CPU because it has no autocast there. With FSDP2, the mixed-precision policy casts.
for module in (composer.trainer.trainer, composer.distributed.prepare_distributed):
    module._validate_precision = lambda *_: None

# Composer wraps only the direct children of its model as a whole, unless the model names the blocks.
BLOCKS = ("Block", "LlamaDecoderLayer")
BATCHES = 4


def is_block(module: nn.Module) -> bool:
    return type(module).__name__ in BLOCKS


class Decoder(ComposerModel):
    """A decoder for next-token prediction. Its blocks are the units to shard and to checkpoint."""

    def __init__(self, config: Config, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.decoder = Transformer(config)
        self.decoder.fsdp_wrap_fn = is_block
        self.decoder.activation_checkpointing_fn = is_block

    def forward(self, batch: Tensor) -> Tensor:
        return self.decoder(batch)

    def loss(self, outputs: Tensor, batch: Tensor) -> Tensor:
        return next_token_loss(outputs, batch)

    def eval_forward(self, batch: Tensor, outputs: Any = None) -> Tensor:
        return self.decoder(batch) if outputs is None else outputs


class Tokens(Dataset[Any]):
    """Random token sequences."""

    def __init__(self, count: int, named: bool = False) -> None:
        self.count, self.named = count, named

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        tokens = tokens_of(index, 0, batch=1)[0]
        return {"input_ids": tokens, "labels": tokens} if self.named else tokens


def batches(count: int, named: bool) -> DataLoader[Any]:
    """Return a loader of `count` batches of four sequences per rank."""
    data = Tokens(4 * count * dist.get_world_size(), named)
    return DataLoader(data, batch_size=4, sampler=dist.get_sampler(data, shuffle=False))


def initialize() -> None:
    os.environ["NODE_RANK"] = "0"  # set by Composer's launcher
    dist.initialize_dist("cpu")


def trainer_of(model: ComposerModel, fsdp: dict[str, Any] | None = None, **changes: Any) -> Trainer:
    """Return Composer's trainer, which shards the model."""
    initialize()
    named = isinstance(model, HuggingFaceModel)
    settings: dict[str, Any] = {
        "model": model,
        "train_dataloader": batches(BATCHES, named),
        "max_duration": f"{BATCHES}ba",
        "optimizers": DecoupledAdamW(model.parameters(), lr=0.01, weight_decay=0.001),
        "schedulers": LinearScheduler(),
        "parallelism_config": {"fsdp": FSDP2Config(**fsdp or {})},
        "algorithms": [GradientClipping("norm", 0.5)],
        "callbacks": [OptimizerMonitor(log_optimizer_metrics=False, batch_log_interval=1)],
        "loggers": [InMemoryLogger()],
        "device": "cpu",
        "seed": 3,
        "run_name": "run",
        "progress_bar": False,
        "python_log_level": None,
    }
    return Trainer(**settings | changes)


def logged(trainer: Trainer) -> dict[str, list[Any]]:
    """Return the losses, rates, metrics and norms that Composer logged, without times."""
    found = trainer.logger.destinations[0].data
    kept = ("loss/", "l2_norm/", "lr-", "metrics/", "layerwise_lr")
    return {name: [value for _, value in values] for name, values in found.items() if name.startswith(kept)}


def trains(run: Run, trainer: Trainer, name: str = "") -> Trainer:
    """Train, then record what Composer logged and the weights."""
    run.sharded(trainer.state.model, f"sharded{name}")
    trainer.fit()
    run.note(f"logged{name}", logged(trainer))
    run.weights(trainer.state.model, f"weights{name}")
    return trainer


@rows("Trainer: blocks as groups, clipping, scheduler, norms of OptimizerMonitor")
def plain(run: Run) -> None:
    trains(run, trainer_of(Decoder(Config())))


@rows("Trainer: bf16, accumulation over microbatches, reshard_after_forward=False")
def accumulates(run: Run) -> None:
    settings = {"reshard_after_forward": False}
    trains(run, trainer_of(Decoder(Config()), settings, precision="amp_bf16", device_train_microbatch_size=2))


@rows("Trainer: mixed_precision='PURE' in bf16, reduction in bf16")
def pure(run: Run) -> None:
    trains(run, trainer_of(Decoder(Config()), {"mixed_precision": "PURE"}, precision="amp_bf16"))


@rows("Trainer: tied head, clipping by value")
def tied(run: Run) -> None:
    clip = [GradientClipping("value", 0.05)]
    trains(run, trainer_of(Decoder(Config(tied=True)), algorithms=clip))


@rows("Trainer: checkpoints of activations, offloaded to the CPU, with dropout")
def checkpointed(run: Run) -> None:
    settings = {"activation_checkpointing": True, "activation_cpu_offload": True}
    trains(run, trainer_of(Decoder(Config()), settings))


@rows("Trainer: the EMA algorithm")
def averaged(run: Run) -> None:
    average = EMA(half_life="2ba", update_interval="1ba")
    trains(run, trainer_of(Decoder(Config()), algorithms=[average]))
    run.weights(average.ema_model, "averages")


@rows("Trainer: weights on rank 0, meta tensors on rank 1")
def mixed_initialization(run: Run) -> None:
    model = Decoder(Config())
    if run.rank:
        model.to("meta")
    trains(run, trainer_of(model))


@rows("Trainer: evaluation between batches")
def evaluates(run: Run) -> None:
    more = {"eval_dataloader": batches(2, False), "eval_interval": "2ba"}
    trains(run, trainer_of(Decoder(Config()), **more))


@rows(
    "Trainer: four ranks",
    world=4,
    tolerance=1e-5,
    why="on gloo, FSDP2 and ours add the gradients of four ranks in different orders",
)
def four(run: Run) -> None:
    trains(run, trainer_of(Decoder(Config())))


def resumes(run: Run, model: Any, kind: str, **load: Any) -> None:
    """Save after the second batch of four. Resume from it in a new trainer; the last weights must be equal."""
    settings = {"state_dict_type": kind}
    save = {"save_folder": "saved", "save_interval": "2ba", "save_filename": "at{batch}.pt"}
    whole = trains(run, trainer_of(model(0), settings, **save))
    saved = "saved/ep0-ba2" if kind == "sharded" else "saved/at2.pt"
    dist.barrier()
    assert Path(saved).exists(), sorted(Path("saved").iterdir())
    again = trainer_of(model(1), settings | load, load_path=saved)
    trains(run, again, ", resumed")
    run.agrees("resumed weights", run.noted["weights, resumed"], run.noted["weights"], 0.0)
    run.note("model", get_model_state_dict(whole.state.model, sharded_state_dict=False))
    run.note("optimizer", get_optim_state_dict(whole.state.model, whole.state.optimizers[0], sharded_state_dict=False))


def decoder(seed: int) -> ComposerModel:
    return Decoder(Config(), seed)


@rows("Trainer: save and resume, sharded state dict")
def resumes_sharded(run: Run) -> None:
    resumes(run, decoder, "sharded")


@rows("Trainer: save and resume, full state dict")
def resumes_full(run: Run) -> None:
    resumes(run, decoder, "full")


@rows("Trainer: save and resume, full state dict read on rank 0 only")
def resumes_rank0(run: Run) -> None:
    def model(seed: int) -> ComposerModel:
        # In the second trainer, only rank 0 has weights. Composer broadcasts them after it has read the checkpoint.
        return decoder(seed).to("meta") if seed and run.rank else decoder(seed)

    resumes(run, model, "full", load_monolith_rank0_only=True)


def llama(seed: int, adapters: bool) -> HuggingFaceModel:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 36, "intermediate_size": 71, "num_hidden_layers": 2, "vocab_size": Config().vocabulary}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    lora = {}
    if adapters:
        lora["peft_config"] = LoraConfig(
            r=3, lora_alpha=6, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
        )
    made = HuggingFaceModel(model, use_logits=False, **lora)
    made.model.fsdp_wrap_fn = is_block
    return made


@rows("HuggingFaceModel: Llama, save and resume, sharded state dict")
def transformers_llama(run: Run) -> None:
    resumes(run, lambda seed: llama(seed, adapters=False), "sharded")


@rows("HuggingFaceModel with LoRA, save and resume, full state dict of the adapter")
def transformers_lora(run: Run) -> None:
    # The checkpoint contains only the adapter. The frozen weights have the same seed.
    resumes(run, lambda seed: llama(0, adapters=True), "full")


def parallelizes(run: Run, policy: CustomPolicy | None = None, **settings: Any) -> None:
    """Shard with `parallelize_model`, train in an ordinary loop, and gather the full weights."""
    model = Decoder(Config()).decoder
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    parallelize_model(model, FSDP2Config(**settings), optimizer, precision="fp32", fsdp_wrap_policy=policy)
    run.sharded(model)
    losses = []
    for step in range(3):
        torch.manual_seed(10 * step + run.rank)
        tokens = tokens_of(step, run.rank)
        loss = next_token_loss(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    run.note("losses", losses)
    run.weights(model)
    with torch.no_grad():
        run.note("full", get_model_state_dict(model, sharded_state_dict=False))


@rows("parallelize_model with checkpoints of activations, ordinary loop")
def parallelizes_checkpointed(run: Run) -> None:
    initialize()
    parallelizes(run, activation_checkpointing=True)


@rows("parallelize_model with a wrap policy that sets reshard_after_forward for each block")
def parallelizes_policy(run: Run) -> None:
    initialize()
    kept: set[int] = set()

    def choose(module: nn.Module) -> bool | dict[str, Any]:
        if not is_block(module):
            return isinstance(module, Transformer)
        kept.add(id(module))
        return {"reshard_after_forward": len(kept) == 1}

    parallelizes(run, CustomPolicy(choose))


@rows("parallelize_model with a mesh of replicas and shards, four ranks", world=4)
def parallelizes_hybrid(run: Run) -> None:
    initialize()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    parallelizes(run, device_mesh=mesh)
