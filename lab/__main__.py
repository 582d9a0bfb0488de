"""The `lab` command, and `python -m lab`: a Ctrl-C while the rest is still being imported gets its answer too."""

from __future__ import annotations

import os
import signal


def _interrupted(number: int, frame: object) -> None:
    os.write(2, b"interrupted.\n")
    os._exit(130)


def main() -> None:
    """Import the command and run it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupted)
    from lab.cli import main as run

    run()


if __name__ == "__main__":
    main()
