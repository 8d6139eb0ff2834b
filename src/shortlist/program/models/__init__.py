"""Networks: timm's, and the CIFAR networks of the paper's experiments."""
