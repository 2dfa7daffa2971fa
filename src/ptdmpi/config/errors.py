"""The exception for what the user can mend."""


class InputError(Exception):
    """Bad input: one line that says what, where, and what would be legal. Exit code 2."""


class SharedInputError(InputError):
    """Bad input that every rank knows of, so that one rank can say it for all."""
