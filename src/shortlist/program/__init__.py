"""The training program; needs the extra ``train``."""
