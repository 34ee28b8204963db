"""Runs eager steps: one engine per root follows the plan's schedule."""
