"""What datasets and run must be where each data rank draws from datasets of its own."""

from collections.abc import Iterator, Mapping

from ptdmpi.config.section import Section
from ptdmpi.config.sections import DataConfig, ParallelConfig, RunConfig


def split_mistakes(sections: Mapping[str, Section], ranks: int) -> Iterator[str]:
    """What is wrong with `data.split = "by_rank"` on `ranks` ranks that train."""
    data, parallel, run = (sections.get(name) for name in ("data", "parallel", "run"))
    if not isinstance(data, DataConfig) or data.split != "by_rank":
        return
    if isinstance(run, RunConfig) and run.on_failure == "shrink":
        yield (
            'data.split = "by_rank" gives each data rank datasets that no other reads, and '
            'run.on_failure = "shrink" would go on without those of a lost one; legal: on_failure '
            '= "abort", or split = "shared"'
        )
    if isinstance(parallel, ParallelConfig):
        size = parallel.data
        size = ranks // (parallel.tensor * parallel.pipeline) if size == "auto" else size
        found = len(data.train)
        if size > 0 and found % size:
            below = found // size * size
            legal = " or ".join(str(n) for n in (below, below + size) if n)
            yield (
                f'data.split = "by_rank" deals {found} training datasets to {size} data ranks, '
                f"which get equally many; legal: {legal} [[data.train]], or another "
                "parallel.data"
            )
