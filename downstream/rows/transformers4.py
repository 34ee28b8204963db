"""Rows for Transformers 4: Trainer, `generate` and weight folders."""

from __future__ import annotations

import _trainer

from _rows import Rows

rows = Rows(
    "Transformers 4: Trainer and generate", environment="transformers4", versions=("transformers", "accelerate")
)

_trainer.add(rows)
