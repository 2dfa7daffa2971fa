"""The benchmarks, in nine folders. The folders share a launcher of ranks (`launch`), rounds in
which the compared programs alternate (`turns`), and functions that write tables into pages of docs/
(`marks`)."""
