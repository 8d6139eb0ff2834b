"""One file for each data set, with `load(config, root)`."""
