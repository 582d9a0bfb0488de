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


if __name__ == "__main__":
    main()
