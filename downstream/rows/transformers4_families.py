"""Rows for the model families of Transformers 4, trained with one parameter group per block."""

from __future__ import annotations

import _families

from _rows import Rows

rows = Rows("Transformers 4: models", environment="transformers4", versions=("transformers",))

_families.add(rows)
