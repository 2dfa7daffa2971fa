"""The choice of the compressor that the configuration names."""

from ptdmpi.config import DataParallelConfig
from ptdmpi.engine.compress.compressor import Compressor
from ptdmpi.engine.compress.low_rank import LowRank
from ptdmpi.engine.compress.quantise import Qsgd, Rounded, Sign
from ptdmpi.engine.compress.sparse import RandomK, TopK


def compressor_of(section: DataParallelConfig) -> Compressor | LowRank:
    """Return the compressor that the section [data_parallel] names.

    Without error feedback, the unbiased variant of a compressor is used if there is one. Error
    feedback needs a compressor that contracts: for values x and their decoded values C(x), the
    expected value of ||C(x) - x||^2 must be less than ||x||^2. An unbiased compressor need not
    contract. With error feedback, its decoded values are therefore divided by 1 + omega, where
    omega is the variance bound of the compressor (see `Compressor`). Without this division, the
    compression errors that error feedback stores would grow from step to step. The decentralized
    method also needs a compressor that contracts: each replica sends a difference to its
    neighbours, and this difference contains the compression errors of earlier messages.
    """
    unbiased = section.error_feedback == "none" and section.method != "decentralized"
    match section.compressor:
        case "top_k":
            return TopK(section.ratio)
        case "random_k":
            return RandomK(section.ratio, unbiased)
        case "qsgd":
            return Qsgd(section.levels, unbiased)
        case "sign":
            return Sign()
        case "int8":
            return Rounded(8, section.block)
        case "int4":
            return Rounded(4, section.block)
        case "power_sgd":
            return LowRank(section.rank)
        case other:
            raise ValueError(f"no compressor is called {other}")
