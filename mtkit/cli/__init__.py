"""The command line: one thin module per command. Only this package prints, exits and reads arguments.

`mtkit --help` must stay fast, so nothing here imports torch, datasets, sentencepiece or sacrebleu at module level; the commands import what they
need inside their functions.
"""

from mtkit.cli.app import app, main

__all__ = ["app", "main"]
