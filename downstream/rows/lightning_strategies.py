"""Rows for Lightning: ModelParallelStrategy of its Trainer and of Fabric, with FSDP2."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.strategies import ModelParallelStrategy as FabricStrategy
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim.swa_utils import get_ema_avg_fn
from torch.utils.data import DataLoader, Dataset

from _rows import Rows, Run

rows = Rows("Lightning", environment="lightning", versions=("lightning",))

VOCABULARY, LENGTH = 97, 12


class Attention(nn.Module):
    """Attention with grouped heads and rotary position embeddings."""

    def __init__(self, dim: int, heads: int = 4, groups: int = 2, size: int = 10) -> None:
        super().__init__()
        self.size = size
        self.q = nn.Linear(dim, heads * size, bias=False)
        self.k = nn.Linear(dim, groups * size, bias=False)
        self.v = nn.Linear(dim, groups * size, bias=False)
        self.o = nn.Linear(heads * size, dim, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        def turned(y: torch.Tensor) -> torch.Tensor:
            one, other = y.chunk(2, -1)
            cos, sin = angles.cos().to(y.dtype), angles.sin().to(y.dtype)
            return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)

        q, k, v = (layer(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        out = nn.functional.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True, enable_gqa=True)
        return self.o(out.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(dim, inner), nn.Linear(dim, inner), nn.Linear(inner, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, dim: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(dim), FeedForward(dim, inner)
        self.norm, self.second_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm(x), angles))
        return x + self.dropout(self.feed_forward(self.second_norm(x)))


class Transformer(nn.Module):
    def __init__(self, dim: int = 36, inner: int = 71, layers: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, dim)
        self.layers = nn.ModuleList(Block(dim, inner, dropout) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        places = torch.arange(tokens.shape[1], dtype=torch.float32, device=tokens.device)
        angles = torch.outer(places, 100.0 ** -torch.arange(0, 1, 0.2, device=tokens.device))
        for layer in self.layers:
            x = layer(x, angles)
        return self.head(self.norm(x))

    def likeliest(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the most likely next tokens. The method is not `forward`, so Fabric requires that it is marked."""
        return self(tokens)[:, -1].argmax(-1)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


class Tokens(Dataset[torch.Tensor]):
    def __init__(self, count: int = 16) -> None:
        self.tokens = torch.randint(0, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.tokens[index]


def loader(count: int = 16) -> DataLoader[torch.Tensor]:
    return DataLoader(Tokens(count), batch_size=2)


def sharded(model: nn.Module, mesh: DeviceMesh, **settings: Any) -> nn.Module:
    """Shard each block, then the model."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["data_parallel"], **settings)
    return fully_shard(model, mesh=mesh["data_parallel"], **settings)


# ---------------------------------------------------------------------------------------------------------------------
# Trainer


class Module(L.LightningModule):
    """A language model that follows the guide for ModelParallelStrategy."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.settings = settings
        self.model: nn.Module | None = None
        self.seen: list[float] = []

    def configure_model(self) -> None:
        if self.model is not None:
            return
        torch.manual_seed(0)
        self.model = self.shard(Transformer())

    def shard(self, model: nn.Module) -> nn.Module:
        return sharded(model, self.device_mesh, **self.settings)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = loss_of(self.model, batch)
        self.seen.append(loss.item())
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("validated", loss_of(self.model, batch), sync_dist=True)

    def test_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("tested", loss_of(self.model, batch), sync_dist=True)

    def predict_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.model(batch).float()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}]


class WithoutDropout(Module):
    """A module whose results do not depend on the state of the random number generator."""

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(0)
            self.model = self.shard(Transformer(dropout=0.0))


def trainer(world: int = 2, tensor: int = 1, whole: bool = False, **changes: Any) -> L.Trainer:
    strategy = ModelParallelStrategy(
        data_parallel_size=world // tensor, tensor_parallel_size=tensor, save_distributed_checkpoint=not whole
    )
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": world,
        "strategy": strategy,
        "max_steps": 3,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "limit_val_batches": 2,
        "log_every_n_steps": 1,
    }
    return L.Trainer(**settings | changes)


def fits(run: Run, made: L.Trainer, module: L.LightningModule) -> None:
    """Fit (with sanity checks and validation), validate, and fit two more steps."""
    torch.manual_seed(run.rank)
    made.fit(module, loader(), loader(6))
    run.sharded(module)
    run.weights(module)
    run.note("validated", made.validate(module, loader(6), verbose=False))
    made.fit_loop.epoch_loop.max_steps += 2
    torch.manual_seed(run.rank)
    made.fit(module, loader(), loader(6))
    run.note("losses", module.seen)
    run.weights(module, "final weights")


@rows("Trainer: fit, validate, test, predict, fit again")
def plain(run: Run) -> None:
    made, module = trainer(val_check_interval=2), Module()
    fits(run, made, module)
    run.note("tested", made.test(module, loader(6), verbose=False))
    run.note("predicted", made.predict(module, loader(6)))
    run.note("logged", {name: each.item() for name, each in made.callback_metrics.items()})


@rows("Trainer: clips by norm, accumulates")
def clips(run: Run) -> None:
    fits(run, trainer(gradient_clip_val=0.3, accumulate_grad_batches=2), Module())


@rows("Trainer: clips by value, gradients are looked at before each step")
def looks(run: Run) -> None:
    class Looks(Module):
        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            norm = nn.utils.get_total_norm([p.grad for p in self.parameters()])
            self.seen.append(norm.full_tensor().item())

        def configure_gradient_clipping(self, optimizer: Any, **_: Any) -> None:
            self.clip_gradients(optimizer, gradient_clip_val=0.002, gradient_clip_algorithm="value")

    fits(run, trainer(), Looks())


@rows("Trainer: bf16-true")
def bf16_true(run: Run) -> None:
    fits(run, trainer(precision="bf16-true"), Module())


@rows("Trainer: bf16-mixed")
def bf16_mixed(run: Run) -> None:
    fits(run, trainer(precision="bf16-mixed", gradient_clip_val=0.3), Module())


@rows("Trainer: MixedPrecisionPolicy in configure_model, weights that stay gathered")
def policy(run: Run) -> None:
    settings = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32), "reshard_after_forward": False}
    fits(run, trainer(), Module(**settings))


@rows("Trainer: activation checkpoints around blocks")
def checkpoints(run: Run) -> None:
    class Checkpointed(Module):
        def shard(self, model: nn.Module) -> nn.Module:
            model.layers = nn.ModuleList(checkpoint_wrapper(layer) for layer in model.layers)
            return super().shard(model)

    fits(run, trainer(), Checkpointed())


@rows("Trainer: blocks compiled")
def compiled_blocks(run: Run) -> None:
    class Compiled(Module):
        def shard(self, model: nn.Module) -> nn.Module:
            for layer in model.layers:
                layer.compile(backend="aot_eager")
            return super().shard(model)

    fits(run, trainer(), Compiled())


@rows("Trainer: the module compiled by torch.compile in configure_model")
def compiled(run: Run) -> None:
    class Compiled(Module):
        def shard(self, model: nn.Module) -> nn.Module:
            return torch.compile(super().shard(model), backend="aot_eager")

    fits(run, trainer(), Compiled())


@rows("Trainer: made on the meta device (init_module)")
def meta(run: Run) -> None:
    class Meta(Module):
        def configure_model(self) -> None:
            if self.model is None:
                with torch.device("meta"):
                    model = Transformer()
                self.model = self.shard(model)

    torch.manual_seed(0)
    fits(run, trainer(), Meta())


@rows("Trainer: tensor parallel and sharded", world=4)
def two_dimensions(run: Run) -> None:
    class TwoDimensions(Module):
        def configure_model(self) -> None:
            if self.model is None:
                torch.manual_seed(0)
                self.model = self.shard(Transformer(inner=72))

        def shard(self, model: nn.Module) -> nn.Module:
            return sharded(tensor_parallel(model, self.device_mesh), self.device_mesh)

    fits(run, trainer(4, 2), TwoDimensions())


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    for layer in model.layers:
        parallelize_module(layer.feed_forward, mesh["tensor_parallel"], plan)
    return model


@rows("Trainer: manual optimization, two optimizers in turn, toggled")
def manual(run: Run) -> None:
    turns(run, checks=0)


@rows("Trainer: manual optimization, toggled, after a sanity check")
def manual_checked(run: Run) -> None:
    turns(run, checks=1)


def turns(run: Run, checks: int) -> None:
    def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
        ends = [*model.embed.parameters(), *model.head.parameters()]
        inner = [*model.layers.parameters(), *model.norm.parameters()]
        return [torch.optim.AdamW(ends, lr=0.01), torch.optim.SGD(inner, lr=0.1, momentum=0.9)]

    class Manual(WithoutDropout):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.given: list[torch.Tensor] = []

        def training_step(self, batch: torch.Tensor, index: int) -> None:
            self.given.append(batch)
            for optimizer in self.optimizers():
                self.toggle_optimizer(optimizer)
                loss = loss_of(self.model, batch)
                self.manual_backward(loss)
                self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
                optimizer.step()
                optimizer.zero_grad()
                self.untoggle_optimizer(optimizer)
                self.seen.append(loss.item())

        def configure_optimizers(self) -> Any:
            return optimizers(self.model)

    made, module = trainer(max_steps=6, num_sanity_val_steps=checks), Manual()
    made.fit(module, loader(), loader(6))
    run.sharded(module)
    run.note("losses", module.seen)
    run.weights(module)
    given: list[Any] = [None] * run.world
    dist.all_gather_object(given, module.given)
    torch.manual_seed(0)
    alone = Transformer(dropout=0.0)
    alternating = optimizers(alone)
    for tokens in map(torch.cat, zip(*given, strict=True)):  # the batches of both ranks
        for optimizer in alternating:
            own = optimizer.param_groups[0]["params"]
            for p, grad in zip(own, torch.autograd.grad(loss_of(alone, tokens), own), strict=True):
                p.grad = grad
            nn.utils.clip_grad_norm_(own, 0.5)
            optimizer.step()
    run.agrees("weights", dict(module.model.named_parameters()), dict(alone.named_parameters()), tolerance=1e-3)


@rows("Trainer: manual optimization, accumulation without sync")
def manual_accumulation(run: Run) -> None:
    class Accumulates(Module):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: torch.Tensor, index: int) -> None:
            optimizer, last = self.optimizers(), index % 2 == 1
            self.model.set_requires_gradient_sync(last)
            loss = loss_of(self.model, batch) / 2
            self.manual_backward(loss)
            self.seen.append(loss.item())
            if last:
                optimizer.step()
                optimizer.zero_grad()

    fits(run, trainer(), Accumulates())


@rows("Trainer: two models of one module, each with an optimizer (as GANs)")
def two_models(run: Run) -> None:
    def critic() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(VOCABULARY, 23), nn.Tanh(), nn.Linear(23, 1))

    def first_loss(model: nn.Module, critic: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return loss_of(model, batch) - critic(model(batch).softmax(-1)).mean()

    def other_loss(model: nn.Module, critic: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        real = critic(nn.functional.one_hot(batch, VOCABULARY).float())
        with torch.no_grad():
            made = model(batch).softmax(-1)
        return critic(made).mean() - real.mean() + 0.1 * real.square().mean()

    class Both(WithoutDropout):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.critic: nn.Module | None = None
            self.given: list[torch.Tensor] = []

        def configure_model(self) -> None:
            if self.critic is None:
                super().configure_model()
                self.critic = fully_shard(critic(), mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: torch.Tensor, index: int) -> None:
            self.given.append(batch)
            for optimizer, loss_of_both in zip(self.optimizers(), (first_loss, other_loss), strict=True):
                self.toggle_optimizer(optimizer)
                loss = loss_of_both(self.model, self.critic, batch)
                self.manual_backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                self.untoggle_optimizer(optimizer)
                self.seen.append(loss.item())

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(each.parameters(), lr=0.1) for each in (self.model, self.critic)]

    made, module = trainer(max_steps=6, limit_val_batches=0), Both()
    made.fit(module, loader())
    module.model.reshard()  # the last forward, without backward, left it unsharded
    run.sharded(module)
    run.note("losses", module.seen)
    run.weights(module)
    given: list[Any] = [None] * run.world
    dist.all_gather_object(given, module.given)
    torch.manual_seed(0)
    alone = Transformer(dropout=0.0), critic()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in alone]
    for tokens in map(torch.cat, zip(*given, strict=True)):  # the batches of both ranks
        for optimizer, loss_of_both in zip(optimizers, (first_loss, other_loss), strict=True):
            for each in optimizers:
                each.zero_grad()
            loss_of_both(*alone, tokens).backward()
            optimizer.step()
    for name, one, unsharded in zip(("model", "critic"), (module.model, module.critic), alone, strict=True):
        run.agrees(name, dict(one.named_parameters()), dict(unsharded.named_parameters()))


@rows("Trainer: an average of the weights (WeightAveraging)")
def averages(run: Run) -> None:
    class Watched(Module):
        """A module that also computes the average itself."""

        def on_train_batch_end(self, *_: Any) -> None:
            now = {name: p.detach().full_tensor().clone() for name, p in self.model.named_parameters()}
            self.average = {name: getattr(self, "average", now)[name].lerp(each, 0.3) for name, each in now.items()}

    made = trainer(callbacks=[WeightAveraging(avg_fn=get_ema_avg_fn(0.7))], limit_val_batches=0)
    module = Watched()
    torch.manual_seed(run.rank)
    made.fit(module, loader())
    run.sharded(module)
    run.weights(module)
    run.agrees("weights", dict(module.model.named_parameters()), module.average)


@rows("Trainer: callbacks, a logger, early stopping")
def callbacks(run: Run) -> None:
    asked = [
        LearningRateMonitor("step"),
        EarlyStopping("validated", patience=1, min_delta=10.0),
        GradientAccumulationScheduler({0: 1, 1: 2}),
    ]
    made = trainer(callbacks=asked, logger=CSVLogger("logs"), max_steps=-1, max_epochs=4)
    module = Module()
    torch.manual_seed(run.rank)
    made.fit(module, loader(8), loader(6))
    module.model.reshard()  # the last validation left it unsharded
    run.sharded(module)
    run.note("losses", module.seen)
    run.note("stopped", made.global_step)
    run.weights(module)
    if run.rank == 0:
        run.note("logged", (Path(made.logger.log_dir) / "metrics.csv").read_text())


def resumes(run: Run, whole: bool, module: type[Module] = Module) -> None:
    """Train four steps, then repeat the last two from the checkpoint that was saved after step 2."""
    weights = []
    for path in (None, "saved/step=2.ckpt"):  # step 2 is the end of an epoch
        keeps = ModelCheckpoint("saved", "{step}", every_n_train_steps=2, save_top_k=-1)
        more = {"callbacks": [keeps], "enable_checkpointing": True} if path is None else {}
        made, fitted = trainer(whole=whole, max_steps=4, limit_val_batches=0, **more), module()
        torch.manual_seed(run.rank)
        made.fit(fitted, loader(8), ckpt_path=path)
        name = "resumed" if path else "trained"
        run.sharded(fitted, f"sharded, {name}")
        run.note(name, fitted.seen)
        run.weights(fitted, f"weights, {name}")
        weights.append(run.noted[f"weights, {name}"])
        if path is None and whole and run.rank == 0:  # other entries contain paths
            saved = torch.load("saved/step=2.ckpt")
            run.note(
                "saved", {name: saved[name] for name in ("state_dict", "optimizer_states", "lr_schedulers", "loops")}
            )
        elif path is None and not whole:
            run.files("saved")
    run.agrees("resumed weights", weights[1], weights[0], tolerance=0)


@rows("Trainer: sharded checkpoint, resumed")
def resumes_sharded(run: Run) -> None:
    resumes(run, False, WithoutDropout)


@rows("Trainer: full checkpoint, resumed")
def resumes_whole(run: Run) -> None:
    resumes(run, True, WithoutDropout)


@rows("Trainer: validates and predicts from a checkpoint, with another trainer")
def validates_checkpoint(run: Run) -> None:
    made, module = trainer(), Module()
    torch.manual_seed(run.rank)
    made.fit(module, loader())
    run.sharded(module)
    made.save_checkpoint("saved.ckpt")
    run.files("saved.ckpt")
    run.note("validated", made.validate(module, loader(6), verbose=False))
    other, again = trainer(), Module()
    run.note("validated again", other.validate(again, loader(6), ckpt_path="saved.ckpt", verbose=False))
    run.note("predicted again", other.predict(again, loader(6), ckpt_path="saved.ckpt"))
    run.agrees("validated again", run.noted["validated again"], run.noted["validated"], tolerance=0)


# ---------------------------------------------------------------------------------------------------------------------
# Fabric


def fabric(
    world: int = 2, tensor: int = 1, whole: bool = False, parallelize: Any = sharded, **settings: Any
) -> L.Fabric:
    strategy = FabricStrategy(
        parallelize,
        data_parallel_size=world // tensor,
        tensor_parallel_size=tensor,
        save_distributed_checkpoint=not whole,
    )
    made = L.Fabric(accelerator="cpu", devices=world, strategy=strategy, **settings)
    made.launch()
    return made


def seeded(**settings: Any) -> nn.Module:
    torch.manual_seed(0)
    return Transformer(**settings)


def set_up(made: L.Fabric, model: nn.Module, **settings: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Set up the module, then an optimizer for its sharded parameters, as the guide does."""
    model = made.setup_module(model, **settings)
    return model, made.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))


def batches(run: Run, steps: range) -> Iterator[torch.Tensor]:
    for step in steps:
        torch.manual_seed(100 * step + run.rank)
        yield torch.randint(0, VOCABULARY, (2, LENGTH))


def steps_of(run: Run, made: L.Fabric, model: nn.Module, optimizer: Any, steps: range, clip: float = 0) -> list[float]:
    model.train()
    losses = []
    for tokens in batches(run, steps):
        loss = loss_of(model, tokens)
        made.backward(loss)
        if clip:
            losses.append(made.clip_gradients(model, optimizer, max_norm=clip).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def evaluated(run: Run, model: nn.Module) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model(next(batches(run, range(99, 100))))


def trains(run: Run, made: L.Fabric, model: nn.Module, optimizer: Any, **settings: Any) -> None:
    """Train, evaluate, and continue training."""
    run.note("losses", steps_of(run, made, model, optimizer, range(3), **settings))
    run.sharded(model)
    run.note("evaluated", evaluated(run, model))
    run.note("losses after evaluation", steps_of(run, made, model, optimizer, range(3, 4), **settings))
    run.weights(model)


@rows("Fabric: setup, backward, clip_gradients")
def fabric_plain(run: Run) -> None:
    made = fabric()
    trains(run, made, *set_up(made, seeded()), clip=0.3)


@rows("Fabric: bf16-mixed")
def fabric_mixed(run: Run) -> None:
    made = fabric(precision="bf16-mixed")
    trains(run, made, *set_up(made, seeded()))


@rows("Fabric: bf16-true")
def fabric_true(run: Run) -> None:
    made = fabric(precision="bf16-true")
    trains(run, made, *set_up(made, seeded()))


@rows("Fabric: no_backward_sync while it accumulates")
def fabric_accumulates(run: Run) -> None:
    made = fabric()
    model, optimizer = set_up(made, seeded())
    losses = []
    for step, tokens in enumerate(batches(run, range(9))):
        with made.no_backward_sync(model, enabled=step % 3 != 2):
            loss = loss_of(model, tokens) / 3
            made.backward(loss)
        losses.append(loss.item())
        if step % 3 == 2:
            made.clip_gradients(model, optimizer, clip_val=0.01)
            optimizer.step()
            optimizer.zero_grad()
    run.sharded(model)
    run.note("losses", losses)
    run.weights(model)
    run.note("evaluated", evaluated(run, model))


@rows("Fabric: init_module(empty_init=True), materialized by setup")
def fabric_meta(run: Run) -> None:
    made = fabric()
    with made.init_module(empty_init=True):
        model = Transformer()
    torch.manual_seed(0)
    trains(run, made, *set_up(made, model))


@rows("Fabric: compiled before setup, compiled again by it")
def fabric_compiled(run: Run) -> None:
    made = fabric()
    trains(run, made, *set_up(made, torch.compile(seeded(dropout=0.0), backend="aot_eager")))


@rows("Fabric: compiled by parallelize_fn")
def fabric_compiles(run: Run) -> None:
    def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return torch.compile(sharded(model, mesh), backend="aot_eager")

    made = fabric(parallelize=parallelize)
    trains(run, made, *set_up(made, seeded(dropout=0.0)))


@rows("Fabric: tensor parallel and sharded", world=4)
def fabric_two_dimensions(run: Run) -> None:
    made = fabric(4, 2, parallelize=lambda model, mesh: sharded(tensor_parallel(model, mesh), mesh))
    trains(run, made, *set_up(made, seeded(inner=72)))


@rows("Fabric: another method than forward (mark_forward_method)")
def fabric_method(run: Run) -> None:
    made = fabric()
    model, optimizer = set_up(made, seeded())
    model.mark_forward_method("likeliest")
    trains(run, made, model, optimizer)
    model.eval()
    with torch.no_grad():
        run.note("likeliest", model.likeliest(next(batches(run, range(50, 51)))))


def saves(run: Run, whole: bool) -> None:
    made = fabric(whole=whole)
    model, optimizer = set_up(made, seeded())
    run.note("losses", steps_of(run, made, model, optimizer, range(2)))
    run.sharded(model)
    made.save("saved.ckpt", {"model": model, "optimizer": optimizer, "step": 2})
    made.barrier()
    run.files("." if whole else "saved.ckpt")
    again, its_optimizer = set_up(made, Transformer())
    state = {"model": again, "optimizer": its_optimizer, "step": 0}
    made.load("saved.ckpt", state)
    run.note("step", state["step"])
    run.note("evaluated", evaluated(run, again))
    run.agrees("evaluated", evaluated(run, again), evaluated(run, model), tolerance=0)
    run.note("losses after loading", steps_of(run, made, again, its_optimizer, range(2, 4)))
    steps_of(run, made, model, optimizer, range(2, 4))
    run.weights(again)
    run.agrees("weights", dict(again.named_parameters()), dict(model.named_parameters()), tolerance=0)


@rows("Fabric: save and load, sharded")
def fabric_saves(run: Run) -> None:
    saves(run, False)


@rows("Fabric: save and load, full")
def fabric_saves_whole(run: Run) -> None:
    saves(run, True)


@rows("Fabric: load_raw of a file of weights into a sharded model made on meta")
def fabric_raw(run: Run) -> None:
    made = fabric()
    if run.rank == 0:
        torch.save(seeded().state_dict(), "weights.pt")
    made.barrier()
    with made.init_module(empty_init=True):
        model = Transformer()
    model, optimizer = set_up(made, model)
    made.load_raw("weights.pt", model)
    run.note("loaded", evaluated(run, model))
    run.agrees("loaded", evaluated(run, model), evaluated(run, seeded()))
    trains(run, made, model, optimizer)


@rows("Fabric: a teacher that is only evaluated, a student that learns from it")
def fabric_teacher(run: Run) -> None:
    made = fabric()
    teacher = made.setup_module(seeded().requires_grad_(False).eval())
    student, optimizer = set_up(made, seeded(dim=20, inner=33))
    run.sharded(teacher, "sharded teacher")
    losses = []
    for tokens in batches(run, range(3)):
        with torch.no_grad():
            expected = teacher(tokens).log_softmax(-1)
        loss = nn.functional.kl_div(student(tokens).log_softmax(-1), expected, log_target=True)
        made.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(made.all_reduce(loss.detach()).item())
    run.sharded(student)
    run.note("losses", losses)
    run.weights(student)
