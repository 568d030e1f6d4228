"""Per-example gradients: the loop is the meaning; an engine is used only if it gives the same as the loop.

An engine is a pure function of (parameters, padded chunk, public views, context); nothing of the user's model changes.
"""

from quietgrad.gradients.chain import Chain
from quietgrad.gradients.choose import Gradients
from quietgrad.gradients.rows import Rows

__all__ = ["Chain", "Gradients", "Rows"]
