"""A training step as data: plans, schedules, records, and predictions of memory and time."""
