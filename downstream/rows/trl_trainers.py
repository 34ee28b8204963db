"""Rows for TRL: its trainers with FSDP2, on full models and with adapters."""

import os
import random
from typing import Any

import torch
import torch.distributed as dist
from _accelerate_on_cpu import fsdp2_on_cpu
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from _rows import Rows, Run

rows = Rows("TRL", environment="adapters", versions=("trl", "transformers", "accelerate", "peft"))

SPECIAL = ["<pad>", "<unk>", "<s>", "</s>", "user", "assistant", "\n"]
WORDS = [*SPECIAL, *(f"w{i}" for i in range(90))]
TEMPLATE = """\
{% for message in messages %}<s> {{ message['role'] }} {{ message['content'] }} </s> {% endfor %}\
{% if add_generation_prompt %}<s> assistant {% endif %}"""


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per word."""
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=TEMPLATE, **special)


def config(**settings: Any) -> LlamaConfig:
    sizes = {"hidden_size": 36, "intermediate_size": 71, "num_hidden_layers": 2, "vocab_size": len(WORDS)}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 128}
    special = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    return LlamaConfig(**(sizes | heads | special | settings))


def llama(seed: int = 0, **settings: Any) -> nn.Module:
    torch.manual_seed(seed)
    return LlamaForCausalLM(config(**settings))


def moe() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 36, "intermediate_size": 71, "moe_intermediate_size": 23, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10, "vocab_size": len(WORDS)}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **experts, pad_token_id=0, eos_token_id=3))


def lora(**settings: Any) -> LoraConfig:
    return LoraConfig(
        **({"r": 3, "lora_alpha": 6, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | settings)
    )


def words(source: random.Random, least: int, most: int) -> str:
    return " ".join(source.choice(WORDS[len(SPECIAL) :]) for _ in range(source.randint(least, most)))


def texts(count: int = 24) -> Dataset:
    source = random.Random(0)
    return Dataset.from_list([{"text": words(source, 5, 14)} for _ in range(count)])


def completions(count: int = 24) -> Dataset:
    source = random.Random(1)
    made = [{"prompt": words(source, 3, 5), "completion": " " + words(source, 2, 7)} for _ in range(count)]
    return Dataset.from_list(made)


def conversations(count: int = 24) -> Dataset:
    source = random.Random(2)

    def one() -> dict[str, Any]:
        said = [("user", words(source, 2, 5)), ("assistant", words(source, 2, 5))] * source.randint(1, 2)
        return {"messages": [{"role": role, "content": content} for role, content in said]}

    return Dataset.from_list([one() for _ in range(count)])


def preferences(count: int = 24) -> Dataset:
    source = random.Random(3)
    pairs = ({"chosen": " " + words(source, 2, 6), "rejected": " " + words(source, 2, 6)} for _ in range(count))
    return Dataset.from_list([{"prompt": words(source, 3, 5)} | pair for pair in pairs])


def judged(count: int = 24) -> Dataset:
    source = random.Random(4)
    answers = [{"prompt": words(source, 3, 5), "completion": " " + words(source, 2, 6)} for _ in range(count)]
    return Dataset.from_list([answer | {"label": i % 3 != 0} for i, answer in enumerate(answers)])


def prompts(count: int = 24) -> Dataset:
    source = random.Random(5)
    return Dataset.from_list([{"prompt": words(source, 3, 5)} for _ in range(count)])


def arguments(kind: Any, plugin: dict[str, Any] | None = None, **changes: Any) -> Any:
    """Return training arguments with FSDP2 and one parameter group per block."""
    fsdp2_on_cpu()
    os.environ["FSDP_VERSION"] = "2"  # `accelerate launch --fsdp_version 2` sets this variable
    os.environ["FSDP_RESHARD_AFTER_FORWARD"] = "true"
    settings: dict[str, Any] = {
        "output_dir": "out",
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "max_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "learning_rate": 0.01,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "seed": 3,
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {"version": 2} | (plugin or {}),
    }
    return kind(**settings | changes)


def curve(trainer: Any) -> list[dict[str, Any]]:
    """Return the log of the trainer without times."""
    timed = ("runtime", "per_second", "time", "total_flos", "num_tokens", "profiling")
    return [{k: v for k, v in entry.items() if not any(w in k for w in timed)} for entry in trainer.state.log_history]


def trains(run: Run, trainer: Any) -> Any:
    """Train and record the results. Most arguments include an evaluation before the last step."""
    trainer.train()
    run.sharded(trainer.model)
    run.note("training", curve(trainer))
    run.weights(trainer.model)
    return trainer


def finetunes(run: Run, args: Any, model: nn.Module | None = None, data: Dataset | None = None, **more: Any) -> Any:
    data = texts() if data is None else data
    model = llama() if model is None else model
    made = SFTTrainer(
        model, args, train_dataset=data, eval_dataset=data.select(range(5)), processing_class=tokenizer(), **more
    )
    return trains(run, made)


@rows("SFT")
def sft(run: Run) -> None:
    finetunes(run, arguments(SFTConfig, max_grad_norm=0.5))


@rows("SFT evaluates and is called to train on")
def sft_on(run: Run) -> None:
    """Train twice, with and without an evaluation in between, and check that the weights are equal.

    The second `train` call creates an optimizer for a model that was just evaluated.
    """
    args = arguments(SFTConfig, max_steps=2)
    weights = []
    for evaluates in (True, False):
        data = texts()
        model, test = llama(), data.select(range(5))
        trainer = SFTTrainer(model, args, train_dataset=data, eval_dataset=test, processing_class=tokenizer())
        trainer.train()
        if evaluates:
            run.sharded(trainer.model)
            trainer.evaluate()
        trainer.train()
        run.weights(trainer.model, f"weights {evaluates}")
        weights.append(run.noted[f"weights {evaluates}"])
    assert all(torch.equal(each, weights[1][name]) for name, each in weights[0].items())


@rows("SFT of prompts and completions, accumulation")
def sft_completions(run: Run) -> None:
    finetunes(run, arguments(SFTConfig, gradient_accumulation_steps=2), data=completions(40))


@rows("SFT of conversations, tied embeddings")
def sft_conversations(run: Run) -> None:
    finetunes(run, arguments(SFTConfig), llama(tie_word_embeddings=True), conversations())


@rows("SFT, packed")
def sft_packed(run: Run) -> None:
    args = arguments(SFTConfig, packing=True, packing_strategy="wrapped", max_length=20)
    finetunes(run, args, data=texts(60))


@rows("SFT, packed without padding (bfd)")
def sft_bfd(run: Run) -> None:
    args = arguments(SFTConfig, packing=True, packing_strategy="bfd", max_length=20)
    finetunes(run, args, data=texts(60))


@rows("SFT, gradient checkpointing, bf16")
def sft_bf16(run: Run) -> None:
    args = arguments(SFTConfig, gradient_checkpointing=True, bf16=True)
    finetunes(run, args)


@rows("SFT with the head and the loss in chunks (chunked_nll)")
def sft_chunked(run: Run) -> None:
    finetunes(run, arguments(SFTConfig, loss_type="chunked_nll"))


@rows("SFT of a mixture of experts, with its router's loss")
def sft_moe(run: Run) -> None:
    finetunes(run, arguments(SFTConfig), moe())


@rows("SFT with LoRA")
def sft_lora(run: Run) -> None:
    finetunes(run, arguments(SFTConfig), peft_config=lora(lora_dropout=0.1))


@rows("SFT with DoRA, gradient checkpointing, head trained in full")
def sft_dora(run: Run) -> None:
    args = arguments(SFTConfig, gradient_checkpointing=True)
    finetunes(run, args, peft_config=lora(use_dora=True, modules_to_save=["lm_head"], target_modules=["q_proj"]))


@rows("SFT with LoRA, packed, bf16")
def sft_lora_packed(run: Run) -> None:
    args = arguments(SFTConfig, packing=True, max_length=20, bf16=True)
    finetunes(run, args, data=texts(60), peft_config=lora())


@rows("SFT saves and resumes from a sharded checkpoint")
def sft_resumes(run: Run) -> None:
    resumes(run, "SHARDED_STATE_DICT")


@rows("SFT with LoRA saves and resumes from a sharded checkpoint")
def sft_lora_resumes(run: Run) -> None:
    resumes(run, "SHARDED_STATE_DICT", peft_config=lora())


@rows("SFT saves the full model")
def sft_saves(run: Run) -> None:
    saves(run)


@rows("SFT with LoRA saves the adapter")
def sft_lora_saves(run: Run) -> None:
    saves(run, peft_config=lora())


def resumes(run: Run, kind: str, **more: Any) -> None:
    os.environ["FSDP_STATE_DICT_TYPE"] = kind
    args = arguments(SFTConfig, {"state_dict_type": kind}, eval_strategy="no", save_strategy="steps", save_steps=2)
    weights = []
    for checkpoint in (None, "out/checkpoint-2"):
        trainer = SFTTrainer(llama(), args, train_dataset=texts(), processing_class=tokenizer(), **more)
        trainer.train(resume_from_checkpoint=checkpoint)
        name = "resumed" if checkpoint else "trained"
        run.sharded(trainer.model, f"sharded, {name}")
        run.note(name, curve(trainer))
        run.weights(trainer.model, f"weights, {name}")
        weights.append(run.noted[f"weights, {name}"])
    run.agrees("resumed weights", weights[1], weights[0], tolerance=0)


def saves(run: Run, **more: Any) -> None:
    os.environ["FSDP_STATE_DICT_TYPE"] = "FULL_STATE_DICT"
    args = arguments(SFTConfig, {"state_dict_type": "FULL_STATE_DICT"}, eval_strategy="no")
    trainer = SFTTrainer(llama(), args, train_dataset=texts(), processing_class=tokenizer(), **more)
    trainer.train()
    run.sharded(trainer.model)
    trainer.save_model("saved")
    run.files("saved", ignore=("training_args.bin",))
    run.note("training", curve(trainer))


# ---------------------------------------------------------------------------------------------------------------------
# Preferences


def prefers(run: Run, kind: Any, args: Any, data: Dataset | None = None, **more: Any) -> Any:
    data = preferences() if data is None else data
    model = more.pop("model", None) or llama()
    made = kind(
        model, args=args, train_dataset=data, eval_dataset=data.select(range(6)), processing_class=tokenizer(), **more
    )
    return trains(run, made)


@rows("DPO with a reference model")
def dpo(run: Run) -> None:
    trainer = prefers(run, DPOTrainer, arguments(DPOConfig), ref_model=llama())
    run.sharded(trainer.ref_model, "sharded reference")
    run.weights(trainer.ref_model, "reference")


@rows("DPO with another reference model, gradient checkpointing, bf16")
def dpo_other(run: Run) -> None:
    args = arguments(DPOConfig, gradient_checkpointing=True, bf16=True)
    prefers(run, DPOTrainer, args, ref_model=llama(1))


@rows("DPO, reference computed beforehand")
def dpo_precomputed(run: Run) -> None:
    args = arguments(DPOConfig, precompute_ref_log_probs=True)
    if run.rank == 0:
        preferences().save_to_disk("preferences")  # stored next to it: the computed log probabilities, for all ranks
    dist.barrier()
    prefers(run, DPOTrainer, args, Dataset.load_from_disk("preferences"), ref_model=llama())


@rows("DPO, the reference follows (sync_ref_model)")
def dpo_synced(run: Run) -> None:
    args = arguments(DPOConfig, sync_ref_model=True, ref_model_sync_steps=1)
    trainer = prefers(run, DPOTrainer, args, ref_model=llama())
    run.weights(trainer.ref_model, "reference")


@rows("DPO with LoRA, without a reference model")
def dpo_lora(run: Run) -> None:
    prefers(run, DPOTrainer, arguments(DPOConfig), peft_config=lora())


@rows("DPO with LoRA, gradient checkpointing, two losses")
def dpo_losses(run: Run) -> None:
    args = arguments(DPOConfig, gradient_checkpointing=True, loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.3])
    prefers(run, DPOTrainer, args, peft_config=lora(lora_dropout=0.1))


@rows("KTO with a reference model")
def kto(run: Run) -> None:
    prefers(run, KTOTrainer, arguments(KTOConfig), judged(), ref_model=llama())


@rows("KTO with LoRA")
def kto_lora(run: Run) -> None:
    prefers(run, KTOTrainer, arguments(KTOConfig), judged(), peft_config=lora())


@rows("ORPO")
def orpo(run: Run) -> None:
    prefers(run, ORPOTrainer, arguments(ORPOConfig, max_length=20))


@rows("CPO with LoRA")
def cpo(run: Run) -> None:
    prefers(run, CPOTrainer, arguments(CPOConfig, max_length=20), peft_config=lora())


@rows("a reward model")
def reward(run: Run) -> None:
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(config(num_labels=1))
    prefers(run, RewardTrainer, arguments(RewardConfig), model=model)


@rows("a reward model with LoRA")
def reward_lora(run: Run) -> None:
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(config(num_labels=1))
    adapter = lora(task_type="SEQ_CLS", target_modules=["q_proj", "v_proj"], modules_to_save=["score"])
    prefers(run, RewardTrainer, arguments(RewardConfig), model=model, peft_config=adapter)


# ---------------------------------------------------------------------------------------------------------------------
# Online training: the trained model generates completions


def short_words(completions: list[str], **_: Any) -> list[float]:
    """Return the rewards: the number of words that start with "w1", divided by 8."""
    return [sum(word.startswith("w1") for word in text.split()) / 8 for text in completions]


def explores(run: Run, kind: Any, args: Any, **more: Any) -> Any:
    if run.rank == 0:
        llama(attn_implementation="eager").save_pretrained("pretrained")
    dist.barrier()
    model = LlamaForCausalLM.from_pretrained("pretrained")  # TRL also loads the reference model from this folder
    made = kind(
        model, args=args, reward_funcs=short_words, train_dataset=prompts(), processing_class=tokenizer(), **more
    )
    return trains(run, made)


ONLINE = {"num_generations": 2, "max_completion_length": 5, "max_steps": 3, "eval_strategy": "no"}


@rows("GRPO")
def grpo(run: Run) -> None:
    explores(run, GRPOTrainer, arguments(GRPOConfig, **ONLINE))


@rows("GRPO with a reference model")
def grpo_reference(run: Run) -> None:
    explores(run, GRPOTrainer, arguments(GRPOConfig, beta=0.1, num_iterations=2, **ONLINE))


@rows("RLOO")
def rloo(run: Run) -> None:
    explores(run, RLOOTrainer, arguments(RLOOConfig, **ONLINE))
