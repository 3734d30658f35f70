"""A picture of a loss curve that was interrupted: the run that was not, under it, and the crash, marked."""

from collections.abc import Mapping

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 960, 300, 48, 24, 34


def draw_losses(
    uninterrupted: Mapping[int, float],
    before: Mapping[int, float],
    after: Mapping[int, float],
    *,
    crash: int,
) -> str:
    """An SVG of three runs: step to loss of each, and the step in whose save a rank died.

    The steps between the checkpoint and the crash were run twice; there the points lie on each other.
    """
    last, highest = max(uninterrupted), max(uninterrupted.values()) * 1.05

    def x(step: float) -> float:
        return _LEFT + step / last * (_WIDTH - _LEFT - 20)

    def y(loss: float) -> float:
        return _TOP + (1 - loss / highest) * (_HEIGHT - _TOP - _BOTTOM)

    line = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in sorted(uninterrupted.items()))
    left, right, floor = x(min(after) - 0.5), x(crash + 0.5), y(0)
    parts = [
        f'<rect x="{left:.1f}" y="{_TOP}" width="{right - left:.1f}" height="{floor - _TOP}" class="again"/>',
        f'<text x="{left + 6:.1f}" y="{floor - 8}" class="faint">run again after the restart</text>',
        f'<path d="M{x(last):.1f} {floor}H{x(0):.1f}V{_TOP}" class="axis"/>',
        f'<polyline points="{line}" class="uninterrupted"/>',
        *(_point(x(step), y(loss), 6, "before", step, loss) for step, loss in before.items()),
        *(_point(x(step), y(loss), 3, "after", step, loss) for step, loss in after.items()),
        f'<path d="M{right:.1f} {floor}V{_TOP - 6}" class="crash"/>',
        f'<text x="{right + 6:.1f}" y="{_TOP + 6}" class="crash">killed in the save of step {crash}</text>',
        *(
            f'<text x="{x(step):.1f}" y="{_HEIGHT - 14}" text-anchor="middle">{step}</text>'
            for step in range(0, last + 1, 4)
        ),
        f'<text x="{_LEFT - 8}" y="{y(highest) + 10:.1f}" text-anchor="end">{highest:.1f}</text>',
        f'<text x="{_LEFT - 8}" y="{floor:.1f}" text-anchor="end">0</text>',
    ]
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(parts)}</svg>'


def _point(x: float, y: float, radius: float, kind: str, step: int, loss: float) -> str:
    title = f"<title>step {step}: {loss!r}</title>"
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" class="{kind}">{title}</circle>'
