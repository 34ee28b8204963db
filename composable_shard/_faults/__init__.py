"""Ranks compare their actions so that no rank computes wrong results or hangs; see `ledger.py` and `watch.py`."""
