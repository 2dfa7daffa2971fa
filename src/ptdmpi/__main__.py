"""Run the command `ptdmpi`, also by `python -m ptdmpi`."""

from ptdmpi.base import early


def main() -> None:
    """Run the command line; first prepare the process for signals during its imports."""
    early.begin("ptdmpi", holding=("run", "train"))
    try:
        from ptdmpi.cli import main as command_line

        command_line()
    finally:
        early.end()


if __name__ == "__main__":
    main()
