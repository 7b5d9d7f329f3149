"""From a trained model to ranked labels and their metrics."""

from xmlc.evaluation.evaluator import evaluate_model, rank_labels
from xmlc.evaluation.predict import Prediction, Predictor, load

__all__ = ["Prediction", "Predictor", "evaluate_model", "load", "rank_labels"]
