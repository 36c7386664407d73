"""The command line: one thin module per command. Only this package prints, exits and reads arguments.

`mtkit --help` must stay fast, so nothing here imports torch, datasets, sentencepiece or sacrebleu at module level; the commands import what they
need inside their functions.
"""

import signal


def main() -> None:
    """Entry point of the `mtkit` script."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the commands are there, Ctrl-C has nothing to clean up and no traceback to show
    from mtkit.cli.app import main as run

    run()
