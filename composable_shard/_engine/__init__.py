"""What runs an eager step: one engine for each root, which follows the plan's schedule."""
