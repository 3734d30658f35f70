"""A picture of a loss curve that was interrupted: the run that was not, under it, and each end, marked."""

from collections.abc import Mapping, Sequence

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 960, 320, 48, 44, 34
_RADII = (7, 5, 3)
"""Points of later runs are smaller, so that steps that were run again show all of them."""


def draw_losses(
    uninterrupted: Mapping[int, float], runs: Sequence[Mapping[int, float]], ends: Sequence[tuple[int, str]]
) -> str:
    """An SVG of a run that nothing happened to, and of up to three that went on from each other.

    Args:
        uninterrupted: Step to loss.
        runs: The same of each part of the interrupted run.
        ends: The steps where one of them ended, and why.
    """
    last, highest = max(uninterrupted), max(uninterrupted.values()) * 1.05

    def x(step: float) -> float:
        return _LEFT + step / last * (_WIDTH - _LEFT - 20)

    def y(loss: float) -> float:
        return _TOP + (1 - loss / highest) * (_HEIGHT - _TOP - _BOTTOM)

    line = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in sorted(uninterrupted.items()))
    floor = y(0)
    parts = [
        f'<path d="M{x(last):.1f} {floor}H{x(0):.1f}V{_TOP}" class="axis"/>',
        f'<polyline points="{line}" class="uninterrupted"/>',
    ]
    for number, run in enumerate(runs):
        parts += [
            f'<circle cx="{x(step):.1f}" cy="{y(loss):.1f}" r="{_RADII[number]}" class="run{number}">'
            f"<title>step {step}: {loss!r}</title></circle>"
            for step, loss in run.items()
        ]
    for number, (step, why) in enumerate(ends):
        at, top = x(step + 0.5), 14 + 16 * number
        parts.append(f'<path d="M{at:.1f} {floor}V{top + 4}" class="end"/>')
        parts.append(f'<text x="{at + 6:.1f}" y="{top + 4}" class="end">{why}</text>')
    parts += [
        f'<text x="{x(step):.1f}" y="{_HEIGHT - 14}" text-anchor="middle">{step}</text>'
        for step in range(0, last + 1, 12)
    ]
    parts += [
        f'<text x="{_LEFT - 8}" y="{y(highest) + 10:.1f}" text-anchor="end">{highest:.1f}</text>',
        f'<text x="{_LEFT - 8}" y="{floor:.1f}" text-anchor="end">0</text>',
    ]
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(parts)}</svg>'
