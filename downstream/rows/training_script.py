"""Rows for tutorials/train.py with models of Transformers and adapters of PEFT, compared with a `fully_shard` loop."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, ViTConfig

from _rows import Rows, Run

sys.path.append(str(Path(__file__).resolve().parents[2] / "tutorials"))

import train as script
from _blueprints import logits_of, next_token_loss
from _checks import check
from _console import Interrupt
from _course import adamw, learning_rate
from _gpt import random_windows
from _text import read_text, texts_of, tokenizer_in

rows = Rows(
    "tutorials/train.py with models of Transformers",
    environment="transformers5",
    versions=("transformers", "peft", "safetensors"),
)

STEPS, SEQUENCE = 6, 24
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom.\n"


class NoInterrupt(Interrupt):
    """An `Interrupt` without signal handlers, because the launcher handles signals."""

    def __init__(self) -> None:
        self.asked = self._wait = False


def folder(run: Run, *, weights: bool = False, tokenizer: bool = False, vocabulary: int = 300, **changes: Any) -> Path:
    """Write a Hugging Face folder with a small Llama configuration on rank 0, and a text; return the folder."""
    where = Path("llama")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    sizes = {"hidden_size": 48, "intermediate_size": 75, "num_hidden_layers": 2, "vocab_size": vocabulary}
    if run.rank == 0:
        config = LlamaConfig(**heads, **sizes, **changes)
        if weights:
            torch.manual_seed(3)
            LlamaForCausalLM(config).save_pretrained(where)
        config.save_pretrained(where)
        if tokenizer:
            write_tokenizer(where)
        Path("text").mkdir()
        Path("text/some.txt").write_text(TEXT * 60)
    dist.barrier()
    return where


def write_tokenizer(where: Path) -> None:
    """Train a tokenizer with 280 tokens on the text, and save it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, special_tokens=["<end>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(where)


def asked(run: Run, model: Path, *more: str) -> tuple[Any, Any]:
    """Parse and check options of the script; return them and the blueprint of the model."""
    settings = ["--model", str(model), "--data", "text", "--sequence", str(SEQUENCE), "--steps", str(STEPS)]
    settings += ["--batch", "2", "--evaluation", "16", "--sample", "5", "--learning-rate", "0.01"]
    return check(script.parse([*settings, *more]), run.world)


def by_script(run: Run, out: str, model: Path, *more: str) -> list[float]:
    """Run the script in this process and return its losses."""
    options, plan = asked(run, model, "--out", out, *more)
    if script.run(options, plan, torch.device("cpu"), NoInterrupt()):
        raise AssertionError("the script was interrupted")
    dist.barrier()
    lines = map(json.loads, Path(out, "metrics.jsonl").read_text().splitlines())
    return [line["train/loss"] for line in lines if "train/loss" in line]


def by_loop(run: Run, model: Path, *more: str) -> tuple[nn.Module, list[float]]:
    """Run the same training as a typical loop with `fully_shard`; return the trained model and the losses."""
    options, plan = asked(run, model, *more)
    options.strategy = "none"  # the script loads the weights but does not shard
    trained = script.prepare(options, plan, torch.device("cpu")).model
    for module in list(trained.modules()):
        if type(module).__name__ == "LlamaDecoderLayer":
            fully_shard(module)
    fully_shard(trained)
    run.sharded(trained)
    optimizer, data = adamw(trained), torch.Generator().manual_seed(0)
    text = read_text(texts_of(options.data, options.suffixes), tokenizer_in(plan.folder)).train
    losses = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step / STEPS, options.learning_rate)
        windows = random_windows(text, 2 * run.world, SEQUENCE + 1, data)[run.rank :: run.world]
        loss = next_token_loss(trained, windows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        losses.append(mean.item() / run.world)
    return trained.eval(), losses


def check_losses(run: Run, script_losses: list[float], loop_losses: list[float]) -> None:
    run.note("losses of the loop", loop_losses)
    run.agrees("losses of the script", script_losses, loop_losses, tolerance=1e-6)
    if loop_losses[-1] > loop_losses[0] - 0.3:
        raise AssertionError(f"the losses do not decrease: {loop_losses}")


def some_tokens() -> torch.Tensor:
    return torch.arange(2 * 11).view(2, 11)


@rows("a configuration alone, bytes; tied weights")
def from_configuration(run: Run) -> None:
    dist.init_process_group("gloo")
    where = folder(run, tie_word_embeddings=True)
    _, losses = by_loop(run, where)
    check_losses(run, by_script(run, "run", where), losses)


@rows("weights and a tokenizer from a folder; the export loads with from_pretrained")
def from_folder(run: Run) -> None:
    dist.init_process_group("gloo")
    where = folder(run, weights=True, tokenizer=True)
    model, losses = by_loop(run, where)
    check_losses(run, by_script(run, "run", where, "--export", "exported"), losses)
    loaded = AutoModelForCausalLM.from_pretrained("exported").eval()
    with torch.no_grad():
        run.agrees("logits", logits_of(loaded, some_tokens()), logits_of(model, some_tokens()), tolerance=1e-5)
    run.note("files", sorted(path.name for path in Path("exported").iterdir()))


@rows("checkpoints of activations, mixed precision, accumulation, compiled (fullgraph)", timeout=400.0)
def all_settings(run: Run) -> None:
    dist.init_process_group("gloo")
    where = folder(run, weights=True)
    _, losses = by_loop(run, where)
    settings = ["--checkpointing", "full", "--batch", "1", "--accumulate", "2", "--compile"]
    run.agrees("losses, compiled", by_script(run, "compiled", where, *settings), losses, tolerance=1e-5)
    mixed = by_script(run, "mixed", where, "--precision", "bfloat16-mixed", "--strategy", "zero2")
    run.agrees("losses in bfloat16", mixed, losses, tolerance=2e-2)


@rows("LoRA by PEFT: adapters alone train, are saved, resumed, and loaded by PeftModel.from_pretrained")
def adapters(run: Run) -> None:
    dist.init_process_group("gloo")
    where = folder(run, weights=True)
    given = ["--lora", "3", "--learning-rate", "0.1"]
    model, losses = by_loop(run, where, *given)
    check_losses(run, by_script(run, "run", where, *given, "--export", "exported", "--save-every", "3"), losses)
    base = AutoModelForCausalLM.from_pretrained(where)
    loaded = PeftModel.from_pretrained(base, "exported").eval()
    with torch.no_grad():
        run.agrees("logits", logits_of(loaded, some_tokens()), logits_of(model, some_tokens()), tolerance=1e-5)
    manifest = json.loads(Path("run/checkpoints/step-00000003/manifest.json").read_text())["manifest"]
    saved = [key for key in manifest["tensors"] if key.startswith("model.")]
    run.note("saved", saved)
    if not all("lora_" in key for key in saved):
        raise AssertionError(f"tensors other than adapters were saved: {saved}")
    dist.barrier()  # all ranks have read the manifest before it is moved
    if run.rank == 0:
        Path("cut/checkpoints").mkdir(parents=True)
        Path("run/checkpoints/step-00000003").rename("cut/checkpoints/step-00000003")
    dist.barrier()
    goes_on = by_script(run, "cut", where, *given)
    run.agrees("losses after resuming", goes_on, losses[3:], tolerance=1e-6)


@rows(
    "mistakes are one line: an unknown kind, one that predicts no next token, a vocabulary that is too small",
    sharded=False,
)
def mistakes(run: Run) -> None:
    dist.init_process_group("gloo")
    where = folder(run, vocabulary=200)
    said = [refusal(run, where)]
    for number, text in enumerate((ViTConfig().to_json_string(), '{"model_type": "no_such_kind"}')):
        other = Path(f"{number}-{run.rank}.json")
        other.write_text(text)
        said.append(refusal(run, other))
    run.note("errors", said)
    expected = [
        "--model llama: a vocabulary of 200 is too small for text of 256 different bytes",
        "--model 0-0.json: model_type 'vit' is not a causal language model",
        "--model 1-0.json: this version of Transformers does not support 'no_such_kind' models",
    ]
    if run.rank == 0 and [line.partition(": ")[2] for line in said] != expected:
        raise AssertionError(f"unexpected error messages: {said}")


def refusal(run: Run, model: Path) -> str:
    try:
        asked(run, model)
    except SystemExit as problem:
        return str(problem)
    raise AssertionError(f"the script accepted the invalid model {model}")
