"""One file a data set; each has a `load(config)`."""
