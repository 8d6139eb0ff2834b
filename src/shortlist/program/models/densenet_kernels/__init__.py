"""Triton kernels for the dense blocks of ``DenseNetBC`` in training."""
