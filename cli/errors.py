"""Exceptions of the command line, each with its exit code.

CliError            1 any other error
├── UsageError      2 bad arguments
├── AuthError       3 no key or a wrong one
│   └── ForbiddenError  3 the key lacks the right
├── MissingError    4 no such function, node, key or file
├── DeployError     5 a deploy failed
├── RoomError       1 a disk is full: a retry does not help
└── TimeoutExceeded 6 timed out
"""


class CliError(Exception):
    """A failure with a message for the user."""

    exit_code = 1


class UsageError(CliError):
    exit_code = 2


class AuthError(CliError):
    exit_code = 3


class ForbiddenError(AuthError):
    """The key is valid and lacks the right."""


class MissingError(CliError):
    exit_code = 4


class DeployError(CliError):
    exit_code = 5


class RoomError(CliError):
    """A disk is full: a retry does not help."""


class TimeoutExceeded(CliError):
    exit_code = 6
