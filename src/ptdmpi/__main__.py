"""The entry point of the command `ptdmpi` and of `python -m ptdmpi`."""

from ptdmpi.base import early


def main() -> None:
    """Run the command line. Signals that arrive during its imports are handled, too."""
    early.begin("ptdmpi", holding=("run", "train"))
    try:
        from ptdmpi.cli import main as command_line

        command_line()
    finally:
        early.end()


if __name__ == "__main__":
    main()
