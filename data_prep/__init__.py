"""Offline preprocessing of training data (`ptdmpi-data`): text files are converted to token
shards."""

from ptdmpi.base import early


def main() -> None:
    """Run the program `ptdmpi-data`; first prepare the process for signals during its imports."""
    early.begin("ptdmpi-data")
    try:
        from data_prep.cli import main as command_line

        command_line()
    finally:
        early.end()
