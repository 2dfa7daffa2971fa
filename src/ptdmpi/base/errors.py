"""The exceptions for mistakes that the user can correct."""


class InputError(Exception):
    """An error in the user's input. The message is one line, which gives the mistake, its location,
    and the legal values. The exit code of the program is 2.
    """


class SharedInputError(InputError):
    """An error in the user's input that all ranks of a job raise together, so only one rank needs
    to print the message."""
