"""``python -m posttrain.cli``."""

from posttrain.cli import main

main()
