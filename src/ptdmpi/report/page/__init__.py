"""The interactive page of a run. The page is either written as one HTML file, which loads nothing
from a network, or served on this host while the run trains."""

from ptdmpi.report.page.content import content, head
from ptdmpi.report.page.document import document, write

__all__ = ["content", "document", "head", "write"]
