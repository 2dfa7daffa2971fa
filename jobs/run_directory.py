"""Print the number of steps and the run directory of a configuration. The job scripts in this
folder use this program.

`python jobs/run_directory.py CONFIG.toml [--set SECTION.KEY=VALUE ...]`
"""

import argparse
import sys

from pydantic import ValidationError

from ptdmpi.config import InputError, RunConfig, load


def main() -> None:
    """Print the number of steps and the run directory; exit with code 2 for bad input."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("--set", action="append", default=[])
    options = parser.parse_args()
    try:
        run = RunConfig.model_validate(load(options.config, options.set).get("run", {}))
    except InputError as error:
        stop(str(error))
    except ValidationError as error:
        first = error.errors()[0]
        stop(f"{options.config}: run.{'.'.join(map(str, first['loc']))}: {first['msg']}")
    print(run.steps, run.dir)


def stop(reason: str) -> None:
    """Print an error, and exit with code 2."""
    print(f"ptdmpi: error: {reason}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main()
