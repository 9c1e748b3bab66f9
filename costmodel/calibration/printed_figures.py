"""Printed numbers beside ours."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class PrintedFigure:
    """A printed number beside ours.

    Attributes:
        printed: The number with the digits that are printed.
        bar: Greatest relative error that passes, 0 for equality to the last printed digit; None if any error does.
        span: Least and greatest prediction; the figure also passes if `printed` is between them.
    """

    printed: str
    ours: float
    bar: float | None = None
    span: tuple[float, float] | None = None

    @property
    def error(self) -> float:
        return self.ours / float(self.printed) - 1

    @property
    def rounded(self) -> str:
        """Our number with as many decimal places as the printed one."""
        return f"{self.ours:.{len(self.printed.partition('.')[2])}f}"

    @property
    def is_equal(self) -> bool:
        return self.rounded == self.printed

    @property
    def passed(self) -> bool:
        is_in_span = self.span is not None and self.span[0] <= float(self.printed) <= self.span[1]
        return self.bar is None or self.is_equal or is_in_span or abs(self.error) <= self.bar


@dataclass(frozen=True, kw_only=True, slots=True)
class PrintedRow:
    """The figures of one printed row by what they are; `use` is whether it was fitted or held out."""

    name: str
    use: str
    figures: dict[str, PrintedFigure]
