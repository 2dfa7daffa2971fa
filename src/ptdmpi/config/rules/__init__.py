"""All rules about combinations of keys in a configuration.

A rule is a function whose arguments are sections of a configuration. The function yields one line
for each mistake. A rule about several sections is skipped if one of these sections could not be
read (`where_known`).
"""

from collections.abc import Iterator
from functools import partial

from ptdmpi.config.configuration import Sections
from ptdmpi.config.rules.adapt import adapt_rules
from ptdmpi.config.rules.ahead import ahead_rules
from ptdmpi.config.rules.context import context_rules
from ptdmpi.config.rules.distillation import distillation_rules
from ptdmpi.config.rules.experts import expert_rules
from ptdmpi.config.rules.known import where_known
from ptdmpi.config.rules.methods import method_rules
from ptdmpi.config.rules.model import masked_log_rules, quantize_rules, shape_rules
from ptdmpi.config.rules.mup import mup_rules
from ptdmpi.config.rules.optimizer import optimizer_rules
from ptdmpi.config.rules.precision import precision_rules
from ptdmpi.config.rules.preference import preference_rules
from ptdmpi.config.rules.ranks import (
    axis_rules,
    layout_rules,
    noise_rules,
    spare_rules,
    split_rules,
    zero_rules,
)
from ptdmpi.config.rules.run import (
    compile_rules,
    length_rules,
    own_loss_rules,
    run_rules,
    validation_rules,
)
from ptdmpi.config.rules.task import task_rules
from ptdmpi.config.sections import CommConfig
from ptdmpi.config.wires import wire_mistakes


def rules(sections: Sections, ranks: int) -> Iterator[str]:
    """Yield the mistakes in combinations of keys for a run on `ranks` ranks, one line each. `ranks`
    includes the spare ranks (`run.spare_ranks`).
    """
    spare = 0
    if sections.run is not None:
        spare = sections.run.spare_ranks
    yield from where_known(run_rules, sections.run)
    if spare >= ranks:
        yield from spare_rules(ranks, spare)
        return
    working = ranks - spare
    yield from where_known(shape_rules, sections.model)
    yield from where_known(masked_log_rules, sections.model, sections.log)
    yield from validation_rules(sections)
    yield from where_known(partial(axis_rules, ranks=working, spare=spare), sections.parallel)
    yield from layout_rules(sections, working)
    yield from where_known(zero_rules, sections.parallel, sections.run)
    yield from method_rules(sections)
    yield from noise_rules(sections, working)
    yield from where_known(quantize_rules, sections.quantize)
    yield from where_known(length_rules, sections.run, sections.batch)
    yield from split_rules(sections, working)
    yield from where_known(_comm_rules, sections.comm)
    yield from adapt_rules(sections)
    yield from optimizer_rules(sections)
    yield from precision_rules(sections)
    yield from compile_rules(sections)
    yield from own_loss_rules(sections)
    yield from context_rules(sections)
    yield from expert_rules(sections)
    yield from ahead_rules(sections)
    yield from task_rules(sections)
    yield from preference_rules(sections)
    yield from distillation_rules(sections)
    yield from mup_rules(sections)


def _comm_rules(comm: CommConfig) -> Iterator[str]:
    return wire_mistakes(comm.wire)
