"""Searching for settings with Optuna."""
