"""Write the source files of Python's standard library to one .jsonl file. Every machine with Python
has this text, which has about 11 MB.

    python jobs/demo_corpus.py OUTPUT.jsonl
"""

import json
import os
import sys
import sysconfig
from pathlib import Path

# Leave out installed packages, because they are not part of the standard library. Also leave out
# the library's own tests: some distributions of Python do not have them, and the demo does not need
# them, because it trains on only a quarter of the other text.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests"}


def main(output: Path) -> None:
    """Write the sources to the file `output`, and print their number and their size."""
    library = Path(sysconfig.get_paths()["stdlib"])
    temporary = output.with_suffix(".tmp")
    count = size = 0
    with open(temporary, "w", encoding="utf-8") as file:
        for path in sorted(library.rglob("*.py")):
            if LEFT_OUT & set(path.relative_to(library).parts):
                continue
            try:
                text = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:  # a data file of Python's own tests
                continue
            file.write(json.dumps({"text": text}) + "\n")
            count += 1
            size += len(text.encode())
    if not count:
        sys.exit(f"no Python sources below {library}; use your own text: make demo CORPUS=path")
    os.replace(temporary, output)
    print(f"{count:,} files of the standard library, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
