"""SVG as text, as much of it as charts need. Lengths are pixels, y grows downwards."""

from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape, quoteattr

FONTS = "DejaVu Sans, Verdana, Arial, sans-serif"
CHARACTER = 0.64
"""Width of a digit over the font size, in the widest of FONTS."""

Box = tuple[float, float, float, float]
"""x, y, width, height."""


def document(width: float, height: float, parts: Iterable[str]) -> str:
    """The picture, on white."""
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONTS}">',
        f'<path d="M0 0h{width:.0f}v{height:.0f}H0z" fill="white"/>',
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def text(content: str, x: float, y: float, size: float, **style: str | float) -> str:
    """A line of text whose digits have their middle at y."""
    return (
        f'<text x="{_short(x)}" y="{_short(y + 0.36 * size)}" font-size="{_short(size)}"'
        f"{_attributes(style)}>{escape(content)}</text>"
    )


def upright(content: str, x: float, y: float, size: float) -> str:
    """Text from below to above, its middle at x, y."""
    x += 0.36 * size
    turn = f"rotate(-90 {_short(x)} {_short(y)})"
    return text(content, x, y - 0.36 * size, size, transform=turn)


def boxes(found: Iterable[Box], **style: str | float) -> str:
    """Rectangles of one style."""
    outline = "".join(
        f"M{_short(x)} {_short(y)}h{_short(w)}v{_short(h)}h{_short(-w)}z" for x, y, w, h in found
    )
    return f'<path d="{outline}"{_attributes(style)}/>'


def lines(found: Iterable[Sequence[tuple[float, float]]], **style: str | float) -> str:
    """Lines through points, in one style."""
    outline = "".join("M" + "L".join(f"{_short(x)} {_short(y)}" for x, y in points) for points in found)
    return f'<path d="{outline}"{_attributes(style)}/>'


def group(parts: Iterable[str], **style: str | float) -> str:
    """Parts that share a style."""
    return "\n".join([f"<g{_attributes(style)}>", *parts, "</g>"])


def hatch(name: str, color: str) -> str:
    """Diagonal lines to fill with: fill="url(#name)"."""
    size = 'width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"'
    return f'<pattern id="{name}" {size}><path d="M0 0V5" stroke="{color}" stroke-width="2.4"/></pattern>'


def _attributes(style: dict[str, str | float]) -> str:
    return "".join(f" {name.replace('_', '-')}={quoteattr(str(value))}" for name, value in style.items())


def _short(number: float) -> str:
    """Two decimals, without those that say nothing."""
    return f"{number:.2f}".rstrip("0").rstrip(".")
