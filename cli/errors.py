"""Exceptions of the command line, each with its exit code.

CliError            1 other
├── UsageError      2 bad arguments
├── AuthError       3 no key, a wrong key, or not allowed
├── MissingError    4 no such function, node, key or file
├── DeployError     5 a deploy failed
├── RoomError       1 a disk is full: trying again does not help
└── TimeoutExceeded 6 it took longer than allowed
"""


class CliError(Exception):
    """Something failed; the message is for the user."""

    exit_code = 1


class UsageError(CliError):
    exit_code = 2


class AuthError(CliError):
    exit_code = 3


class MissingError(CliError):
    exit_code = 4


class DeployError(CliError):
    exit_code = 5


class RoomError(CliError):
    """A disk is full: trying again does not help."""


class TimeoutExceeded(CliError):
    exit_code = 6
