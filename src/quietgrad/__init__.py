"""quietgrad trains PyTorch models on sensitive data: the best accuracy a budget buys, and a guarantee that holds."""

from quietgrad import audit, gradients, losses, recipes
from quietgrad.average import Average
from quietgrad.bound import Bound, Clip
from quietgrad.certificate import Certificate, version
from quietgrad.claimed import Claimed
from quietgrad.composition import compose
from quietgrad.denoise import Denoise, Keep
from quietgrad.errors import PrivacyError
from quietgrad.filters import Averaging, Chain, LowPass
from quietgrad.independence import check, fix
from quietgrad.kalman import Kalman
from quietgrad.laplacian import LaplacianSmoothing
from quietgrad.noise import Gaussian, Independent, Noise
from quietgrad.plan import Plan, study
from quietgrad.recipes import dp_lssgd, dp_sgd, dplis, losing_less
from quietgrad.run import Run
from quietgrad.sample import FixedOrder, Poisson, Sample
from quietgrad.smooth import MeanOfViews, Plain, Smooth, SummedViews
from quietgrad.smoothing import RandomizedSmoothing
from quietgrad.stream import Stream
from quietgrad.views import Views
from quietgrad.watch import Watch

__version__ = version("quietgrad")
__all__ = [
    # the plan and its run
    "dp_sgd", "dplis", "dp_lssgd", "losing_less", "recipes", "Plan", "Run", "study", "check", "fix", "compose", "audit",
    "Certificate", "PrivacyError", "Watch", "Average",
    # stages, in the order of the private step
    "Sample", "Poisson", "FixedOrder", "losses", "Smooth", "Plain", "RandomizedSmoothing", "Views",
    "MeanOfViews", "SummedViews", "gradients",
    "Bound", "Clip", "Noise", "Independent", "Gaussian", "Claimed", "Denoise", "Keep", "LaplacianSmoothing",
    "Averaging", "LowPass", "Kalman", "Chain", "Stream",
]  # fmt: skip
