"""``python -m overlap1f1b``, and what the installed command calls."""

import os
import signal
import sys


def run() -> int:
    """The command line, quiet when Ctrl-C comes while it is still being imported; returns the exit status.

    Quiet also when nobody reads on, as in ``overlap1f1b train --help | head``.
    """
    try:
        from overlap1f1b.cli.main import main

        try:
            return main()
        finally:
            sys.stdout.flush()  # here rather than at the end, where nothing could be done about it
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left of it goes nowhere
        return 128 + signal.SIGPIPE


if __name__ == "__main__":
    sys.exit(run())
