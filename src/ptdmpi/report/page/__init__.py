"""A run as one interactive page: an HTML file that loads nothing from a network, and the same page
served on this host while the run trains."""

from ptdmpi.report.page.content import content, head
from ptdmpi.report.page.document import document, write

__all__ = ["content", "document", "head", "write"]
