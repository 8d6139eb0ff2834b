"""``python -m shortlist`` is the command ``shortlist``; ``torchrun -m shortlist train ...`` starts it on many GPUs."""

from shortlist.cli import main

main()
