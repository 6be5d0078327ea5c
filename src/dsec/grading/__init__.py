"""Rewards that an agent can't touch: graders run in sandboxes of their own (docs/GRADING.md)."""
