#!/usr/bin/env bash
# Make a trained model from text, on this machine: corpus, tokenizer, shards, training on 4 MPI
# ranks, validation, report, and a generated text. `make demo` calls this script. To use your own
# text, set CORPUS to the path of a text file or directory.
set -euo pipefail
cd "$(dirname "$0")/.."
. jobs/mpi-env.sh
bin=.venv/bin
data=runs/demo-data
mkdir -p "$data"
say() { printf '\n== %s\n' "$*"; }

say "corpus"
corpus=${CORPUS:-}
if [ -z "$corpus" ]; then
    corpus=$data/corpus.jsonl
    $bin/python jobs/demo_corpus.py "$corpus"
fi

say "tokenizer: byte-level BPE with 1,000 entries, trained on the corpus"
$bin/ptdmpi-data train-tokenizer "$corpus" --vocab-size 1000 --output "$data/tokenizer.json"

say "token shards (HDF5); 1 % of the documents held out for validation"
$bin/ptdmpi-data tokenize "$corpus" --tokenizer "$data/tokenizer.json" --force \
    --output "$data/train" --valid-output "$data/valid" --valid-fraction 0.01

say "training: mpirun -n 4 ptdmpi train jobs/demo.toml   (t=2, p=2, v=2, interleaved 1F1B)"
mpirun -n 4 $bin/ptdmpi train jobs/demo.toml

say "report: ptdmpi report runs/demo"
$bin/ptdmpi report runs/demo

say "what it writes now: mpirun -n 4 ptdmpi generate runs/demo --prompt 'def '"
mpirun -n 4 $bin/ptdmpi generate runs/demo --prompt "def " --seed 1 --temperature 0.8 --top-p 0.95
