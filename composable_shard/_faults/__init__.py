"""What ranks tell each other so that none is silently wrong and none waits for ever; see `ledger.py` and `watch.py`."""
