"""Create models by name: the built-in GPT, shapes of the planner, and any `config.json` of Hugging Face.

Models are created on the meta device, sharded, and then initialized, so no process ever holds a full model.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

import composable_shard as cs
from _gpt import GPT, SIZES
from _lora import names_with_adapters, reset_adapter, with_adapters
from composable_shard import checkpoint
from composable_shard.planner import NAMED, Shape, repeated_blocks
from composable_shard.planner.decoder import Decoder

NAMES = (*SIZES, *NAMED)


@dataclass(frozen=True)
class Blueprint:
    """The description of a model that has not been created.

    Attributes:
        vocabulary: size of the vocabulary.
        context: maximum number of tokens per sequence; None: no limit.
        make: creates the model.
        fill: initializes a module's own parameters, without those of its children. Called with the model, the name of
            the module relative to its group, and the module.
        folder: directory with tokenizer and weights, if there is one.
        files: texts to export with the weights, such as `config.json`, by file name.
    """

    vocabulary: int
    context: int | None
    make: Callable[[], nn.Module]
    fill: Callable[[nn.Module, str, nn.Module], None]
    folder: Path | None = None
    files: Mapping[str, str] = field(default_factory=dict)


def blueprint(name: str, sequence: int) -> Blueprint:
    """Return the blueprint for `name`. If the name is wrong, exit with an error message."""
    if name in SIZES:
        return Blueprint(SIZES[name].vocabulary, None, lambda: GPT(SIZES[name]), GPT.init_module)
    if name in NAMED:
        shape = replace(NAMED[name], sequence=sequence)
        return Blueprint(shape.vocabulary, NAMED[name].sequence, lambda: _Decoder(shape), _fill_decoder)
    file = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if not file.is_file():
        raise SystemExit(
            f"--model {name}: expected a Hugging Face config.json, a folder with one, or one of {', '.join(NAMES)}"
        )
    return _hugging_face(name, file)


class _Decoder(Decoder):
    """The planner's decoder with real rotary angles, for sequences up to the length of its shape."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        rates = 10000.0 ** -torch.linspace(0, 1, shape.channels // 2)
        angles = torch.arange(shape.sequence)[:, None] * rates
        self.angles.copy_(torch.polar(torch.ones_like(angles), angles))  # a buffer, not on the meta device

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.angles[: tokens.shape[1]])
        return self.head(self.norm(x))


def _fill_decoder(model: nn.Module, name: str, module: nn.Module) -> None:
    if isinstance(module, nn.RMSNorm):
        nn.init.ones_(module.weight)
    elif isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)


def _hugging_face(name: str, file: Path) -> Blueprint:
    try:
        kind = json.loads(file.read_text()).get("model_type")
    except (ValueError, AttributeError):
        raise SystemExit(f"--model {name}: {file} does not contain a JSON object") from None
    try:
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise SystemExit(f"--model {name}: requires Transformers (pip install transformers)") from None
    try:
        config = AutoConfig.from_pretrained(file)
    except (OSError, ValueError, KeyError):
        raise SystemExit(f"--model {name}: this version of Transformers does not support {kind!r} models") from None
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise SystemExit(f"--model {name}: model_type {kind!r} is not a causal language model")
    config.use_cache = False  # training needs no cache of keys and values

    def fill(model: nn.Module, _: str, module: nn.Module) -> None:
        inner = model.get_base_model() if hasattr(model, "peft_config") else model
        inner._init_weights(module)

    return Blueprint(
        vocabulary=config.vocab_size,
        context=getattr(config, "max_position_embeddings", None),
        make=lambda: AutoModelForCausalLM.from_config(config),
        fill=fill,
        folder=file.parent,
        files={path.name: path.read_text() for path in (file, *file.parent.glob("token*.json"))},
    )


def build(plan: Blueprint, dtype: torch.dtype, adapters: int = 0) -> nn.Module:
    """Create the model with parameters of this dtype on the meta device, and with real buffers."""

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter:
        if parameter.is_meta:
            return parameter  # tied to a parameter that was moved before
        return nn.Parameter(parameter.to("meta", dtype), requires_grad=parameter.requires_grad)

    with register_module_parameter_registration_hook(on_meta):
        model = plan.make()
        if adapters:
            model = with_adapters(model, repeated_blocks(model), adapters)
    return model.train()


def materialize(model: nn.Module, groups: Iterable[nn.Module], plan: Blueprint, device: torch.device) -> None:
    """Allocate and initialize the parameters, group by group, so that at most one group is unsharded at a time."""
    _give_memory(model, device)
    filled: set[nn.Module] = set()
    for group in (*groups, model):
        with torch.no_grad(), cs.checkpoint.full_parameters(group, recurse=False):
            modules = {name: module for name, module in group.named_modules() if module not in filled}
            for name, module in modules.items():
                plan.fill(model, name, module)
            for module in modules.values():
                reset_adapter(module)
            filled.update(modules.values())


def _give_memory(model: nn.Module, device: torch.device) -> None:
    """Call `to_empty`, but keep the values of buffers and tied parameters."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    model.to_empty(device=device)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    for first, *others in names.values():
        for owner, _, name in (other.rpartition(".") for other in others):
            if model.get_submodule(owner).get_parameter(name) is not model.get_parameter(first):  # unsharded model
                model.get_submodule(owner).register_parameter(name, model.get_parameter(first))


def load_weights(model: nn.Module, folder: Path, has_adapters: bool) -> None:
    """Load this rank's shards from the safetensors in a folder. Adapters are not changed."""
    names = names_with_adapters(model) if has_adapters else {}
    filled = checkpoint.import_safetensors(
        folder, model, cast=True, strict=not has_adapters, rename=lambda name: names.get(name, name)
    )
    if missing := set(filled.missing) & set(names.values()):
        raise cs.errors.CheckpointMismatchError(f"{folder}: weights are missing: {', '.join(sorted(missing)[:5])}")


def traced(plan: Blueprint, sequence: int, adapters: int = 0) -> Callable[[], object]:
    """Return a function for `cs.planner.advise` that creates the model and its loss on `sequence` tokens each."""

    def loss(model: nn.Module, sequences: int) -> Tensor:
        return next_token_loss(model, torch.zeros(sequences, sequence + 1, dtype=torch.int64))

    return lambda: (build(plan, torch.float32, adapters), loss)


def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return next-token logits, shape (batch, time, vocabulary), for tokens of shape (batch, time)."""
    output = model(tokens)
    return getattr(output, "logits", output)  # models of Transformers return an object


def next_token_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean next-token loss in nats per token; `windows` has shape (batch, time + 1)."""
    return F.cross_entropy(logits_of(model, windows[:, :-1]).flatten(0, 1).float(), windows[:, 1:].flatten())
