"""Triton kernels for CUDA. Each has a twin in plain torch, and ``dispatch`` chooses between the two."""
