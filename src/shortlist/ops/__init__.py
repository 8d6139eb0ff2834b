"""The mathematics in plain torch: the reference for every kernel."""
