"""Run folders: what a run writes, and reading it again."""
