"""Features of records from each of them alone and public facts: rows of tables, images, sentences; and their norms.

May import: its folder, hf, metrics and below. Privacy depends on it: no.

What `dpfunc train` gives to a model, for loops.
"""

from dpfunc.features.images import EncoderFeatures, ScatteringFeatures, load_encoder, scattering
from dpfunc.features.tables import TableFeatures
from dpfunc.hf.heads import head_of, measure_feature_norm
from dpfunc.hf.pooled import MeanPooledClassifier, load_mean_pooled

__all__ = [
    "EncoderFeatures", "MeanPooledClassifier", "ScatteringFeatures", "TableFeatures", "head_of", "load_encoder",
    "load_mean_pooled", "measure_feature_norm", "scattering",
]  # fmt: skip
