"""Formatting of text for people: numbers with nouns, large numbers, and file sizes. Control
characters in text from files are escaped."""

import unicodedata


def printable(text: str) -> str:
    """Return the text with escapes (such as \\x1b) in place of control characters other than line
    ends, so that a terminal does not execute control sequences in the text."""
    return "\n".join(map(printable_line, text.split("\n")))


def printable_line(line: str) -> str:
    """Return the text with escapes in place of all control characters, including line ends."""
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in line)


def mistake_in_path(path: str) -> str:
    """Return a message about the illegal characters in a path; "" if the path is legal. Control
    characters are illegal, because a terminal that shows the path would execute them. Bytes that
    are not UTF-8 are illegal, because text files, such as JSON, cannot store them."""
    kinds = {unicodedata.category(sign) for sign in path}
    if "Cs" in kinds:
        return "a path must not contain bytes that are not UTF-8"
    return "a path must not contain control characters" if "Cc" in kinds else ""


def counted(number: int, noun: str) -> str:
    """Return the number with its noun: (1, "rank") -> "1 rank"; (1024, "rank") -> "1,024 ranks".
    Only regular plurals are supported."""
    if number == 1:
        return f"1 {noun}"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{number:,} {noun[:-1]}ies"
    return f"{number:,} {noun}{'es' if noun.endswith(('s', 'x', 'ch', 'sh')) else 's'}"


def short(number: float) -> str:
    """Return a short form of a number: 174600000000 -> 174.6B, 1700 -> 1.7K. Numbers below 1,000
    are returned without a letter.
    """
    for letter, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= scale:
            return f"{number / scale:,.1f}{letter}"
    return f"{number:.0f}"


def file_size(number: float) -> str:
    """Return the size of a file in powers of ten: 1234567 -> 1.2 MB, 1234 -> 1.2 kB."""
    if number >= 1e5:
        return f"{number / 1e6:,.1f} MB"
    return f"{number / 1e3:.1f} kB" if number >= 1e3 else counted(round(number), "byte")
