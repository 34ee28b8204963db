"""Rows for Transformers' Trainer with FSDP2, and for `generate` of sharded models."""

from __future__ import annotations

import os
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
import torch.distributed as dist
import transformers
from _accelerate_on_cpu import fsdp2_on_cpu
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    GPT2Config,
    LlamaConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from _rows import Rows, Run

VOCABULARY = 97
FOUR = transformers.__version__.startswith("4.")


def llama(**changes: Any) -> nn.Module:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 36, "intermediate_size": 71, "head_dim": 10}
    settings |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    settings |= {"max_position_embeddings": 64, "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_config(LlamaConfig(**settings | changes))


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    settings = {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 36, "n_layer": 2, "n_head": 4}
    return AutoModelForCausalLM.from_config(GPT2Config(**settings, bos_token_id=1, eos_token_id=2, pad_token_id=0))


def t5() -> nn.Module:
    torch.manual_seed(0)
    settings = {"vocab_size": VOCABULARY, "d_model": 36, "d_kv": 9, "d_ff": 71, "num_layers": 2, "num_heads": 4}
    return AutoModelForSeq2SeqLM.from_config(T5Config(**settings, decoder_start_token_id=0, eos_token_id=1))


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens, the same on all ranks. The sampler distributes them."""

    def __init__(self, count: int, length: int = 12, labels: int | None = None) -> None:
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(3, VOCABULARY, (count, length), generator=generator)
        self.labels = self.ids if labels is None else self.ids[:, :labels]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


def arguments(config: dict[str, Any] | None = None, kind: Any = TrainingArguments, **changes: Any) -> Any:
    """Return training arguments with FSDP2 and one parameter group per block."""
    fsdp2_on_cpu()
    # `accelerate launch --fsdp_version 2` sets this variable. Transformers 4 has no other setting.
    os.environ["FSDP_VERSION"] = "2"
    os.environ["FSDP_RESHARD_AFTER_FORWARD"] = "true"
    settings: dict[str, Any] = {
        "output_dir": "out",
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "max_steps": 4,
        "learning_rate": 0.01,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "seed": 3,
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "fsdp": "full_shard auto_wrap" if FOUR else True,
        "fsdp_config": {"version": 2} | (config or {}),
    }
    return kind(**settings | changes)


def curve(trainer: Trainer) -> list[dict[str, float]]:
    """Return the log of the trainer without times."""
    names = ("loss", "grad_norm", "learning_rate", "epoch", "step", "eval_loss")
    return [{name: float(entry[name]) for name in names if name in entry} for entry in trainer.state.log_history]


def trains(run: Run, model: nn.Module, args: Any, kind: Any = Trainer, samples: int = 24, **more: Any) -> Trainer:
    """Train, evaluate and predict; return the trainer."""
    data, test = more.pop("data", Samples(samples)), more.pop("test", Samples(5))
    trainer = kind(model=model, args=args, train_dataset=data, eval_dataset=test, **more)
    trainer.train()
    reshard(trainer.model)
    run.sharded(trainer.model)
    run.note("training", curve(trainer))
    run.weights(trainer.model)
    run.note("evaluated", trainer.evaluate()["eval_loss"])
    run.note("predicted", torch.from_numpy(trainer.predict(test).predictions))
    return trainer


def reshard(model: nn.Module) -> None:
    """Reshard all groups. After an evaluation FSDP2 keeps the last groups unsharded; composable_shard keeps none."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def plain(run: Run) -> None:
    trains(run, llama(), arguments())


def twice(run: Run, between: bool) -> None:
    """Train twice. If `between`, check that an evaluation between the two does not change the weights."""
    trainer = Trainer(model=llama(), args=arguments(), train_dataset=Samples(24), eval_dataset=Samples(5))
    trainer.train()
    trainer.train()
    run.sharded(trainer.model)
    if between:
        other = Trainer(model=llama(), args=arguments(), train_dataset=Samples(24), eval_dataset=Samples(5))
        other.train()
        run.note("evaluated", other.evaluate()["eval_loss"])
        other.train()
        run.agrees("weights", dict(other.model.named_parameters()), dict(trainer.model.named_parameters()), 0.0)
    run.note("training", curve(trainer))
    run.weights(trainer.model)


def tied(run: Run) -> None:
    trains(run, gpt2(), arguments(label_smoothing_factor=0.1))


def keeps(run: Run) -> None:
    os.environ["FSDP_RESHARD_AFTER_FORWARD"] = "false"
    args = arguments({"reshard_after_forward": False})
    os.environ["FSDP_RESHARD_AFTER_FORWARD"] = "false"
    trains(run, llama(), args)


def accumulates(run: Run) -> None:
    trains(run, gpt2(), arguments(gradient_accumulation_steps=3, max_steps=3), samples=36)


def bf16(run: Run) -> None:
    trains(run, llama(), arguments(bf16=True))


def checkpoints(run: Run, make: Any, reentrant: bool) -> None:
    args = arguments(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    trains(run, make(), args)


def plugin_checkpoints(run: Run) -> None:
    trains(run, llama(use_cache=False), arguments({"activation_checkpointing": True}))


def efficient(run: Run) -> None:
    args = arguments({"cpu_ram_efficient_loading": True})
    if run.rank == 0:
        gpt2().save_pretrained("pretrained")
    dist.barrier()
    trains(run, AutoModelForCausalLM.from_pretrained("pretrained"), args)


def compiled(run: Run, backend: str) -> None:
    torch._inductor.config.compile_threads = 1  # a process pool does not work in forked ranks
    args = arguments(torch_compile=True, torch_compile_backend=backend, max_steps=2)
    trains(run, llama(), args)


def resumes(run: Run, kind: str, make: Any) -> None:
    """Train six steps, then repeat the last three from the checkpoint that was saved after step 3."""
    os.environ["FSDP_STATE_DICT_TYPE"] = kind
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 2}
    args = arguments({"state_dict_type": kind}, **settings)
    trainer = Trainer(model=make(), args=args, train_dataset=Samples(24), eval_dataset=Samples(5))
    trainer.train()
    run.sharded(trainer.model)
    whole = curve(trainer)
    run.note("training", whole)
    run.weights(trainer.model)
    run.files("out/checkpoint-3", ignore=("training_args.bin", ".pth", "trainer_state.json"))
    weights = {name: each.full_tensor().clone() for name, each in trainer.model.named_parameters()}
    again = Trainer(model=make(), args=deepcopy(args), train_dataset=Samples(24), eval_dataset=Samples(5))
    again.train(resume_from_checkpoint="out/checkpoint-3")
    run.note("resumed", curve(again))
    run.weights(again.model, "resumed weights")
    for name, each in again.model.named_parameters():
        assert torch.equal(each.full_tensor(), weights[name]), name


def saves(run: Run) -> None:
    os.environ["FSDP_STATE_DICT_TYPE"] = "FULL_STATE_DICT"
    trainer = trains(run, gpt2(), arguments({"state_dict_type": "FULL_STATE_DICT"}, max_steps=2))
    trainer.save_model("saved")
    run.files("saved", ignore=(".bin",))
    if run.rank == 0:
        run.note("loaded", AutoModelForCausalLM.from_pretrained("saved").state_dict())


class Halves(TrainerCallback):
    """Stop the training after the second step, as a user's callback may do."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == 2
        control.should_evaluate = True


def callbacks(run: Run) -> None:
    trains(run, gpt2(), arguments(), callbacks=[Halves()], compute_metrics=lambda p: {"mean": p.predictions.mean()})


def lora(run: Run, late: bool) -> None:
    """Train LoRA adapters, added with `add_adapter` of Transformers if `late`, else with `get_peft_model` of PEFT."""
    model = llama()
    config = LoraConfig(r=3, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
    if late:
        model.add_adapter(config)
    else:
        model = get_peft_model(model, config)
    trainer = trains(run, model, arguments())
    trained = [name for name, each in trainer.model.named_parameters() if each.requires_grad]
    assert len(trained) == 8, trained


def shard(model: nn.Module, *blocks: str) -> nn.Module:
    for module in model.modules():
        if type(module).__name__ in blocks:
            fully_shard(module)
    return fully_shard(model)


def late_lora(run: Run) -> None:
    """Shard and train a model, then add adapters to it, shard them, and train them."""
    dist.init_process_group("gloo")
    model = shard(llama(), "LlamaDecoderLayer")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(number: int) -> float:
        set_seed(10 * number + run.rank)
        ids = torch.randint(3, VOCABULARY, (2, 12))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    losses = [step(0)]
    set_seed(7)
    model.add_adapter(LoraConfig(r=3, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian"))
    for name, module in list(model.named_modules()):
        if name.endswith(("lora_A.default", "lora_B.default")):
            fully_shard(module)
    run.sharded(model)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01)
    losses += [step(1), step(2)]
    model.eval()
    set_seed(1)
    with torch.no_grad():
        run.note("logits", model(input_ids=torch.randint(3, VOCABULARY, (2, 12))).logits)
    model.train()
    losses += [step(3)]
    run.note("losses", losses)
    run.weights(model)


def bert_to_bert() -> nn.Module:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 36, "intermediate_size": 71}
    settings |= {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
    last = BertConfig(**settings, is_decoder=True, add_cross_attention=True, tie_word_embeddings=False)
    config = EncoderDecoderConfig.from_encoder_decoder_configs(BertConfig(**settings), last)
    config.tie_word_embeddings = False
    model = EncoderDecoderModel(config)
    for name, each in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(each, std=0.1)  # gradients of key biases are only rounding errors
    for each in (model.config, model.generation_config):
        each.decoder_start_token_id, each.eos_token_id, each.pad_token_id, each.bos_token_id = 1, 2, 0, 1
    return model


def predicts_with_generate(run: Run, make: Any, block: str) -> None:
    settings: dict[str, Any] = {"predict_with_generate": True, "generation_max_length": 7, "optim": "sgd"}
    settings |= {"eval_strategy": "steps", "eval_steps": 2, "learning_rate": 0.1}
    args = arguments({"transformer_layer_cls_to_wrap": [block]}, Seq2SeqTrainingArguments, **settings)
    # `generate` calls the encoder directly. The encoder's parameters in the root group are only gathered if `generate`
    # is registered as a forward method of the model. Transformers 5 registers it; with Transformers 4 the user must.
    trains(
        run, make(), args, Generating if FOUR else Seq2SeqTrainer, data=Samples(24, labels=8), test=Samples(5, labels=8)
    )


class Generating(Seq2SeqTrainer):
    """Register `generate` as a forward method of the sharded model before the first evaluation."""

    def evaluation_loop(self, *args: Any, **settings: Any) -> Any:
        if not hasattr(self.model, "registered"):
            register_fsdp_forward_method(self.model, "generate")
            self.model.registered = True
        return super().evaluation_loop(*args, **settings)


def generates(run: Run, make: Any, blocks: tuple[str, ...], register: bool, **settings: Any) -> None:
    """Generate from prompts of different lengths, so that ranks finish at different times; then train one step."""
    dist.init_process_group("gloo")
    whole = make().eval()
    model = shard(make(), *blocks)
    if register:
        register_fsdp_forward_method(model, "generate")
    run.sharded(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.eval()
    torch.manual_seed(run.rank)
    prompt = torch.randint(3, VOCABULARY, (2, 4 + run.rank))
    settings |= {"synced_gpus": True, "max_new_tokens": 5 + 3 * run.rank, "pad_token_id": 0, "eos_token_id": None}
    set_seed(11)
    made = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
    run.note("made", made)
    set_seed(11)
    alone = settings | {"synced_gpus": False}
    run.agrees("tokens", made, whole.generate(prompt, attention_mask=torch.ones_like(prompt), **alone))
    reshard(model)
    model.train()
    ids = torch.randint(3, VOCABULARY, (2, 8))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    run.note("loss", float(loss))
    run.weights(model)
    model.eval()
    run.note("made after training", model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings))


def add(rows: Rows) -> None:
    """Add the rows that Transformers 4 and 5 share."""
    slow = {"timeout": 400.0}
    rows.add("Trainer: train, evaluate, predict", plain)
    rows.add("Trainer: train twice", partial(twice, between=False))
    rows.add("Trainer: train, evaluate, train", partial(twice, between=True))
    rows.add("Trainer: a tied head, label smoothing, dropout", tied)
    rows.add("Trainer: reshard_after_forward=False", keeps)
    rows.add("Trainer: gradient accumulation", accumulates)
    rows.add("Trainer: bf16", bf16)
    for make in (llama, gpt2):
        for reentrant in (False, True):
            kind = "reentrant" if reentrant else "not reentrant"
            title = f"Trainer: gradient checkpoints, {kind}, {make.__name__}"
            rows.add(title, partial(checkpoints, make=make, reentrant=reentrant))
    rows.add("Trainer: activation_checkpointing of the plugin", plugin_checkpoints)
    rows.add("Trainer: cpu_ram_efficient_loading with from_pretrained", efficient)
    for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
        rows.add(f"Trainer: checkpoint and resume, {kind}", partial(resumes, kind=kind, make=llama))
    rows.add("Trainer: checkpoint and resume with a tied head and dropout", partial(resumes, kind=kind, make=gpt2))
    rows.add("Trainer: save_model, and from_pretrained of it", saves)
    rows.add("Trainer: callbacks that stop, metrics", callbacks)
    rows.add("Trainer: torch_compile, aot_eager", partial(compiled, backend="aot_eager"), **slow)
    rows.add("Trainer: LoRA by get_peft_model after from_config", partial(lora, late=False))
    rows.add("Trainer: LoRA by add_adapter after from_config", partial(lora, late=True))
    rows.add("LoRA added to a model that is sharded and trained already", late_lora)
    sums = (
        "FSDP2 sums the gradients of an input shared by blocks within each block first; "
        "ours is bitwise identical to the unsharded model"
    )
    # In each version, one of the two models has tied weights that Accelerate assigns to several groups. Use the other.
    make, block = (t5, "T5Block") if FOUR else (bert_to_bert, "BertLayer")
    how = partial(predicts_with_generate, make=make, block=block)
    rows.add(f"Seq2SeqTrainer: predict_with_generate, {make.__name__}", how, tolerance=1e-4, why=sums)
    for title, more in (
        ("greedy", {"do_sample": False}),
        ("samples", {"do_sample": True}),
        ("beams", {"num_beams": 3}),
    ):
        how = partial(generates, make=llama, blocks=("LlamaDecoderLayer",), register=False, **more)
        rows.add(f"generate with synced_gpus=True, {title}, Llama", how)
    how = partial(generates, make=llama, blocks=("LlamaDecoderLayer",), register=True, do_sample=False)
    rows.add("generate as a registered forward method, Llama", how)
    how = partial(generates, make=t5, blocks=("T5Block",), register=True, do_sample=False)
    rows.add("generate as a registered forward method, T5", how, tolerance=1e-4, why=sums)


def pretrained_folder(make: Any) -> Path:
    """Save a model on rank 0 in several files, and return the folder."""
    folder = Path("pretrained")
    if dist.get_rank() == 0:
        make().save_pretrained(folder, max_shard_size="20KB")
    dist.barrier()
    return folder
