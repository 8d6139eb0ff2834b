"""Classes by their training images, as in the paper's tables: few < 20 <= medium <= 100 < many."""

FEW_BELOW, MANY_ABOVE = 20, 100
