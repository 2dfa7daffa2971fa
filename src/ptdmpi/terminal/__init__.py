"""Shared parts of both programs at the terminal: options, errors of one line, progress."""
