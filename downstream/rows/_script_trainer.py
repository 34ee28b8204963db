"""A typical user script: Transformers' Trainer with FSDP2. Rows estimate, count and trace its memory.

torchrun --nproc-per-node 2 _script_trainer.py STEPS
"""

import os
import sys

import torch
from _accelerate_on_cpu import fsdp2_on_cpu
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

SEQUENCE, VOCABULARY = 64, 128


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, VOCABULARY, (SEQUENCE,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    fsdp2_on_cpu()
    os.environ["FSDP_RESHARD_AFTER_FORWARD"] = "true"
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": SEQUENCE}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **heads))
    arguments = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=16,
        max_steps=int(sys.argv[1]),
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        dataloader_num_workers=1,
        fsdp=True,
        fsdp_config={"version": 2},
    )
    Trainer(model=model, args=arguments, train_dataset=Samples()).train()


if __name__ == "__main__":
    main()
