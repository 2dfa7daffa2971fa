"""Common code of both command-line programs: options, help, exit codes, one-line error messages."""
