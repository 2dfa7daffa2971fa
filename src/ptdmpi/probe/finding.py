"""One finding of `ptdmpi doctor` about the machine."""

from dataclasses import dataclass

MARKS = {"ok": "  ", "note": "! ", "bad": "X "}


@dataclass(frozen=True)
class MachineFinding:
    """One line of the report that `ptdmpi doctor` prints. `status` is ok, note (worth knowing) or
    bad (training would fail)."""

    name: str
    value: str
    status: str = "ok"

    def line(self) -> str:
        """Return the finding as a line of text that begins with a mark of its status."""
        return f"{MARKS[self.status]}{self.name:<18}{self.value}"
