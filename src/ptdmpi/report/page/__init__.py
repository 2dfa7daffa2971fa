"""The interactive page of a run. It is written as one HTML file that loads nothing from a network,
or it is served on this host while the run trains."""

from ptdmpi.report.page.content import content, head
from ptdmpi.report.page.document import document, write

__all__ = ["content", "document", "head", "write"]
