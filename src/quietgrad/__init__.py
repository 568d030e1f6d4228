"""quietgrad trains PyTorch models on sensitive data: the best accuracy a budget buys, and a guarantee that holds."""

from quietgrad import audit, gradients, losses, recipes
from quietgrad.bound import Bound, Clip
from quietgrad.certificate import Certificate, version
from quietgrad.claimed import Claimed
from quietgrad.composition import compose
from quietgrad.denoise import Denoise, Keep
from quietgrad.errors import PrivacyError
from quietgrad.independence import check, fix
from quietgrad.noise import Gaussian, Independent, Noise
from quietgrad.plan import Plan, study
from quietgrad.recipes import dp_sgd
from quietgrad.run import Run
from quietgrad.sample import FixedOrder, Poisson, Sample
from quietgrad.smooth import Plain, Smooth
from quietgrad.stream import Stream
from quietgrad.watch import Watch

__version__ = version("quietgrad")
__all__ = [
    # the plan and its run
    "dp_sgd", "recipes", "Plan", "Run", "study", "check", "fix", "compose", "audit", "Certificate", "PrivacyError",
    "Watch",
    # stages, in the order of the private step
    "Sample", "Poisson", "FixedOrder", "losses", "Smooth", "Plain", "gradients",
    "Bound", "Clip", "Noise", "Independent", "Gaussian", "Claimed", "Denoise", "Keep", "Stream",
]  # fmt: skip
