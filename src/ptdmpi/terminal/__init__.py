"""Shared parts of both programs at the terminal: options, help, exit codes, errors of one line."""
