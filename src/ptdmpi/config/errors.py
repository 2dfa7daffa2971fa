"""The one exception for what the user can mend."""


class InputError(Exception):
    """Bad input: one line that says what, where, and what would be legal. Exit code 2."""
