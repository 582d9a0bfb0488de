"""The `lab` command, and `python -m lab`: a Ctrl-C while the rest is still being imported gets its answer too."""

from __future__ import annotations

import os
import signal

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _interrupted(number: int, frame: object) -> None:
    os.write(2, b"interrupted.\n")
    os._exit(130)


def main() -> None:
    """Import the command and run it."""
    for number in _SIGNALS:
        signal.signal(number, _interrupted)
    from lab.cli import main as run

    try:
        run()
    finally:
        # The command has answered. Python ends with its handlers taken back, and a Ctrl-C then would
        # change the exit code of what is done.
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        # An interrupt in code that is made from text (dataclasses, type hints) leaves CPython a mark, even when it
        # was answered: the process would die of SIGINT (-2) at its end. The next such code takes the mark away.
        exec("")


if __name__ == "__main__":
    main()
