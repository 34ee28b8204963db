"""Runs eager steps: one engine for each root, which follows the plan's schedule."""
