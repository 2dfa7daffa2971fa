"""The program `ptdmpi-data`, which prepares training data: it converts text files to token
shards."""

from ptdmpi.base import early


def main() -> None:
    """Run the program `ptdmpi-data`. Signals that arrive while the program imports its modules are
    handled, too."""
    early.begin("ptdmpi-data")
    try:
        from data_prep.cli import main as command_line

        command_line()
    finally:
        early.end()
