"""A trained run in use: suggestions for new images and vectors."""
