"""Model families of Transformers, tiny and with random weights, with one parameter group per block."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._inductor.config
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import set_seed

from _rows import Rows, Run

VOCABULARY = 99
BATCH, LENGTH = 2, 12

# Configuration of Llama-like decoders. Where the model permits it, two ranks cannot split the widths evenly.
DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 40,
    "intermediate_size": 71,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Grouped matrix products require rows that are a multiple of 16 bytes.
EXPERTS: dict[str, Any] = DECODER | {"intermediate_size": 72, "num_experts": 4, "num_experts_per_tok": 2}
EXPERTS["num_local_experts"] = 4
ENCODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 40,
    "intermediate_size": 71,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
VISION: dict[str, Any] = {
    "hidden_size": 40,
    "intermediate_size": 71,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 12,
    "patch_size": 4,
    "num_channels": 3,
}
SEQ2SEQ: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 36,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 71,
    "decoder_ffn_dim": 71,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
HEAD = {"head_dim": 10}


def tokens(low: int = 3, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(low, VOCABULARY, (BATCH, length))


def text() -> dict[str, Any]:
    """A batch for a causal model; the second sample is padded on the right."""
    ids, mask = tokens(), torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, -3:] = 0
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def plain_text() -> dict[str, Any]:
    """A batch for a causal model without padding, for models with a recurrent state."""
    ids = tokens()
    return {"input_ids": ids, "labels": ids}


def masked() -> dict[str, Any]:
    batch = text()
    chosen = torch.rand(BATCH, LENGTH) < 0.3
    chosen[:, 1] = True
    batch["labels"] = batch["labels"].masked_fill(~chosen, -100)
    return batch


def translation() -> dict[str, Any]:
    return {"input_ids": tokens(), "labels": tokens(length=9)}


def image() -> torch.Tensor:
    return torch.randn(BATCH, 3, 12, 12)


def classes() -> dict[str, Any]:
    return {"pixel_values": image(), "labels": torch.randint(0, 3, (BATCH,))}


def pairs() -> dict[str, Any]:
    ids = tokens()
    ids[:, -1] = 2
    return {"input_ids": ids, "pixel_values": image(), "return_loss": True}


def speech() -> dict[str, Any]:
    return {"input_features": torch.randn(BATCH, 16, 40), "labels": tokens(length=9)}


def wave() -> dict[str, Any]:
    return {"input_values": torch.randn(BATCH, 800), "labels": tokens(length=3)}


def llava_chat() -> dict[str, Any]:
    ids = tokens()
    ids[:, 1:10] = 90  # the nine patches
    ids[:, 10:] = ids[:, 10:].clamp(max=89)
    ids[:, 0] = 3
    return {"input_ids": ids, "pixel_values": image(), "labels": ids.masked_fill(ids == 90, -100)}


def qwen_chat() -> dict[str, Any]:
    ids = torch.randint(3, 80, (BATCH, LENGTH))
    ids[:, 1] = 93
    ids[:, 2:6] = 90  # 4 x 4 patches, merged in squares of 2 x 2
    ids[:, 6] = 94
    grid = torch.tensor([[1, 4, 4]] * BATCH)
    patches = torch.randn(BATCH * 16, 3 * 2 * 4 * 4)
    kinds = (ids == 90).int()
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": patches,
        "image_grid_thw": grid,
        "mm_token_type_ids": kinds,
        "labels": ids.masked_fill(kinds == 1, -100),
    }


def mllama_chat() -> dict[str, Any]:
    ids = tokens()
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": ids,
        "pixel_values": torch.randn(BATCH, 1, 1, 3, 12, 12),
        "aspect_ratio_ids": torch.ones(BATCH, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(BATCH, 1, 1, dtype=torch.long),
        "cross_attention_mask": torch.ones(BATCH, LENGTH, 1, 1, dtype=torch.long),
    }


# Settings of a row in which several blocks read the same tensor (the output of an encoder). FSDP2 passes the inputs of
# each block through an autograd node, so it sums the gradients of the tensor within each block first.
SUMS = {
    "tolerance": 1e-4,
    "why": "FSDP2 sums the gradients of an input shared by blocks within each block first; "
    "ours is bitwise identical to the unsharded model",
}


def with_biases(model: nn.Module) -> None:
    """Initialize biases with random values. The gradients of key biases are only rounding errors."""
    for name, each in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(each, std=0.1)


@dataclass(frozen=True)
class Family:
    """A model family.

    Attributes:
        title: the title of the row.
        model: the name of the model class in Transformers.
        config: the name of the configuration class, and its arguments.
        blocks: the names of the module classes that get their own parameter group.
        batch: a function that returns a batch.
        settings: the settings of the row.
        prepare: a function that changes the model before it is sharded.
        alike: whether all ranks use the same random numbers (for models that skip layers at random).
        sgd: whether to train with SGD. AdamW would turn gradients that are only rounding errors into full-size steps.
        reference: whether to compare the weights with those of the unsharded model. The model must not use dropout.
    """

    title: str
    model: str
    config: tuple[str, dict[str, Any]]
    blocks: tuple[str, ...]
    batch: Callable[[], dict[str, Any]] = text
    settings: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[nn.Module], None] | None = None
    alike: bool = False
    sgd: bool = False
    reference: bool = False

    def make(self) -> nn.Module:
        torch.manual_seed(0)
        name, settings = self.config
        model = getattr(transformers, self.model)(getattr(transformers, name)(**deepcopy(settings)))
        if self.prepare is not None:
            self.prepare(model)
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        params = [each for each in model.parameters() if each.requires_grad]
        return torch.optim.SGD(params, lr=0.1, momentum=0.9) if self.sgd else torch.optim.AdamW(params, lr=0.01)


def shard(model: nn.Module, blocks: tuple[str, ...], **settings: Any) -> nn.Module:
    """Shard each block, then the model, like torch's FSDP2 tutorial."""
    found = [module for module in model.modules() if type(module).__name__ in blocks]
    assert {type(module).__name__ for module in found} == set(blocks), blocks
    for module in found:
        fully_shard(module, **settings)
    return fully_shard(model, **settings)


def program(family: Family, run: Run) -> None:
    """Train three steps, evaluate, and train one more step."""
    dist.init_process_group("gloo")
    model = shard(family.make(), family.blocks)
    run.sharded(model)
    optimizer = family.optimizer(model)
    losses = []

    def batch_of(number: int, rank: int) -> dict[str, Any]:
        set_seed(100 * number + rank)
        batch = family.batch()
        set_seed(100 * number + (0 if family.alike else rank))
        return batch

    def step(number: int) -> None:
        loss = model(**batch_of(number, run.rank)).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.extend([loss.item(), norm.full_tensor().item()])

    model.train()
    for number in range(3):
        step(number)
    model.eval()
    set_seed(1000 + run.rank)
    with torch.no_grad():
        output = model(**family.batch())
    run.note("evaluation", {name: each for name, each in output.items() if isinstance(each, torch.Tensor)})
    model.train()
    step(3)
    run.note("losses and norms", losses)
    run.weights(model)
    if family.reference:
        whole = family.make().train()
        optimizer = family.optimizer(whole)
        for number in range(4):
            torch.stack([whole(**batch_of(number, rank)).loss for rank in range(run.world)]).mean().backward()
            torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        run.agrees("weights", dict(model.named_parameters()), dict(whole.named_parameters()), 1e-4)


def checkpointed(reentrant: bool) -> Callable[[nn.Module], None]:
    """Return a function that enables activation checkpointing of Transformers."""
    return lambda model: model.gradient_checkpointing_enable({"use_reentrant": reentrant})


def compiled(backend: str, *blocks: str) -> Callable[[nn.Module], None]:
    """Return a function that compiles each block, as torch's recipes do."""

    def prepare(model: nn.Module) -> None:
        torch._inductor.config.compile_threads = 1  # a process pool does not work in forked ranks
        for module in model.modules():
            if type(module).__name__ in blocks:
                module.compile(backend=backend)

    return prepare


def untied(settings: dict[str, Any], **more: Any) -> dict[str, Any]:
    return settings | {"tie_word_embeddings": False} | more


GPT2 = ("GPT2Config", {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 36, "n_layer": 2, "n_head": 4})
LLAMA = ("LlamaConfig", untied(DECODER | HEAD))
LLAVA_PARTS: dict[str, Any] = {
    "text_config": {"model_type": "llama"} | DECODER | HEAD,
    "vision_config": {"model_type": "clip_vision_model"} | VISION,
    "image_token_id": 90,
    "image_token_index": 90,
    "vision_feature_layer": -1,
    "image_seq_length": 9,
}
T5 = (
    "T5Config",
    {"vocab_size": VOCABULARY, "d_model": 36, "d_kv": 9, "d_ff": 71, "num_layers": 2, "num_heads": 4}
    | {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1},
)
WHISPER = (
    "WhisperConfig",
    SEQ2SEQ
    | {"num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 16}
    | {"suppress_tokens": None, "begin_suppress_tokens": None},
)
WAV2VEC2: dict[str, Any] = ENCODER | {
    "conv_dim": (9, 9),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 4),
    "num_feat_extract_layers": 2,
    "feat_extract_norm": "layer",
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_length": 2,
    "mask_time_prob": 0.3,
    "ctc_zero_infinity": True,
}
MIXTRAL = ("MixtralConfig", EXPERTS | {"output_router_logits": True})
QWEN3_MOE = ("Qwen3MoeConfig", EXPERTS | HEAD | {"moe_intermediate_size": 36, "decoder_sparse_step": 1})
DEEPSEEK_V3 = (
    "DeepseekV3Config",
    DECODER
    | {"moe_intermediate_size": 36, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}
    | {"n_group": 2, "topk_group": 2, "first_k_dense_replace": 1, "q_lora_rank": 13, "kv_lora_rank": 11}
    | {"qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 7, "num_key_value_heads": 4},
)

FAMILIES = [
    # Decoders
    Family("GPT-2, a tied head, dropout", "GPT2LMHeadModel", GPT2, ("GPT2Block",)),
    Family("Llama", "LlamaForCausalLM", LLAMA, ("LlamaDecoderLayer",)),
    Family(
        "Llama, a tied head",
        "LlamaForCausalLM",
        ("LlamaConfig", DECODER | HEAD | {"tie_word_embeddings": True}),
        ("LlamaDecoderLayer",),
    ),
    Family(
        "Mistral, a sliding window",
        "MistralForCausalLM",
        ("MistralConfig", DECODER | {"sliding_window": 5}),
        ("MistralDecoderLayer",),
    ),
    Family("Qwen2", "Qwen2ForCausalLM", ("Qwen2Config", DECODER), ("Qwen2DecoderLayer",)),
    Family("Qwen3", "Qwen3ForCausalLM", ("Qwen3Config", DECODER | HEAD), ("Qwen3DecoderLayer",)),
    Family("Gemma 2", "Gemma2ForCausalLM", ("Gemma2Config", DECODER | HEAD), ("Gemma2DecoderLayer",)),
    Family("Gemma 3", "Gemma3ForCausalLM", ("Gemma3TextConfig", DECODER | HEAD), ("Gemma3DecoderLayer",)),
    Family("Phi-3, dropout", "Phi3ForCausalLM", ("Phi3Config", DECODER | {"resid_pdrop": 0.1}), ("Phi3DecoderLayer",)),
    Family("OLMo 2", "Olmo2ForCausalLM", ("Olmo2Config", DECODER), ("Olmo2DecoderLayer",)),
    Family("SmolLM3", "SmolLM3ForCausalLM", ("SmolLM3Config", DECODER), ("SmolLM3DecoderLayer",)),
    Family("GPT-NeoX", "GPTNeoXForCausalLM", ("GPTNeoXConfig", ENCODER), ("GPTNeoXLayer",)),
    Family(
        "OPT, dropout",
        "OPTForCausalLM",
        ("OPTConfig", DECODER | {"ffn_dim": 71, "word_embed_proj_dim": 36}),
        ("OPTDecoderLayer",),
    ),
    Family(
        "Bloom, a tied head",
        "BloomForCausalLM",
        ("BloomConfig", {"vocab_size": VOCABULARY, "hidden_size": 36, "n_layer": 2, "n_head": 4}),
        ("BloomBlock",),
    ),
    # Experts
    Family("Mixtral", "MixtralForCausalLM", MIXTRAL, ("MixtralDecoderLayer",), sgd=True, reference=True),
    Family("Qwen3-MoE", "Qwen3MoeForCausalLM", QWEN3_MOE, ("Qwen3MoeDecoderLayer",), sgd=True, reference=True),
    Family("DeepSeek-V3", "DeepseekV3ForCausalLM", DEEPSEEK_V3, ("DeepseekV3DecoderLayer",), sgd=True, reference=True),
    Family(
        "gpt-oss",
        "GptOssForCausalLM",
        ("GptOssConfig", EXPERTS | {"head_dim": 10, "sliding_window": 5}),
        ("GptOssDecoderLayer",),
        sgd=True,
        reference=True,
    ),
    # Encoders and encoder-decoders
    Family("BERT, dropout", "BertForMaskedLM", ("BertConfig", ENCODER), ("BertLayer",), masked),
    Family(
        "ModernBERT",
        "ModernBertForMaskedLM",
        ("ModernBertConfig", ENCODER | {"reference_compile": False, "cls_token_id": 1, "sep_token_id": 2}),
        ("ModernBertEncoderLayer",),
        masked,
    ),
    Family("T5, dropout", "T5ForConditionalGeneration", T5, ("T5Block",), translation, SUMS, sgd=True),
    Family(
        "BART, dropout",
        "BartForConditionalGeneration",
        ("BartConfig", SEQ2SEQ | {"max_position_embeddings": 64, "forced_eos_token_id": 2}),
        ("BartEncoderLayer", "BartDecoderLayer"),
        translation,
        SUMS,
        prepare=with_biases,
        sgd=True,
    ),
    # Vision
    Family("ViT", "ViTForImageClassification", ("ViTConfig", VISION | {"num_labels": 3}), ("ViTLayer",), classes),
    Family(
        "CLIP",
        "CLIPModel",
        ("CLIPConfig", {"text_config": ENCODER | {"eos_token_id": 2}, "vision_config": VISION, "projection_dim": 21}),
        ("CLIPEncoderLayer",),
        pairs,
        prepare=lambda model: setattr(model, "logit_scale", nn.Parameter(model.logit_scale.data[None])),  # no scalars
    ),
    Family(
        "SigLIP",
        "SiglipModel",
        ("SiglipConfig", {"text_config": ENCODER, "vision_config": VISION}),
        ("SiglipEncoderLayer",),
        pairs,
    ),
    # Audio
    Family(
        "Whisper",
        "WhisperForConditionalGeneration",
        WHISPER,
        ("WhisperEncoderLayer", "WhisperDecoderLayer"),
        speech,
        SUMS,
        sgd=True,
    ),
    Family(
        "wav2vec 2.0, masked time, dropout",
        "Wav2Vec2ForCTC",
        ("Wav2Vec2Config", WAV2VEC2 | {"layerdrop": 0.0}),
        ("Wav2Vec2EncoderLayer",),
        wave,
    ),
    Family(
        "wav2vec 2.0, which leaves out layers by chance, the same ones on all ranks",
        "Wav2Vec2ForCTC",
        ("Wav2Vec2Config", WAV2VEC2 | {"layerdrop": 0.5, "num_hidden_layers": 4}),
        ("Wav2Vec2EncoderLayer",),
        wave,
        alike=True,
    ),
    # State space
    Family(
        "Mamba",
        "MambaForCausalLM",
        ("MambaConfig", {"vocab_size": VOCABULARY, "hidden_size": 35, "state_size": 5, "num_hidden_layers": 2}),
        ("MambaBlock",),
        plain_text,
    ),
    Family(
        "Mamba 2",
        "Mamba2ForCausalLM",
        (
            "Mamba2Config",
            {"vocab_size": VOCABULARY, "hidden_size": 36, "num_hidden_layers": 2, "state_size": 5, "chunk_size": 4}
            | {"num_heads": 8, "head_dim": 9, "n_groups": 2, "expand": 2},
        ),
        ("Mamba2Block",),
        plain_text,
    ),
    Family(
        "Jamba: attention, Mamba and experts",
        "JambaForCausalLM",
        (
            "JambaConfig",
            EXPERTS
            | {"use_mamba_kernels": False, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 5}
            | {"expert_layer_period": 2, "expert_layer_offset": 1, "mamba_dt_rank": 3},
        ),
        ("JambaAttentionDecoderLayer", "JambaMambaDecoderLayer"),
        plain_text,
    ),
    Family(
        "Qwen3-Next: gated delta nets, attention and experts",
        "Qwen3NextForCausalLM",
        (
            "Qwen3NextConfig",
            EXPERTS
            | {"head_dim": 8, "moe_intermediate_size": 36, "shared_expert_intermediate_size": 33}
            | {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4}
            | {"linear_num_key_heads": 2, "linear_key_head_dim": 6, "linear_value_head_dim": 6},
        ),
        ("Qwen3NextDecoderLayer",),
    ),
    # Text and images
    Family(
        "LLaVA",
        "LlavaForConditionalGeneration",
        ("LlavaConfig", LLAVA_PARTS | {"vision_feature_select_strategy": "default"}),
        ("LlamaDecoderLayer", "CLIPEncoderLayer"),
        llava_chat,
    ),
    Family(
        "Qwen2-VL",
        "Qwen2VLForConditionalGeneration",
        (
            "Qwen2VLConfig",
            {
                "text_config": DECODER
                | {"rope_scaling": {"type": "default", "mrope_section": [1, 1, 2]}}
                | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
                | {"hidden_size": 32},
                "vision_config": {"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 3}
                | {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2},
                "image_token_id": 90,
                "video_token_id": 91,
                "vision_start_token_id": 93,
                "vision_end_token_id": 94,
            },
        ),
        ("Qwen2VLDecoderLayer", "Qwen2VLVisionBlock"),
        qwen_chat,
    ),
    Family(
        "Mllama: cross-attention to images",
        "MllamaForConditionalGeneration",
        (
            "MllamaConfig",
            {
                "text_config": DECODER
                | {"num_hidden_layers": 3, "cross_attention_layers": [1]}
                | {"rope_scaling": {"rope_type": "default"}}
                | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
                "vision_config": VISION
                | {"num_global_layers": 1, "attention_heads": 4, "intermediate_layers_indices": [0, 1]}
                | {"max_num_tiles": 1, "vision_output_dim": 120, "supported_aspect_ratios": [[1, 1]]},
                "image_token_index": 98,
            },
        ),
        ("MllamaSelfAttentionDecoderLayer", "MllamaCrossAttentionDecoderLayer", "MllamaVisionEncoderLayer"),
        mllama_chat,
        SUMS,
        sgd=True,
    ),
]

VARIANTS = [
    Family(
        f"{title}, gradient checkpoints, {kind}",
        model,
        config,
        blocks,
        batch,
        SUMS if batch is not text else {},
        checkpointed(reentrant),
        sgd=batch is not text or "MoE" in title,
        reference="MoE" in title,
    )
    for reentrant, kind in ((False, "not reentrant"), (True, "reentrant"))
    for title, model, config, blocks, batch in (
        ("Llama", "LlamaForCausalLM", LLAMA, ("LlamaDecoderLayer",), text),
        ("GPT-2", "GPT2LMHeadModel", GPT2, ("GPT2Block",), text),
        ("T5", "T5ForConditionalGeneration", T5, ("T5Block",), translation),
        ("Qwen3-MoE", "Qwen3MoeForCausalLM", QWEN3_MOE, ("Qwen3MoeDecoderLayer",), text),
        ("Whisper", "WhisperForConditionalGeneration", WHISPER, ("WhisperEncoderLayer", "WhisperDecoderLayer"), speech),
    )
    if not (reentrant and title == "Whisper")  # backward of Whisper also fails without sharding
] + [
    Family(
        f"{title}, blocks compiled, {backend}",
        model,
        config,
        (block,),
        batch,
        {"timeout": 400.0},
        compiled(backend, block),
    )
    for title, model, config, block, batch, backend in (
        ("Llama", "LlamaForCausalLM", LLAMA, "LlamaDecoderLayer", text, "aot_eager"),
        ("Llama", "LlamaForCausalLM", LLAMA, "LlamaDecoderLayer", text, "inductor"),
        ("GPT-2", "GPT2LMHeadModel", GPT2, "GPT2Block", text, "aot_eager"),
        (
            "ViT",
            "ViTForImageClassification",
            ("ViTConfig", VISION | {"num_labels": 3}),
            "ViTLayer",
            classes,
            "aot_eager",
        ),
    )
]


def add(rows: Rows) -> None:
    """Add a row for each family and each variant."""
    for family in [*FAMILIES, *VARIANTS]:
        rows.add(family.title, lambda run, family=family: program(family, run), **family.settings)
