"""Which loss is best for some data: several losses, several seeds, intervals."""
