"""The ratios as one SVG: a panel for each judged figure, a bar for each peer. Standard library only.

Owns the drawing. All panels share one logarithmic axis. Text and lines take the colours of a light or a dark
page, whichever the viewer prefers; the two colours of bars are told apart without red and green.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from peers.table import JUDGED, Cell, Pair, cell, groups

ROW, HEAD, FOOT = 18, 26, 30  # heights: a bar, a panel's title, its axis
LABELS, PLOT, VALUES = 120, 250, 150  # widths: the peers' names, the bars, the ratios
WORDS = {
    "mixed64": "64 requests of mixed lengths, all at once",
    "poisson": "requests that come one by one",
    "prefix": "48 requests with a common beginning",
    "single": "one request",
    "output": "output tokens a second",
    "TTFT p50": "first token, median, ms",
    "TTFT p99": "first token, 99th percentile, ms",
    "TPOT p50": "a later token, median, ms",
}
COLUMN, MARGIN, TOP = LABELS + PLOT + VALUES, 12, 52
STYLE = """\
<style>
svg { color: #1f2328 }
.page { fill: #ffffff }
text { fill: currentColor }
.axis { fill: #6e7781; font-size: 10px }
.grid { stroke: #d0d7de }
.even, .spread { stroke: currentColor }
.better { fill: #4c8fd6 }
.worse { fill: #d9832e }
@media (prefers-color-scheme: dark) {
  svg { color: #e6edf3 }
  .page { fill: #0d1117 }
  .axis { fill: #9198a1 }
  .grid { stroke: #30363d }
}
</style>"""
LEGEND = (
    "Bars: ours / peer (of times: peer / ours), median of the pairs, logarithmic;"
    " beyond 1x ours is better. Lines: least and most. Beside them: ours / the peer's."
)

Bars = list[tuple[str, Cell]]  # of one panel: peer, figure


def draw(pairs: Sequence[Pair], title: str) -> str:
    """The picture. Panels stand in two columns, in the order of the workloads."""
    panels = _panels(pairs)
    axis = _Axis([c for bars in panels.values() for _, c in bars])
    half = -(-len(panels) // 2)
    parts, lowest = [], 0
    for number, (name, bars) in enumerate(panels.items()):
        if number % half == 0:
            y = TOP
        parts += _panel(name, bars, axis, MARGIN + number // half * (COLUMN + MARGIN), y)
        y += HEAD + ROW * len(bars) + FOOT
        lowest = max(lowest, y)
    width = 2 * (COLUMN + MARGIN) + MARGIN
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {lowest}" width="{width}"'
        ' font-family="sans-serif" font-size="12">'
    )
    words = [
        '<rect class="page" width="100%" height="100%"/>',
        f'<text x="{MARGIN}" y="22" font-size="16">{escape(title)}</text>',
        f'<text x="{MARGIN}" y="40" class="axis">{LEGEND}</text>',
    ]
    return "\n".join([opening, STYLE, *words, *parts, "</svg>"])


def _panels(pairs: Sequence[Pair]) -> dict[str, Bars]:
    found: dict[str, Bars] = {}
    for workload, metrics in JUDGED.items():
        for metric in metrics:
            bars = [
                (peer, cell(mine, metric))
                for (w, peer), mine in groups(pairs).items()
                if w == workload
            ]
            if bars:
                found[f"{WORDS[workload]}: {WORDS[metric]}"] = bars
    return found


class _Axis:
    """Ratios to pixels within a panel."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self._low = min([0.7, *(c.spread[0] for c in cells)])
        self._high = max([1.5, *(c.spread[1] for c in cells)])
        powers = range(math.ceil(math.log2(self._low)), math.floor(math.log2(self._high)) + 1)
        step = max(1, len(powers) // 6)
        self.ticks = [2.0**power for power in powers if power % step == 0]

    def x(self, ratio: float) -> float:
        return LABELS + PLOT * math.log(ratio / self._low) / math.log(self._high / self._low)


def _panel(name: str, bars: Bars, axis: _Axis, left: int, top: int) -> list[str]:
    bottom = HEAD + ROW * len(bars)
    parts = [f'<g transform="translate({left} {top})">']
    parts.append(f'<text x="0" y="16" font-weight="bold">{escape(name)}</text>')
    for tick in axis.ticks:
        at, kind = axis.x(tick), "even" if tick == 1 else "grid"
        parts.append(f'<path class="{kind}" d="M{at:.1f} {HEAD - 2}V{bottom + 2}"/>')
        parts.append(
            f'<text class="axis" x="{at:.1f}" y="{bottom + 13}" text-anchor="middle">{tick:g}x</text>'
        )
    for number, (peer, c) in enumerate(bars):
        parts += _bar(peer, c, axis, HEAD + ROW * number)
    return [*parts, "</g>"]


def _bar(peer: str, c: Cell, axis: _Axis, y: int) -> list[str]:
    begin, end = sorted((axis.x(1.0), axis.x(c.ratio)))
    least, most = (axis.x(ratio) for ratio in c.spread)
    kind, middle = "better" if c.ratio >= 1 else "worse", y + ROW / 2
    return [
        f'<text x="{LABELS - 8}" y="{y + 13}" text-anchor="end">{escape(peer)}</text>',
        f'<rect class="{kind}" x="{begin:.1f}" y="{y + 3}" width="{end - begin:.1f}" height="{ROW - 6}"/>',
        f'<path class="spread" d="M{least:.1f} {middle}H{most:.1f}M{least:.1f} {middle - 3}v6'
        f'M{most:.1f} {middle - 3}v6"/>',
        f'<text x="{max(most, end) + 6:.1f}" y="{y + 13}">{c.ratio:.2f}x'
        f'<tspan class="axis">&#160; {_short(c.ours)} / {_short(c.theirs)}</tspan></text>',
    ]


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 20 else f"{value:.1f}"
