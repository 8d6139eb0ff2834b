"""The noised top-K hinge in one read of the scores and one write of the gradient; its noise is almost never drawn.

Only the (K+1)-th largest of ``s + epsilon Z`` and its class matter, for each sample. Rows of up to a few thousand
classes are perturbed outright (``sample_dense``). Longer rows take two steps:

1. ``prepare`` reads the scores. For each tile of 32 classes it keeps the largest score and how many classes are as good
   as that. From these it finds a level that a little more than K + 1 perturbed scores are expected to pass. Classes
   close to the level or above it are "hot", and listed.
2. ``sample_lazy`` draws a normal for each hot class. For the other classes of a tile it draws one number: the largest
   of their normals, whose law has a closed form. Only if the largest score and the largest normal together could pass
   the level are the next largest normals drawn, one by one, until none could. The (K+1)-th largest is among what
   passes; if too few pass, the search is repeated with a lower threshold.

The noise is a function of the seed and of where it is used (``random``). So a second search in any order sees the same
noise, and its law is that of independent normals, to the 32 bits of its uniforms. The level decides which classes are
hot, but depends on the scores alone.

The last sample of a row to finish computes the loss of the row, and the last row their reduction. Backward writes zeros
and the ``n_samples + 1`` entries of each row.

Where classes come in chunks (``merge_chunk``), the K + 1 best so far are kept. The level of a later chunk is the
smallest of them over all samples. It depends on what other classes have drawn, not on the noise of this chunk, so the
law is the same.

``plan`` decides how the kernels work. ``threshold``, ``sample``, ``loss``, ``counters`` and ``random`` run on the
device, ``autograd`` launches them, and ``custom_op`` makes them an operator for ``torch.compile``.
"""
