"""Torture: kill training at every file operation, damage run folders in every way, call everything with everything.

``make torture`` runs all of it; ``python -m tests.torture --help`` lists the choices. Each part is a list of cases that
depends only on the seed, so ``--only PART --case N`` repeats one. ``make test`` runs a small share.
"""
