"""The exceptions for mistakes that the user can correct."""


class InputError(Exception):
    """Bad input: one line that says what, where, and what would be legal. Exit code 2."""


class SharedInputError(InputError):
    """Bad input that every rank of a job has found, so that only one rank needs to report it."""
