"""``python -m posttrain``, and ``torchrun -m posttrain``."""

from posttrain.cli import main

main()
