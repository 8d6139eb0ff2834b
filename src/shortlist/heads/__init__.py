"""Last layers: cosine scores, and a linear layer fused with the noised loss, on one or several devices."""
