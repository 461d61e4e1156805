"""The command line: a thin layer over the library. ``posttrain --help`` lists the commands."""

from posttrain.cli.app import main

__all__ = ["main"]
