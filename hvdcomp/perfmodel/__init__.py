"""The performance model predicts the time of a training step with each compressor, on any network.

The model has four independent parts: `exchanges` (the payloads of a step), `network` (the time of collectives),
`compute` (the time of computation) and `schedule` (the overlap of collectives with computation). `predict` combines
these parts, `calibration` reads their numbers from a file or a preset, and `advice` compares methods. The model needs
only NumPy.

Source: Agarwal et al. 2022, On the Utility of Gradient Compression in Distributed Training Systems, MLSys,
arXiv:2103.00543, section 4.1 and appendices B to D.
"""

from __future__ import annotations

from hvdcomp.perfmodel.advice import STOCK, STOCK_SPECS, Advice, Adviser, Method
from hvdcomp.perfmodel.calibration import Calibration, ModelFacts, as_json, from_json, load, presets, save
from hvdcomp.perfmodel.compute import Compute, EncodeTime
from hvdcomp.perfmodel.exchanges import Collective, Exchange, exchange_of, exchange_of_plan
from hvdcomp.perfmodel.fields import CalibrationError
from hvdcomp.perfmodel.fitting import model_of
from hvdcomp.perfmodel.network import ALGORITHMS, CollectiveCost, Inner, Network, Seconds, network_of_link
from hvdcomp.perfmodel.noise import NOISY, uncertain_shares
from hvdcomp.perfmodel.predict import LIMITS, UNCOMPRESSED, Setting, least_compression_factor, limited_by, predict
from hvdcomp.perfmodel.proposals import Criteria, Proposals, propose
from hvdcomp.perfmodel.rates import parse_rate
from hvdcomp.perfmodel.schedule import Buckets, Parts, cut, overlapped, sequential

__all__ = [
    "ALGORITHMS",
    "LIMITS",
    "NOISY",
    "STOCK",
    "STOCK_SPECS",
    "UNCOMPRESSED",
    "Advice",
    "Adviser",
    "Buckets",
    "Calibration",
    "CalibrationError",
    "Collective",
    "CollectiveCost",
    "Compute",
    "Criteria",
    "EncodeTime",
    "Exchange",
    "Inner",
    "Method",
    "ModelFacts",
    "Network",
    "Parts",
    "Proposals",
    "Seconds",
    "Setting",
    "as_json",
    "cut",
    "exchange_of",
    "exchange_of_plan",
    "from_json",
    "least_compression_factor",
    "limited_by",
    "load",
    "model_of",
    "network_of_link",
    "overlapped",
    "parse_rate",
    "predict",
    "presets",
    "propose",
    "save",
    "sequential",
    "uncertain_shares",
]
