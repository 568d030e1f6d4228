"""The one error: a guarantee is broken, or cannot be stated."""

from __future__ import annotations


class PrivacyError(ValueError):
    """What stands between a plan and its guarantee: the slot, what was found there, and what to do.

    >>> raise PrivacyError("bound", "radius is -1.0", "give a positive radius")
    Traceback (most recent call last):
    quietgrad.errors.PrivacyError: bound: radius is -1.0; give a positive radius.
    """

    def __init__(self, slot: str, found: str, remedy: str) -> None:
        self.slot, self.found, self.remedy = slot, found, remedy
        super().__init__(f"{slot}: {found}; {remedy}.")

    def __reduce__(self) -> tuple[type[PrivacyError], tuple[str, str, str]]:
        return type(self), (self.slot, self.found, self.remedy)
