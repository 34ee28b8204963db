"""Transformers 4: families of models, trained with `fully_shard` of each block."""

from __future__ import annotations

import _families

from _rows import Rows

rows = Rows("Transformers 4: models", environment="transformers4", versions=("transformers",))

_families.add(rows)
