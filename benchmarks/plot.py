"""Line charts as SVG files in ``build/``, for people to look at; the figures are in the JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

Points = Sequence[tuple[float, float]]

BUILD = Path(__file__).resolve().parents[1] / "build"
_WIDTH, _HEIGHT, _MARGIN = 720, 420, 64
_COLOURS = ("#1b6ca8", "#c0392b", "#2e8b57", "#8e44ad", "#b9770e", "#566573")


def line_chart(name: str, title: str, axes: tuple[str, str], series: Mapping[str, Points]) -> Path:
    """Write ``build/<name>.svg`` with both axes from zero; ``axes`` are the labels of x and y."""
    points = [point for line in series.values() for point in line]
    right, top = (max(values) or 1.0 for values in zip(*points, strict=True))
    across, up = (_WIDTH - 2 * _MARGIN) / right, (_HEIGHT - 2 * _MARGIN) / top

    def place(x: float, y: float) -> str:
        return f"{_MARGIN + x * across:.1f},{_HEIGHT - _MARGIN - y * up:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        'font-family="sans-serif">',
        '<rect width="100%" height="100%" fill="white"/>',
        _text(_WIDTH / 2, 24, title, "middle"),
        _text(_WIDTH / 2, _HEIGHT - 12, f"{axes[0]} (0 to {right:.4g})", "middle"),
        _text(8, _MARGIN - 12, f"{axes[1]} (0 to {top:.4g})", "start"),
        f'<polyline points="{place(0, top)} {place(0, 0)} {place(right, 0)}" fill="none" stroke="black"/>',
    ]
    for number, (label, line) in enumerate(series.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join(place(x, y) for x, y in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(_text(_WIDTH - _MARGIN, _MARGIN + 16 * number, label, "end", colour))
    BUILD.mkdir(exist_ok=True)
    target = BUILD / f"{name}.svg"
    target.write_text("\n".join([*parts, "</svg>\n"]), encoding="utf-8")
    return target


def _text(x: float, y: float, text: str, anchor: str, colour: str = "black") -> str:
    return (
        f'<text x="{x}" y="{y}" font-size="13" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'
    )
