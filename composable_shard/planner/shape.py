"""The shape of a decoder: the sizes that a planner needs of a model that does not exist."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ShardConfigTypeError, ShardConfigValueError

_OPTIONAL = ("key_value_heads", "hidden", "tied", "head_width")


@dataclass(frozen=True)
class Shape:
    """A decoder of blocks with RMSNorm, rotary embeddings, grouped-query attention and a gated feed-forward network.

    Attributes:
        layers: number of blocks.
        width: width of the residual stream.
        heads: number of attention heads.
        vocabulary: number of tokens in the vocabulary.
        sequence: tokens per sequence.
        key_value_heads: number of heads of keys and values; `heads` if None.
        hidden: width of the feed-forward network; 8/3 of `width`, rounded up to a multiple of 256, if None.
        tied: whether the head shares the weight of the embedding.
        head_width: channels per head; ``width / heads`` if None.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int
    sequence: int
    key_value_heads: int | None = None
    hidden: int | None = None
    tied: bool = False
    head_width: int | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "vocabulary", "sequence", "key_value_heads", "hidden", "head_width"):
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise ShardConfigTypeError(f"Shape.{name}: {value!r} is a {type(value).__name__}; give an int")
            if value < 1:
                raise ShardConfigValueError(f"Shape.{name}={value}: expected at least 1")
        if self.head_width is None and self.width % self.heads:
            raise ShardConfigValueError(f"Shape.width={self.width} is not a multiple of heads={self.heads}")
        if self.heads % self.kv_heads:
            raise ShardConfigValueError(
                f"Shape.heads={self.heads} is not a multiple of key_value_heads={self.kv_heads}"
            )

    @property
    def kv_heads(self) -> int:
        """Number of heads of keys and values."""
        return self.key_value_heads or self.heads

    @property
    def channels(self) -> int:
        """Channels per head."""
        return self.head_width or self.width // self.heads

    @property
    def feed_forward(self) -> int:
        """Width of the feed-forward network."""
        return self.hidden or -(-8 * self.width // 3 // 256) * 256

    @property
    def parameters(self) -> int:
        """Number of parameters of the model."""
        attention = 2 * self.width * self.channels * (self.heads + self.kv_heads)
        block = attention + 3 * self.width * self.feed_forward + 2 * self.width
        ends = (1 if self.tied else 2) * self.vocabulary * self.width + self.width
        return self.layers * block + ends

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Parse text such as ``layers=32,width=4096,heads=32,vocabulary=128256,sequence=8192``, or a name in `NAMED`.

        Raises:
            ShardConfigValueError: the text is neither. The message names what is missing or unknown.
        """
        if text in NAMED:
            return NAMED[text]
        try:
            pairs = dict(part.split("=", 1) for part in text.split(",") if "=" in part)
            if len(pairs) <= text.count(","):
                raise ValueError("it is not a known name, and not every part has the form name=number")
            numbers = {name.strip().replace("-", "_"): int(value) for name, value in pairs.items()}
            tied = bool(numbers.pop("tied", 0))
            return cls(**numbers, tied=tied)
        except (TypeError, ValueError) as error:
            raise ShardConfigValueError(
                f"shape: {text!r} is not a shape ({error}). Use one of {', '.join(NAMED)}, or, for example, "
                "layers=12,width=768,heads=12,vocabulary=50304,sequence=1024"
            ) from None

    @classmethod
    def from_config(cls, path: Path, sequence: int | None = None) -> Shape:
        """Read a Hugging Face ``config.json``.

        Args:
            path: the file, or its directory.
            sequence: tokens per sequence. Default: the length in the configuration.

        Raises:
            ShardConfigValueError: the file cannot be read, or does not describe a decoder of this form.
        """
        file = path / "config.json" if path.is_dir() else path
        try:
            config = json.loads(file.read_text())
        except OSError as error:
            raise ShardConfigValueError(f"{file} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise ShardConfigValueError(f"{file} is not valid JSON: {error}") from None
        return cls._of(config, str(file), sequence)

    @classmethod
    def _of(cls, config: Mapping[str, Any], where: str, sequence: int | None) -> Shape:
        kind = config.get("model_type")
        if kind not in _KINDS:
            raise ShardConfigValueError(
                f"{where} has model_type {kind!r}; supported are {', '.join(sorted(_KINDS))}. For other models, pass "
                "the import path of a function that makes the model"
            )
        missing = [name for name in _REQUIRED.values() if name not in config]
        if missing:
            raise ShardConfigValueError(f"{where} has no {', '.join(missing)}")
        given = {name: config[key] for name, key in _REQUIRED.items()}
        return cls(
            **given,
            sequence=sequence or config.get("max_position_embeddings", 2048),
            key_value_heads=config.get("num_key_value_heads"),
            tied=config.get("tie_word_embeddings", False),
            head_width=config.get("head_dim"),
        )


_KINDS = {"llama", "mistral", "qwen2", "qwen3", "gemma", "smollm3", "phi3", "olmo2"}
_REQUIRED = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "vocabulary": "vocab_size",
    "hidden": "intermediate_size",
}

NAMED = {
    "gpt2-124m": Shape(12, 768, 12, 50304, 1024, hidden=2048, tied=True),
    "llama3-1b": Shape(16, 2048, 32, 128256, 8192, 8, 8192, tied=True),
    "llama3-8b": Shape(32, 4096, 32, 128256, 8192, 8, 14336),
    "llama3-70b": Shape(80, 8192, 64, 128256, 8192, 8, 28672),
    "llama2-7b": Shape(32, 4096, 32, 32000, 4096, hidden=11008),
    "qwen2.5-7b": Shape(28, 3584, 28, 152064, 8192, 4, 18944),
}
"""Shapes of known decoders by name, as `composable-shard advise` accepts them."""
