"""What can go wrong, by whose hand, and the exit code each gives."""

from __future__ import annotations

OK = 0
CLAIM_FAILED = 1
USER_MISTAKE = 2
ENVIRONMENT_BROKE = 3
INTERRUPTED = 130


class LabError(Exception):
    """An error that reaches the user as one sentence, never as a traceback."""

    exit_code = ENVIRONMENT_BROKE


class UserError(LabError):
    """A setting is wrong. The sentence names the setting, its value and what to do."""

    exit_code = USER_MISTAKE


class EnvironmentBroken(LabError):
    """The engine, the cluster or the store failed, through no setting of the user's."""

    exit_code = ENVIRONMENT_BROKE
