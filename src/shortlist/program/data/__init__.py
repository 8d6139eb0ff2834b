"""Data sets, built in or on disk."""
