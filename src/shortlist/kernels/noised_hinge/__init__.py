"""The noised top-K hinge on a GPU, with noise that is almost never drawn."""
