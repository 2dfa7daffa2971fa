"""Rules about the distribution of a run over ranks: the sizes of the axes, the layout, the division
of datasets over data ranks, and the measurement of gradient noise.
"""

from collections.abc import Iterator
from functools import partial

from ptdmpi.base.near import divisors, nearest
from ptdmpi.base.words import counted
from ptdmpi.config.adapt import AdaptConfig
from ptdmpi.config.configuration import Sections
from ptdmpi.config.layout import Layout
from ptdmpi.config.legality import groups_need_zero, layout_mistakes
from ptdmpi.config.methods import DataParallelConfig, replicas_differ
from ptdmpi.config.rules.known import where_known
from ptdmpi.config.sections import (
    BatchConfig,
    DataConfig,
    LogConfig,
    ParallelConfig,
    RecomputeConfig,
    RunConfig,
)
from ptdmpi.config.zero import covers_state, stages_of_zero


def spare_rules(ranks: int, spare: int) -> Iterator[str]:
    """Yield a mistake if `spare` is at least `ranks`, the number of started ranks: then all ranks
    would be spare ranks, and no rank would train."""
    if spare < ranks:
        return
    legal = f"0 to {ranks - 1}" if ranks > 1 else "only 0"
    yield (
        f"run.spare_ranks = {spare} leaves no rank to train, because only {ranks} were started; "
        f"legal: {legal}"
    )


def axis_rules(parallel: ParallelConfig, ranks: int, spare: int) -> Iterator[str]:
    """Yield a mistake if the product of the sizes of the axes is not `ranks`. If `parallel.data` is
    "auto", the product of the other axes must divide `ranks`. `ranks` does not include the `spare`
    spare ranks.
    """
    model_ranks = parallel.model_ranks
    words = "tensor * pipeline"
    sizes = f"{parallel.tensor} * {parallel.pipeline}"
    if parallel.context > 1:
        words = "tensor * context * pipeline"
        sizes = f"{parallel.tensor} * {parallel.context} * {parallel.pipeline}"
    beside = f" in addition to {counted(spare, 'spare rank')}" if spare else ""
    if parallel.data == "auto":
        if ranks % model_ranks:
            yield (
                f"{counted(ranks, 'rank')}{beside} cannot be split: parallel.{words} = "
                f"{sizes} = {model_ranks} must divide the number "
                f"of ranks; start {max(1, ranks // model_ranks) * model_ranks + spare}, or use "
                f"{words} = {nearest(model_ranks, divisors(ranks))}"
            )
    elif model_ranks * parallel.data != ranks:
        yield (
            f"parallel.{words} * data = {sizes} * {parallel.data} = "
            f"{model_ranks * parallel.data}, but "
            f"{counted(ranks, 'rank')} {'was' if ranks == 1 else 'were'} started{beside}; "
            f'start {model_ranks * parallel.data + spare}, or set parallel.data = "auto"'
        )


def layout_rules(sections: Sections, ranks: int) -> Iterator[str]:
    """Yield the mistakes in the layout of a run on `ranks` ranks, one line each. Rules about
    sections that could not be read are skipped.
    """
    parallel = sections.parallel
    if parallel is None:
        return
    data = max(1, ranks // parallel.model_ranks)
    if parallel.data != "auto":
        data = parallel.data
    batch = sections.batch
    recompute = sections.recompute or RecomputeConfig()
    layout = Layout.of(parallel, batch or BatchConfig(global_size=1), recompute, data)
    if parallel.shard_group == "node" and not covers_state(parallel.zero):
        # `Layout.of` treats "node" as "all", so the rules about layouts do not see this mistake
        yield groups_need_zero("node")
    model = sections.model
    if model is not None:
        scaling = sections.precision.scaling if sections.precision is not None else "none"
        model = model.adapted(sections.adapt or AdaptConfig(), sections.quantize, scaling)
    yield from layout_mistakes(layout, model, None if batch is None else batch.global_size)


def zero_rules(parallel: ParallelConfig, run: RunConfig) -> Iterator[str]:
    """Yield a mistake if `run.reproducible` is combined with a stage `parallel.zero` that shards
    gradients. A reproducible run sums the gradients of microbatches along one tree, but sharded
    gradients are summed after each microbatch."""
    if parallel.zero not in stages_of_zero(run.reproducible):
        yield (
            "run.reproducible = true sums the gradients of all microbatches along one tree, but "
            f"parallel.zero = {parallel.zero} sums them after each microbatch, in shards; legal: "
            "zero = 0 or 1"
        )


def noise_rules(sections: Sections, ranks: int) -> Iterator[str]:
    """Yield a mistake for each setting that makes the measurement of gradient noise impossible. The
    measurement needs several data ranks: it compares the complete gradient of each data rank with
    the sum of these gradients.
    """
    log = sections.log
    if log is None or not log.gradient_noise_every_steps:
        return
    yield from where_known(partial(_noise_of_ranks, ranks), log, sections.parallel)
    yield from where_known(_noise_of_trees, log, sections.run)
    yield from where_known(_noise_of_methods, log, sections.data_parallel)


def _noise_key(log: LogConfig) -> str:
    return f"log.gradient_noise_every_steps = {log.gradient_noise_every_steps} compares the"


def _noise_of_ranks(ranks: int, log: LogConfig, parallel: ParallelConfig) -> Iterator[str]:
    key = _noise_key(log)
    if ranks <= parallel.model_ranks:
        yield f"{key} gradients of data ranks, so d must be at least 2; legal: 0"
    if covers_state(parallel.zero):
        yield (
            f"{key} whole gradients of data ranks, which parallel.zero = {parallel.zero} splits "
            "before they are summed; legal: 0, or zero = 0"
        )


def _noise_of_trees(log: LogConfig, run: RunConfig) -> Iterator[str]:
    if run.reproducible:
        yield (
            f"{_noise_key(log)} gradients of data ranks, but run.reproducible = true sums "
            "microbatches along one tree, in which no rank has a gradient of its own; legal: 0"
        )


def _noise_of_methods(log: LogConfig, method: DataParallelConfig) -> Iterator[str]:
    if replicas_differ(method):
        yield (
            f"{_noise_key(log)} gradients of data ranks with their sum, which data_parallel.method "
            f'= "{method.method}" does not compute; legal: 0, or method = "all_reduce"'
        )


def split_rules(sections: Sections, ranks: int) -> Iterator[str]:
    """Yield the mistakes in the use of `data.split = "by_rank"`, for `ranks` ranks that train."""
    yield from where_known(_split_and_losses, sections.data, sections.run)
    yield from where_known(partial(_split_shares, ranks), sections.data, sections.parallel)


def _split_and_losses(data: DataConfig, run: RunConfig) -> Iterator[str]:
    if data.split == "by_rank" and run.on_failure == "shrink":
        yield (
            'data.split = "by_rank" gives each data rank its own datasets, but run.on_failure = '
            '"shrink" would continue without the datasets of a lost rank; legal: on_failure = '
            '"abort", or split = "shared"'
        )


def _split_shares(ranks: int, data: DataConfig, parallel: ParallelConfig) -> Iterator[str]:
    if data.split != "by_rank":
        return
    size = parallel.data
    if size == "auto":
        size = ranks // parallel.model_ranks
    count = len(data.train)
    if size > 0 and count % size:
        below = count // size * size
        legal = " or ".join(str(n) for n in (below, below + size) if n)
        yield (
            f'data.split = "by_rank" cannot divide {count} training datasets equally over {size} '
            f"data ranks; legal: {legal} [[data.train]], or another parallel.data"
        )
