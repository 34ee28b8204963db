"""Transformers 5: families of models, trained with `fully_shard` of each block."""

from __future__ import annotations

import _families

from _rows import Rows

rows = Rows("Transformers 5: models", environment="transformers5", versions=("transformers",))

_families.add(rows)
