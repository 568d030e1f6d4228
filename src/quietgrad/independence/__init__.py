"""Rule four: an example's contribution depends on that example, the parameters and fresh randomness only."""

from quietgrad.independence.nature import fix
from quietgrad.independence.rule4 import check

__all__ = ["check", "fix"]
