"""One self-contained page that compares runs, built from their folders alone."""
