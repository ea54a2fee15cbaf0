"""``python -m overlap1f1b``, and the function that the installed command calls."""

import os
import signal
import sys


def run() -> int:
    """Run the command line; returns the exit status.

    There is no traceback if Ctrl-C comes during imports, or if the reader is gone, as in ``overlap1f1b --help | head``.
    """
    try:
        from overlap1f1b.cli.main import main

        try:
            return main()
        finally:
            sys.stdout.flush()  # here, since errors at the end of the process cannot be handled
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discards the rest of the output
        return 128 + signal.SIGPIPE


if __name__ == "__main__":
    sys.exit(run())
