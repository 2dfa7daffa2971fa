"""A multiple-choice task made from a corpus: which of four ways does this passage go on?

`python -m benchmarks.tuning.continuations CORPUS.jsonl FOLDER`. The same files give the same task.
A passage is some lines of a document; the right answer are the lines behind it, the wrong ones
stand in other documents. Questions for training and for validation are of different documents.
"""

import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

CHOICES = 4
PASSAGE_LINES, ANSWER_LINES = 5, 3
MOST = 20  # questions of a document
HELD_OUT = 10  # one of so many documents is for validation
LEAST = 12  # characters that a line must have to be of use


def documents(corpus: Path) -> list[list[str]]:
    """The lines of each document that say something, in their order."""
    found = []
    for line in corpus.read_text(encoding="utf-8").splitlines():
        lines = [one.strip() for one in json.loads(line)["text"].splitlines()]
        lines = [one for one in lines if len(one) >= LEAST]
        if len(lines) >= 4 * (PASSAGE_LINES + ANSWER_LINES):
            found.append(lines)
    return found


def questions(texts: list[list[str]], draw: random.Random) -> Iterator[dict[str, object]]:
    """Questions about each document, with wrong answers from others."""
    size = PASSAGE_LINES + ANSWER_LINES
    for number, lines in enumerate(texts):
        places = range(0, len(lines) - size, size)
        for at in sorted(draw.sample(places, min(MOST, len(places)))):
            passage = lines[at : at + PASSAGE_LINES]
            choices = [lines[at + PASSAGE_LINES : at + size]]
            while len(choices) < CHOICES:
                other = draw.randrange(len(texts))
                if other != number:
                    begin = draw.randrange(len(texts[other]) - ANSWER_LINES)
                    choices.append(texts[other][begin : begin + ANSWER_LINES])
            answer = draw.randrange(CHOICES)
            choices.insert(answer, choices.pop(0))
            texts_of = ["\n".join(one) for one in choices]
            yield {"context": "\n".join(passage), "choices": texts_of, "answer": answer}


def write(corpus: Path, folder: Path, seed: int = 0) -> dict[str, int]:
    """`train.jsonl` and `valid.jsonl` in the folder; how many questions each has."""
    texts, draw = documents(corpus), random.Random(seed)
    counts: Counter[str] = Counter()
    parts = {
        "train": [one for k, one in enumerate(texts) if k % HELD_OUT],
        "valid": texts[::HELD_OUT],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        found = list(questions(part, draw))
        draw.shuffle(found)
        lines = "".join(json.dumps(one) + "\n" for one in found)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
        counts[name] = len(found)
    return dict(counts)


if __name__ == "__main__":
    print(write(Path(sys.argv[1]), Path(sys.argv[2])))
