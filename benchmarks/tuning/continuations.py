"""A multiple-choice task made from a corpus: the model must choose the right one of four
continuations of a passage.

`python -m benchmarks.tuning.continuations CORPUS.jsonl FOLDER` writes the files of the task into
FOLDER. The files depend only on the corpus, so two calls for one corpus write the same files. The
passage of a question consists of consecutive lines of a document. The right answer consists of the
lines after the passage. The wrong answers come from other documents. Questions for training and for
validation are from different documents.
"""

import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

CHOICES = 4
PASSAGE_LINES = 5
ANSWER_LINES = 3
MOST = 20  # maximum number of questions about a document
HELD_OUT = 10  # every HELD_OUT-th document is for validation
LEAST = 12  # minimum number of characters in a line that is used


def documents(corpus: Path) -> list[list[str]]:
    """Return the lines of each document of the corpus, without lines of fewer than `LEAST`
    characters. Documents with too few lines for four questions are left out."""
    texts = []
    for document in corpus.read_text(encoding="utf-8").splitlines():
        lines = [line.strip() for line in json.loads(document)["text"].splitlines()]
        lines = [line for line in lines if len(line) >= LEAST]
        if len(lines) >= 4 * (PASSAGE_LINES + ANSWER_LINES):
            texts.append(lines)
    return texts


def questions(texts: list[list[str]], draw: random.Random) -> Iterator[dict[str, object]]:
    """Yield questions about each document, with wrong answers from other documents."""
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
            joined = ["\n".join(choice) for choice in choices]
            yield {"context": "\n".join(passage), "choices": joined, "answer": answer}


def write(corpus: Path, folder: Path, seed: int = 0) -> dict[str, int]:
    """Write `train.jsonl` and `valid.jsonl` into the folder. Return the number of questions in each
    file."""
    texts = documents(corpus)
    draw = random.Random(seed)
    counts: Counter[str] = Counter()
    parts = {
        "train": [text for k, text in enumerate(texts) if k % HELD_OUT],
        "valid": texts[::HELD_OUT],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        shuffled = list(questions(part, draw))
        draw.shuffle(shuffled)
        lines = "".join(json.dumps(question) + "\n" for question in shuffled)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
        counts[name] = len(shuffled)
    return dict(counts)


if __name__ == "__main__":
    print(write(Path(sys.argv[1]), Path(sys.argv[2])))
