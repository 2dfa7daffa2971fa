"""Rules about the section [distillation]: the settings that cannot be combined with it."""

from collections.abc import Iterator

from ptdmpi.config.configuration import Sections
from ptdmpi.config.rules.known import where_known
from ptdmpi.config.rules.preference import other_objectives
from ptdmpi.config.sections import PreferenceConfig


def distillation_rules(sections: Sections) -> Iterator[str]:
    """Yield a mistake for each setting that cannot be combined with a teacher. Each mistake names
    the legal values."""
    if sections.distillation is None or not sections.distillation.teaches:
        return
    for key, legal in (*other_objectives(sections), *where_known(_pairs, sections.preference)):
        yield f"[distillation] cannot be combined with {key}; legal: {legal}"


def _pairs(preference: PreferenceConfig) -> Iterator[tuple[str, str]]:
    if preference.compares:
        yield f'preference.method = "{preference.method}"', 'method = "none"'
