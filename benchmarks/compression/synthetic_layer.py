"""A synthetic dense layer with correlated inputs, some of them large, and the relative error of its outputs."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class SyntheticLayer:
    """Weights and inputs of a layer, float64.

    Attributes:
      w: weights, [out, in].
      x: calibration inputs, [tokens, in].
      held_out: further inputs, [tokens, in].
    """

    w: np.ndarray
    x: np.ndarray
    held_out: np.ndarray

    @property
    def hessian(self) -> np.ndarray:
        return 2 * self.x.T @ self.x / len(self.x)

    def error(self, w: object) -> float:
        """Return |W' X - W X|^2 / |W X|^2 over the held-out inputs."""
        exact = self.w @ self.held_out.T
        return float(np.square(np.asarray(w, np.float64) @ self.held_out.T - exact).sum() / np.square(exact).sum())


def make_layer(size: int = 256, tokens: int = 2048) -> SyntheticLayer:
    """Return a square layer whose inputs have a spectrum k^-0.8 and four channels eight times as large."""
    random = np.random.default_rng(0)
    rotation, _ = np.linalg.qr(random.normal(size=(size, size)))
    spectrum = 1 / np.arange(1, size + 1) ** 0.8
    x = (random.normal(size=(2 * tokens, size)) * np.sqrt(spectrum * size / spectrum.sum())) @ rotation.T
    x *= np.exp(random.normal(size=size) * 0.6)
    x[:, :4] *= 8
    w = random.normal(size=(size, size)) / np.sqrt(size)
    return SyntheticLayer(w, x[:tokens], x[tokens:])
