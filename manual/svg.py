"""Write small SVG pictures of boxes, texts and arrows, in the site's colours."""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

BLUE, GREEN, GREY, INK, PALE = "#4f86c6", "#57a773", "#9a9aa5", "#24292f", "#eef2f8"


class Style(NamedTuple):
    """The look of a text: its size in pixels, its colour, its weight and its anchor."""

    size: float = 13.0
    color: str = INK
    weight: str = "normal"
    anchor: str = "start"


class Drawing:
    """An SVG picture of a given size in pixels, to which shapes are added one after the other."""

    def __init__(self, width: float, height: float) -> None:
        self.width = width
        self.height = height
        self.shapes: list[str] = []

    def box(self, place: Sequence[float], fill: str, *, stroke: str = "none") -> None:
        """Add a rectangle at `place`: x, y, width, height."""
        x, y, width, height = place
        self.shapes.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="5" '
            f'fill="{fill}" stroke="{stroke}"/>'
        )

    def text(self, x: float, y: float, words: str, style: Style | None = None) -> None:
        """Add a line of text at x, y. The anchor of the style says whether the line of text begins
        at x, ends at x or is centred at x."""
        style = style or Style()
        self.shapes.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{style.size:g}" fill="{style.color}" '
            f'font-weight="{style.weight}" text-anchor="{style.anchor}">{escape(words)}</text>'
        )

    def arrow(self, start: tuple[float, float], end: tuple[float, float], color: str) -> None:
        """Add an arrow: a line with a head at its end."""
        self.shapes.append(
            f'<line x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}" '
            f'stroke="{color}" stroke-width="1.5" marker-end="url(#head)"/>'
        )

    def svg(self) -> str:
        """Return the picture as the text of an SVG file."""
        head = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="#6b7280"/>'
            "</marker></defs>"
        )
        size = f'viewBox="0 0 {self.width:.0f} {self.height:.0f}" width="{self.width:.0f}"'
        white = f'<rect width="{self.width:.0f}" height="{self.height:.0f}" fill="#ffffff"/>'
        body = "\n".join([head, white, *self.shapes])
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} '
            f'font-family="Helvetica, Arial, sans-serif">\n{body}\n</svg>\n'
        )
