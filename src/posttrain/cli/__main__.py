"""``python -m posttrain.cli``."""

from posttrain.cli.app import main

main()
