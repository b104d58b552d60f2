"""scikit-learn's `n_jobs` by shmq's workers, through joblib."""

from __future__ import annotations

import os

import joblib
import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.datasets import load_iris
from sklearn.ensemble import RandomForestClassifier
from sklearn.model_selection import GridSearchCV, cross_val_score

import shmq.integrations.joblib  # noqa: F401  # makes the name known


class WhereItRuns(ClassifierMixin, BaseEstimator):
    """A classifier whose score is the process in which it was fitted."""

    def fit(self, data: np.ndarray, target: np.ndarray) -> WhereItRuns:
        self.process = os.getpid()
        self.classes_ = np.unique(target)
        return self

    def predict(self, data: np.ndarray) -> np.ndarray:
        return np.zeros(len(data))

    def score(self, data: np.ndarray, target: np.ndarray) -> float:
        return float(self.process)


def test_a_search_over_a_grid_finds_the_same_as_one_process() -> None:
    data, target = load_iris(return_X_y=True)
    grid = {"max_depth": [1, 2, 4], "min_samples_leaf": [1, 5]}

    def search() -> GridSearchCV:
        return GridSearchCV(RandomForestClassifier(10, random_state=0), grid, n_jobs=2, cv=3)

    with joblib.parallel_config(backend="shmq"):
        ours = search().fit(data, target)
    with joblib.parallel_config(backend="sequential"):
        theirs = search().fit(data, target)
    assert ours.best_params_ == theirs.best_params_
    np.testing.assert_array_equal(
        ours.cv_results_["mean_test_score"], theirs.cv_results_["mean_test_score"]
    )


def test_folds_are_fitted_in_the_workers() -> None:
    data, target = load_iris(return_X_y=True)
    with joblib.parallel_config(backend="shmq", n_jobs=2):
        processes = cross_val_score(WhereItRuns(), data, target, cv=6)
    assert os.getpid() not in processes
    assert 1 <= len(set(processes)) <= 2


def test_a_large_matrix_is_shared_and_not_copied_for_each_fold() -> None:
    data = np.random.default_rng(0).normal(size=(4000, 50))
    target = (data[:, 0] > 0).astype(int)
    with joblib.parallel_config(backend="shmq", n_jobs=2):
        scores = cross_val_score(RandomForestClassifier(5, random_state=0), data, target, cv=4)
    assert scores.min() > 0.8
